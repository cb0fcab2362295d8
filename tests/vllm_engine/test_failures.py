from __future__ import annotations

from pathlib import Path

import pytest

from vllm_engine.failures import FailedRequests, FailureLog


def test_a_failure_is_seen_by_its_own_request_alone(tmp_path: Path) -> None:
    failed = FailedRequests(tmp_path)
    first_worker, second_worker = FailureLog(tmp_path), FailureLog(tmp_path)
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


def test_what_was_read_takes_no_room_on_the_disk(tmp_path: Path) -> None:
    failed, log = FailedRequests(tmp_path), FailureLog(tmp_path)
    [file] = tmp_path.iterdir()
    for _ in range(3):
        with file.open("ab") as other:
            other.write(b"ended 1\n" * 200_000)
        log.add("a", is_finite=False)
        failure = failed.take("a", {"a"})
        assert failure is not None
        assert "not finite" in failure[0]
        failed.forget("a")
    assert file.stat().st_size > 4 << 20
    assert file.stat().st_blocks * 512 < 1 << 20


def test_failures_of_others_are_kept_while_they_run(tmp_path: Path) -> None:
    failed, log = FailedRequests(tmp_path), FailureLog(tmp_path)
    for request_id in ("a", "ended", "b"):
        log.add(request_id, is_finite=True)
    assert failed.take("a", {"a", "b"})
    assert failed._failures.keys() == {"a", "b"}
