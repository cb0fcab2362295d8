"""The engine's own bench counts every token once, measures steps as long as they are, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from engine import LLM
from engine.core.messages import Event, TokensEvent
from tandem.bench.offline import Batch, CannotMeasure, measure_latency, measure_throughput, spread_lengths
from tandem.cli import main
from tandem.demo import MODEL_DIR
from tests.builders import lively_model

STEP_S = 0.05


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(
        MODEL_DIR,
        skip_tokenizer_init=True,
        num_threads=1,
        num_gpu_blocks_override=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )
    yield made
    made.core.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    yield
    load = llm.core.load
    assert (load.num_waiting, load.num_running, load.running_blocks) == (0, 0, 0)


def test_steps_count_from_the_last_first_token_to_the_first_end(llm: LLM) -> None:
    # 4 prompts of 16 are one chunk of 64: all begin in one step, and 9 more give the other tokens
    together = measure_latency(llm, Batch(4, 16, 10), num_iterations=3, num_warm_up=0)
    assert (together.prefill.count, together.token.count, together.total.count) == (3, 3 * 9, 3)
    # 2 prompts of 64 take a step each at least: the first request is ahead of the second and ends before it
    apart = measure_latency(llm, Batch(2, 64, 10), num_iterations=1, num_warm_up=0)
    assert 0 < apart.token.count < 9
    alone = measure_latency(llm, Batch(1, 16, 1), num_iterations=1, num_warm_up=0)
    assert alone.token.count == 0
    assert alone.output_tokens_per_s == 0


def test_a_step_that_did_not_serve_all_is_not_one_of_all(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, num_served = llm.core.step, []

    def watched_step() -> list[Event]:
        events = step()
        num_served.append(len({event.request_id for event in events if isinstance(event, TokensEvent)}))
        return events

    monkeypatch.setattr(llm.core, "step", watched_step)
    result = measure_latency(llm, Batch(8, 200, 50), num_iterations=1, num_warm_up=0)
    assert any(0 < number < 8 for number in num_served)
    assert 0 < result.token.count <= num_served.count(8)


def test_figures_are_as_long_as_the_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.core.step

    def slow_step() -> object:
        time.sleep(STEP_S)
        return step()

    monkeypatch.setattr(llm.core, "step", slow_step)
    result = measure_latency(llm, Batch(2, 128, 5), num_iterations=1, num_warm_up=0)
    assert result.prefill.p50 >= 4 * STEP_S * 1e3  # 256 tokens in chunks of 64
    assert result.token.p50 >= STEP_S * 1e3
    assert result.total.p50 >= result.prefill.p50 + result.token.count * STEP_S * 1e3
    assert result.prefill_tokens_per_s == pytest.approx(256 / result.prefill.p50 * 1e3)
    assert result.output_tokens_per_s == pytest.approx(2 / result.token.p50 * 1e3)


def test_warm_up_does_not_count_but_is_reported_as_progress(llm: LLM) -> None:
    progress: list[int] = []
    result = measure_latency(llm, Batch(1, 8, 2), num_iterations=2, num_warm_up=3, on_progress=progress.append)
    assert sum(progress) == 5
    assert result.total.count == 2


def test_what_has_no_room_is_refused_with_the_flag_that_makes_room(llm: LLM) -> None:
    limit = llm.core.info.max_model_len
    with pytest.raises(CannotMeasure, match=rf"{limit} are allowed; lower --input-len"):
        measure_latency(llm, Batch(1, limit, 1), num_iterations=1, num_warm_up=0)
    with pytest.raises(CannotMeasure, match="runs 8 requests; give --max-num-seqs 9"):
        measure_latency(llm, Batch(9, 8, 1), num_iterations=1, num_warm_up=0)
    with pytest.raises(CannotMeasure, match="2056 tokens, and there is room for 2048; give more --kv-memory"):
        measure_latency(llm, Batch(8, 200, 57), num_iterations=1, num_warm_up=0)
    with pytest.raises(CannotMeasure, match="--output-len"):
        measure_throughput(llm, [(8, 8), (8, limit)])


def test_latency_is_that_of_the_engines_own_threads(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, used = llm.core.step, set[int]()

    def watched_step() -> list[Event]:
        used.add(torch.get_num_threads())
        return step()

    monkeypatch.setattr(llm.core, "step", watched_step)
    torch.set_num_threads(2)
    measure_latency(llm, Batch(1, 8, 2), num_iterations=1, num_warm_up=1)
    assert used == {1}


def test_throughput_of_a_model_that_fails_is_not_measured(tmp_path: Path) -> None:
    model = lively_model("llama", tie_word_embeddings=False)
    model.model.embed_tokens.weight.data[3:] = torch.nan  # the warm-up takes token 0
    model.save_pretrained(tmp_path)
    broken = LLM(tmp_path, skip_tokenizer_init=True, num_gpu_blocks_override=64)
    with pytest.raises(CannotMeasure, match="a request failed: the model's logits are not finite"):
        measure_throughput(broken, [(5, 3)])


def test_throughput_counts_every_token_of_the_measured_requests(llm: LLM) -> None:
    lengths = [(5, 3), (70, 1), (16, 12)]
    result = measure_throughput(llm, lengths, num_warm_up=2)
    assert (result.num_requests, result.num_prompt_tokens, result.num_output_tokens) == (3, 91, 16)
    assert result.output_tokens_per_s == pytest.approx(16 / result.duration_s)
    assert result.prompt_tokens_per_s / result.requests_per_s == pytest.approx(91 / 3)


@given(st.integers(1, 50), st.integers(1, 300), st.integers(1, 300), st.floats(0, 1), st.integers(0, 9))
def test_lengths_stay_within_their_spread(num: int, input_len: int, output_len: int, spread: float, seed: int) -> None:
    lengths = spread_lengths(num, input_len, output_len, spread, seed)
    assert len(lengths) == num
    assert lengths == spread_lengths(num, input_len, output_len, spread, seed)
    for pair in lengths:
        for length, mean in zip(pair, (input_len, output_len), strict=True):
            assert max(1, mean * (1 - spread) - 1) <= length <= mean * (1 + spread) + 1


SMALL = ["--threads", "1", "--kv-memory", "0.05", "--input-len", "8", "--output-len", "4"]


def bench(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["bench", *args])
    return result.exit_code, result.output


def test_progress_goes_to_terminals_alone() -> None:
    status, output = bench("throughput", *SMALL, "--num-prompts", "4")
    assert (status, output.partition(" requests")[0]) == (0, "4"), output


def test_a_closed_standard_error_shows_no_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    main(["bench", "throughput", *SMALL, "--num-prompts", "4"], standalone_mode=False)
    assert capsys.readouterr().out.startswith("4 requests")


def test_the_command_latency_prints_what_it_writes_to_json(tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    status, output = bench(
        "latency", *SMALL, "--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "1", "--json", str(file)
    )
    assert status == 0, output
    written = json.loads(file.read_text())
    assert written["batch"] == {"size": 2, "input_len": 8, "output_len": 4}
    assert (written["prefill"]["count"], written["token"]["count"]) == (3, 9)
    assert written["machine"]["cores"] >= 1
    for name in ("prefill", "token", "total"):
        assert f"{name:9}{written[name]['mean']:10.2f}{written[name]['p50']:10.2f}" in output


def test_the_command_throughput_takes_random_weights_of_a_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODEL_DIR / "config.json").read_text())
    file = tmp_path / "throughput.json"
    options = ["--model", str(tmp_path), "--load-format", "dummy", "--num-prompts", "3", "--json", str(file)]
    status, output = bench("throughput", *SMALL, *options)
    assert status == 0, output
    written = json.loads(file.read_text())
    assert (written["num_prompt_tokens"], written["num_output_tokens"]) == (24, 12)
    assert f"{'output tokens/s':20}{written['output_tokens_per_s']:12.1f}" in output


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, output = bench("latency", *SMALL, "--device", "cuda")
    assert status == 1
    assert output == "Error: --device cuda: torch finds no GPU on this machine; omit it to use the CPU\n"


def test_a_missing_model_and_a_too_small_one_are_answered_with_what_to_type() -> None:
    status, output = bench("latency", "--model", "./nowhere")
    assert status == 1
    assert "give a folder with config.json" in output
    status, output = bench("throughput", *SMALL, "--output-len", "1000000")
    assert status == 1
    assert "lower --input-len or --output-len" in output
