"""Finished I/O reaches the scheduler before a command that frees its blocks; long steps are predicted as long, so that
they are not mistaken for a hung model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import engine.core.core as core_module
from engine.config import Dtype, EngineConfig, KVConnectorConfig
from engine.core.core import EngineCore, StepTimeEstimator
from engine.core.messages import AbortRequests, AddRequest, EngineRequest, HoldKV, RemoteKV, TokensEvent
from engine.errors import CheckpointChanged, EngineError, may_pass
from engine.executor.executor import Executor
from engine.executor.multiprocess import make_executor
from engine.kv_connector import KVConnectorOutput, KVLoadResult, NullKVConnector
from engine.model_runner import ModelRunner
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request
from tests.builders import lively_checkpoint, lively_model
from tests.files_below import files_below
from tests.kv_transfer.core_pair import store_config
from tests.waiting import wait_until


class ScriptedConnector(NullKVConnector):
    """Says what the test wants at the next poll."""

    def __init__(self, *, wake: Callable[[], None]) -> None:
        super().__init__(wake=wake)
        self.next = KVConnectorOutput()
        self.num_pinned = 0

    @property
    def num_quarantined_blocks(self) -> int:
        return self.num_pinned

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return request.num_initial_tokens - num_computed_tokens

    def poll(self) -> KVConnectorOutput:
        output, self.next = self.next, KVConnectorOutput()
        return output


def loading_core(tmp_path: Path) -> tuple[EngineCore, Any]:
    """A core that loads three blocks for request "r", and its connector."""
    connector_config = KVConnectorConfig(class_path="tests.engine.core.test_core:ScriptedConnector")
    config = EngineConfig(
        model=str(lively_checkpoint(tmp_path / "model", "llama")),
        dtype="float32",
        num_blocks=16,
        kv_connector=connector_config,
    )
    core = EngineCore(config, wake=lambda: None)
    connector: Any = core._connector
    assert type(connector).__name__ == "ScriptedConnector"
    remote = RemoteKV(transfer_id="t", reservation_s=60.0)
    spec = EngineRequest(request_id="r", prompt_token_ids=list(range(40)), params=SamplingParams(), remote_kv=remote)
    core.handle(AddRequest(spec))
    core.step()
    return core, connector


def test_an_abort_does_not_free_blocks_that_a_given_up_read_may_write_to(tmp_path: Path) -> None:
    core, connector = loading_core(tmp_path)
    given_up = KVLoadResult("r", 0, 0, 3, reason="late", retained_id="late")
    connector.next.loaded.append(given_up)

    # STEP the result is collected while a step computes, and the abort comes before the next one begins
    core.poll_connector()
    core.handle(AbortRequests(["r"]))
    assert core.load.held_blocks == 3
    core.step()
    assert core.load.held_blocks == 3
    connector.next.freed_request_ids.append("late")
    core.step()
    assert core.load.held_blocks == 0
    core.shutdown()


def test_blocks_that_are_pinned_before_the_scheduler_hears_of_it_are_in_one_class(tmp_path: Path) -> None:
    core, connector = loading_core(tmp_path)
    connector.num_pinned = 3
    load = core.load
    classes = (load.free_blocks, load.cached_blocks, load.running_blocks, load.held_blocks, load.quarantined_blocks)
    assert classes == (13, 0, 0, 0, 3)
    core.shutdown()


def test_blocks_that_a_given_up_read_does_not_write_to_are_free(tmp_path: Path) -> None:
    core, connector = loading_core(tmp_path)
    [written, *_] = core.scheduler.kv.block_ids("r")
    connector.next.loaded.append(KVLoadResult("r", 0, 0, 3, reason="late", retained_id="late"))
    connector.next.needed["late"] = frozenset({written})
    core.poll_connector()  # as while a step computes
    core.step()
    assert core.scheduler.held.ids == {written}
    connector.next.freed_request_ids.append("late")
    core.step()
    assert core.load.held_blocks == 0
    core.shutdown()


def test_an_id_whose_blocks_are_held_is_rejected(tmp_path: Path) -> None:
    """The blocks of the earlier request would lose their owner."""
    core, connector = loading_core(tmp_path)
    connector.next.loaded.append(KVLoadResult("r", 0, 0, 3, reason="late", retained_id="again"))
    core.step()
    again = EngineRequest(request_id="again", prompt_token_ids=[1, 2], params=SamplingParams())
    core.handle(AddRequest(again))
    [event] = [event for event in core.take_events() if isinstance(event, TokensEvent) and event.request_id == "again"]
    assert (event.finish_reason, event.error_kind) == ("error", "id_in_use")
    assert core.load.held_blocks == 3
    connector.next.freed_request_ids.append("again")
    core.poll_connector()  # as while a step computes
    core.handle(AddRequest(again))
    assert not core.take_events()
    core.shutdown()


def test_a_start_that_fails_behind_the_connector_shuts_it_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[NullKVConnector] = []

    def shutdown(connector: NullKVConnector) -> None:
        ended.append(connector)

    def warm_up(runner: ModelRunner) -> float:
        raise EngineError("no kernels")

    monkeypatch.setattr(ScriptedConnector, "shutdown", shutdown)
    monkeypatch.setattr(ModelRunner, "warm_up", warm_up)
    with pytest.raises(EngineError, match="no kernels"):
        loading_core(tmp_path)
    assert len(ended) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_checkpoint_that_is_replaced_while_it_is_loaded_does_not_start(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity would be that of the new files, and the KV that of the old ones."""
    folder, new = (lively_checkpoint(tmp_path / one, "llama", seed=seed) for seed, one in enumerate(("model", "new")))
    (new / "config.json").write_text((new / "config.json").read_text() + "\n")
    config = EngineConfig(model=str(folder), dtype="float32", num_blocks=16)

    def make_and_replace(*arguments: Any) -> Executor:
        executor = make_executor(*arguments)
        (new / name).replace(folder / name)
        return executor

    monkeypatch.setattr(core_module, "make_executor", make_and_replace)
    with pytest.raises(CheckpointChanged, match=f"'{name}' of .* changed while the engine loaded it; start it again"):
        EngineCore(config, wake=lambda: None)
    assert may_pass(CheckpointChanged())
    monkeypatch.undo()
    EngineCore(config, wake=lambda: None).shutdown()


