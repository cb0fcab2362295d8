from __future__ import annotations

import errno
from pathlib import Path

import pytest

from engine.errors import CANNOT_START, start_status
from vllm_engine.failures import FailedRequests, FailureLog, end_error, start_error


def test_a_failure_is_seen_by_its_own_request_alone(tmp_path: Path) -> None:
    failed, first_worker, second_worker = FailedRequests(tmp_path), FailureLog(tmp_path), FailureLog(tmp_path)
    assert not failed.take("a")
    first_worker.add("a", is_finite=True)
    second_worker.add("a", is_finite=True)
    first_worker.add("b", is_finite=True)
    assert [bool(failed.take(request_id)) for request_id in ("a", "b", "c", "a")] == [True, True, False, True]


@pytest.mark.parametrize(("is_finite", "kind"), [(True, "nothing_allowed"), (False, None)])
def test_logits_that_are_not_finite_are_not_the_requests_fault(
    tmp_path: Path, is_finite: bool, kind: str | None
) -> None:
    FailureLog(tmp_path).add("a", is_finite=is_finite)
    failure = FailedRequests(tmp_path).take("a")
    assert failure is not None
    assert failure[1] == kind


@pytest.mark.parametrize("looks", [True, False])
def test_the_first_cause_of_a_failure_stays(tmp_path: Path, looks: bool) -> None:
    failed, log = FailedRequests(tmp_path), FailureLog(tmp_path)
    log.add("a", is_finite=False)
    first = failed.take("a") if looks else None
    log.add("a", is_finite=True)
    failure = failed.take("a")
    assert failure is not None
    assert "not finite" in failure[0]
    assert first in (failure, None)


def test_a_request_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    failed, log = FailedRequests(tmp_path), FailureLog(tmp_path)
    log.add("a", is_finite=True)
    assert failed.take("a")
    failed.forget("a")
    assert not failed.take("a")


@pytest.mark.parametrize(
    ("text", "is_lasting"),
    [
        ("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': -9}", False),
        ("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}", True),
        ("max_model_len is -9", True),
    ],
)
def test_a_start_that_a_signal_has_ended_may_succeed_later(text: str, is_lasting: bool) -> None:
    error = start_error(RuntimeError(text))
    assert str(error) == f"vLLM does not start: {text}"
    assert start_status(error) == (CANNOT_START if is_lasting else 1)


def test_an_end_of_vllm_is_no_error_of_its_settings() -> None:
    assert start_status(end_error(RuntimeError("EngineCore encountered an issue"))) == 1


def test_a_start_without_a_descriptor_may_succeed_later() -> None:
    error = start_error(RuntimeError("none"))
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert start_status(error) == 1
