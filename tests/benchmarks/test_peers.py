"""What the comparison with vLLM makes of its times, and what it takes for the limits; with `vllm bench serve`: its
figures under our names, and the error if it is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

from benchmarks.engine_vs_transformers import Work
from benchmarks.peers.__main__ import RATIO, engine_row, file_name, share_of_decoding, shares, update_summary
from benchmarks.peers.engine_vs_vllm import Comparison, Run, Side, Sides
from benchmarks.peers.vllm_bench_serve import main, our_figures, side_by_side, vllms_figures
from benchmarks.shapes import SHAPES, bytes_of_step, layer_weights, operations_of_prefill, write_config
from tandem.bench.serve.endpoint import RequestRecord
from tandem.bench.serve.report import Point, Results, summarise, write_json
from tandem.demo import MODEL_DIR


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_of_a_step_are_those_of_the_models_weights_and_kv(shape: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(write_config(tmp_path, shape))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)  # the vocabulary's once: tied
    experts = sum(weight.numel() for weight in model.parameters() if weight.dim() == 3)
    matrices += experts * SHAPES[shape].get("num_experts_per_tok", 0) // SHAPES[shape].get("num_experts", 1)
    assert bytes_of_step(shape, 0, 0) == 2 * matrices
    assert layer_weights(shape) == matrices - config.vocab_size * config.hidden_size
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert bytes_of_step(shape, 3, 100) - bytes_of_step(shape, 0, 0) == 3 * 100 * 2 * kv


def test_a_prompt_of_one_token_is_multiplied_with_every_weight_and_sees_itself() -> None:
    heads = SHAPES["33m"]["num_attention_heads"] * SHAPES["33m"]["head_dim"] * SHAPES["33m"]["num_hidden_layers"]
    assert operations_of_prefill("33m", 1, 1) == 2 * layer_weights("33m") + 2 * 2 * heads
    assert operations_of_prefill("33m", 3, 5) == 3 * (2 * 5 * layer_weights("33m") + 2 * 2 * heads * 15)


def compared(
    work: Work, ours_s: Sequence[float], theirs_s: Sequence[float], bandwidths: Sequence[float] = ()
) -> Comparison:
    """Runs of so many seconds; `bandwidths`: of each turn, 1 byte per second if none is given."""
    ours, theirs = (
        [Run(*run) for run in zip(side, bandwidths or [1.0] * len(side), strict=True)] for side in (ours_s, theirs_s)
    )
    return Comparison(work, ours, theirs)


def test_medians_are_compared_and_the_extremes_shown() -> None:
    found = compared(Work(8, 512, 1), [1.0, 2.0, 4.0], [3.0, 3.0, 3.0])
    assert engine_row("33m", "8x512->1", found) == (
        "33m", "8x512->1", "1.000 · 2.000 · 4.000", "3.000 · 3.000 · 3.000", "1.50", "0.75 · 3.00",
    )  # fmt: skip


def test_prompts_are_compared_with_the_products() -> None:
    prompts = compared(Work(16, 4032, 1), [2.0, 2.5], [3.0, 3.1])
    products_s = operations_of_prefill("33m", 16, 4032) / 1e12
    found = list(shares("33m", prompts, speed=1e12))
    assert found == [("16x4032->1", "products", f"{products_s / 2:.0%}", f"{products_s / 3:.0%}")]


def test_one_request_is_compared_with_reading_every_weight_once_a_token() -> None:
    num_bytes = 64 * bytes_of_step("0.6b", 1, 32)
    # The memory's speed changes: each run is compared with what was measured beside it, and the median counts.
    alone = compared(Work(1, 32, 64), [1.0, 1.0, 4.0], [2.0, 2.0, 8.0], bandwidths=[1e11, 1.1e11, 0.5e11])
    [(work, limit, ours, theirs)] = shares("0.6b", alone, speed=1.0)
    assert (work, limit) == ("1x32->64", "memory, 100 GB/s")
    assert (ours, theirs) == (f"{num_bytes / 1.1e11:.0%}", f"{num_bytes / 1.1e11 / 2:.0%}")


def test_a_batch_that_decodes_has_no_single_limit() -> None:
    batch = compared(Work(8, 32, 64), [1.0], [2.0])
    assert not list(shares("33m", batch, speed=1.0))


def test_decoding_alone_is_compared_with_reading_weights_and_kv_once_a_token() -> None:
    found = compared(Work(16, 4032, 3), [2.0], [4.0], bandwidths=[1e9])
    least_s = (bytes_of_step("33m", 16, 4033) + bytes_of_step("33m", 16, 4034)) / 1e9
    row = ("16x4032->3, decoding alone", "memory, 1 GB/s", f"{least_s / 2:.0%}", f"{least_s / 4:.0%}")
    assert share_of_decoding("33m", found) == row


class _Timed(Side):
    """A side whose prompts take a second, and each token 0.1 s."""

    def seconds(self, work: Work, seed: int) -> float:
        return 0.1 * work.output_len + 1.0


def test_decoding_alone_is_the_difference_of_two_runs_with_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(range(10, 100, 10))
    monkeypatch.setattr("benchmarks.peers.engine_vs_vllm.measure_bandwidth", lambda threads: next(readings))
    side = _Timed(None, 0.0)  # type: ignore[arg-type]
    found = Sides(side, side, threads=2).compare_decoding(Work(16, 4032, 64), repeat=2)
    assert found.ours_s == found.theirs_s == pytest.approx((6.3, 6.3))
    # Before and after each run: 10 ours 20 theirs 30 to warm up, then 30 ours 40 theirs 50 ours 60 theirs 70.
    assert [run.bandwidth for run in found.ours] == [35, 55]
    assert [run.bandwidth for run in found.theirs] == [45, 65]


PAGE = """\
# Tandem beside vLLM: {name}