BROKEN_ID = 999
SHARED = list(range(20, 52))
BROKEN = [*SHARED, *range(100, 110), BROKEN_ID, *range(120, 300)]
"""In chunks of 64 tokens, the broken one in the first of them, which samples nothing."""
SPLIT: dict[str, Any] = {"max_num_batched_tokens": 64, "num_blocks": 64}


def broken_model(folder: Path) -> Path:
    """One of its tokens has keys and values that are not finite."""
    model = lively_model("llama", tie_word_embeddings=False)
    model.model.embed_tokens.weight.data[BROKEN_ID] = torch.inf
    model.save_pretrained(folder)
    return folder


def answered(core: EngineCore, prompt: list[int], **fields: Any) -> list[TokensEvent]:
    """All events of a request with this prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    core.handle(AddRequest(EngineRequest(request_id="one", prompt_token_ids=prompt, params=params, **fields)))
    events: list[TokensEvent] = []
    while not events or events[-1].finish_reason is None:
        events += [event for event in core.step() if isinstance(event, TokensEvent)]
    return events


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_backend": "reference"},
        {"model_impl": "transformers"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_request_finds_the_beginning_of_a_prompt_whose_kv_is_not_finite(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Every request with that beginning would fail."""
    config = EngineConfig(model=str(broken_model(tmp_path)), dtype="float32", **SPLIT, **options)
    other = [*SHARED, 7, 8, 9]
    alone = msgspec.structs.replace(config, tensor_parallel_size=1, pipeline_parallel_size=1)
    core = EngineCore(alone, wake=lambda: None)
    expected = [event.token_ids for event in answered(core, other)]
    core.shutdown()
    core = EngineCore(config, wake=lambda: None)
    [failed] = answered(core, BROKEN)
    assert failed.error == "the model's keys and values are not finite: no token can be sampled"
    assert core.load.num_steps == 1
    found = answered(core, other)
    assert found[0].num_cached_tokens == 0
    assert [event.token_ids for event in found] == expected
    assert answered(core, other)[0].num_cached_tokens == len(SHARED)
    core.shutdown()


def test_the_beginning_of_a_prompt_whose_kv_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    core = EngineCore(store_config(broken_model(tmp_path / "model"), tmp_path, **SPLIT), wake=lambda: None)
    whole = [one for one in BROKEN if one != BROKEN_ID]
    assert answered(core, whole, hold_kv=HoldKV(transfer_id="whole", lease_s=60.0))[-1].finish_reason == "hand_over"
    wait_until(lambda: files_below(tmp_path / "store"), "nothing was saved")  # what has not begun, a shutdown drops
    core.shutdown()
    other = tmp_path / "other"
    core = EngineCore(store_config(tmp_path / "model", other, **SPLIT), wake=lambda: None)
    [failed] = answered(core, BROKEN, hold_kv=HoldKV(transfer_id="broken", lease_s=60.0))
    assert failed.finish_reason == "error"
    core.shutdown()
    assert not files_below(other / "store")


def test_a_big_chunk_is_predicted_long_before_any_was_computed() -> None:
    estimator = StepTimeEstimator(token_s=0.002)
    estimator.predict(2048)
    assert estimator.predicted_s == pytest.approx(4.096)


def test_prediction_follows_what_steps_took() -> None:
    estimator = StepTimeEstimator(token_s=0.002)
    for _ in range(50):
        estimator.predict(512)
        estimator.record(0.5, 512)
        estimator.predict(4)
        estimator.record(0.03, 4)
    estimator.predict(512)
    assert estimator.predicted_s == pytest.approx(0.5, rel=0.01)
    estimator.predict(1)
    assert estimator.predicted_s == pytest.approx(0.03, rel=0.01)


def test_an_idle_turn_keeps_the_prediction() -> None:
    estimator = StepTimeEstimator(token_s=0.01)
    estimator.predict(100)
    estimator.predict(0)
    assert estimator.predicted_s == pytest.approx(1.0)


def test_a_short_prompt_is_predicted_by_its_tokens_too() -> None:
    estimator = StepTimeEstimator(token_s=0.04)
    estimator.predict(50)
    assert estimator.predicted_s == pytest.approx(2.0), "before any step"
    for _ in range(50):
        estimator.record(0.4, 1)
    estimator.predict(50)
    assert estimator.predicted_s == pytest.approx(2.0), "single tokens say little about it"
    estimator.predict(1)
    assert estimator.predicted_s == pytest.approx(0.4, rel=0.01)


@pytest.mark.parametrize(("dtype", "is_named"), [("float16", True), ("bfloat16", False)])
def test_float16_is_named_as_slow_on_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: Dtype, *, is_named: bool
) -> None:
    caplog.set_level(logging.INFO, "engine.core")
    config = EngineConfig(model=str(lively_checkpoint(tmp_path)), dtype=dtype, num_blocks=8, num_threads=1)
    EngineCore(config, lambda: None).shutdown()
    assert any("--dtype bfloat16 is faster" in message for message in caplog.messages) == is_named
