"""Finished I/O reaches the scheduler before a command that frees its blocks; long steps are predicted as long, so that
they are not mistaken for a hung model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, KVConnectorConfig
from engine.core.core import EngineCore, StepTimeEstimator
from engine.core.messages import AbortRequests, AddRequest, EngineRequest, RemoteKV, TokensEvent
from engine.kv_connector import KVConnectorOutput, KVLoadResult, NullKVConnector
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request
from tests.builders import lively_checkpoint


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