2026-11-2{day} 10:00 UTC · 2 cores

| shape | work | Tandem, s | {last} | least · most |
| --- | --- | --- | --- | --- |
{rows}

| connector | ratio |
| --- | --- |
| nixl | 1.05 |
"""


def test_the_summary_has_each_work_once_and_a_column_for_each_page(tmp_path: Path) -> None:
    summary_page, pages = tmp_path / "RESULTS.md", tmp_path / "results"
    pages.mkdir()
    few, more = "| 33m | 1x1->1 | 2 | 1.5 | |", "| 33m | 1x1->2 | 2 | 1.6 | |\n| 33m | 1x1->1 | 2 | 1.7 | |"
    for day, (name, rows) in enumerate((("A 1", few), ("B", more))):
        text = PAGE.format(name=name, day=day, last=RATIO, rows=rows)
        (pages / f"{file_name(name)}.md").write_text(text)
    summary_page.write_text("<!-- figures: ratios -->\nold\n<!-- end of figures: ratios -->\n")
    update_summary(summary_page, pages)
    table = [line for line in summary_page.read_text().splitlines() if line.startswith("|")]
    assert table[0] == "| shape | work | [A 1](results/a-1.md) | [B](results/b.md) |"
    assert table[2:] == [
        "|  | measured | 2026-11-20 | 2026-11-21 |",
        "| 33m | 1x1->2 |  | 1.6 |",
        "| 33m | 1x1->1 | 1.5 | 1.7 |",
    ]


COMMON = ("--model", "fake", "--tokenizer", str(MODEL_DIR))


def test_a_missing_vllm_is_reported() -> None:
    result = CliRunner().invoke(main, ["--url", "http://127.0.0.1:1", *COMMON, "--vllm", "no-such-vllm"])
    assert result.exit_code == 1
    assert "`no-such-vllm` was not found" in result.output
    assert "--vllm PATH" in result.output


def test_a_run_that_fails_ends_it_with_its_message(tmp_path: Path) -> None:
    broken = tmp_path / "vllm"
    broken.write_text(f"#!{sys.executable}\nimport sys; sys.exit('it is broken')\n")
    broken.chmod(0o700)
    result = CliRunner().invoke(main, ["--url", "http://127.0.0.1:1", *COMMON, "--vllm", str(broken)])
    assert result.exit_code == 1
    assert "failed (1)" in result.output


def test_equal_runs_have_ratios_of_one(tmp_path: Path) -> None:
    # two requests: TTFT 100 and 300 ms, gaps 50 and 150 ms, E2E 150 and 450 ms; 0.45 s in all
    run = [RequestRecord(0, 0, 8, 2, [0.1, 0.15], 0.15), RequestRecord(0, 0, 8, 2, [0.3, 0.45], 0.45)]
    write_json(tmp_path / "j", Results("", "", {}, [Point(1.0, summarise(run))]), with_records=False)
    ours = our_figures(json.loads((tmp_path / "j").read_text()))
    theirs = {"request_throughput": 2 / 0.45, "output_throughput": 4 / 0.45, "completed": 2, "total_output_tokens": 4}
    for metric, low, high in (("ttft", 100, 300), ("itl", 50, 150), ("tpot", 50, 150), ("e2el", 150, 450)):
        theirs[f"mean_{metric}_ms"] = (low + high) / 2
        theirs |= {f"p{part}_{metric}_ms": low + (high - low) * part / 100 for part in (50, 90, 95, 99)}
    assert ours == pytest.approx(vllms_figures(theirs))
    head, *lines = side_by_side([ours], [vllms_figures(theirs)])
    assert head.split() == ["tandem", "vllm", "ratio"]
    assert len(lines) == len(ours)
    assert all(line.endswith("   1.000") for line in lines)


def test_a_figure_is_the_median_of_the_rounds() -> None:
    (_, line) = side_by_side([{"x": 1.0}, {"x": 6.0}, {"x": 2.0}], [{"x": 4.0}, {"x": 4.0}, {"x": 0.0}])
    assert line.split() == ["x", "2.00", "4.00", "0.500"]
