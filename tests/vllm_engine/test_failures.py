from __future__ import annotations

from pathlib import Path

from vllm_engine.failures import FailedRequests, FailureLog


def test_a_failure_is_seen_by_its_own_request_alone(tmp_path: Path) -> None:
    failed, first_worker, second_worker = FailedRequests(tmp_path), FailureLog(tmp_path), FailureLog(tmp_path)
    assert not failed.take("a")
    first_worker.add("a")
    second_worker.add("a")
    first_worker.add("b")
    assert [failed.take(request_id) for request_id in ("a", "b", "c", "a")] == [True, True, False, True]


def test_a_request_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    failed, log = FailedRequests(tmp_path), FailureLog(tmp_path)
    log.add("a")
    assert failed.take("a")
    failed.forget("a")
    assert not failed.take("a")
