from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def worker(names_of_vllm: None) -> Any:
    return importlib.import_module("vllm_engine.worker")


def test_layers_that_share_their_kv_count_once(worker: Any) -> None:
    """As in Gemma 3n: vLLM lists the one memory for each of them, and a page has it once."""
    own, shared = torch.zeros(4, 32), torch.zeros(4, 32)
    facts = worker.WorkerFacts()
    facts.model_runner = SimpleNamespace(kv_caches=[own, shared, shared.view(4, 32)], attn_groups=[])
    found = facts.tandem_facts()
    assert found["kv_bytes"] == 2 * 4 * 32 * 4
    assert found["kv_shape"] == [[4, 32], [4, 32]]


def test_a_failure_is_seen_by_its_own_request_alone(worker: Any, tmp_path: Path) -> None:
    failed = worker.FailedRequests(tmp_path)
    first_worker, second_worker = worker.FailureLog(tmp_path), worker.FailureLog(tmp_path)
    assert not failed.take("a")
    first_worker.add("a", is_finite=True)
    second_worker.add("a", is_finite=True)
    first_worker.add("b", is_finite=True)
    assert [bool(failed.take(request_id)) for request_id in ("a", "b", "c", "a")] == [True, True, False, True]


@pytest.mark.parametrize(("is_finite", "kind"), [(True, "nothing_allowed"), (False, None)])
def test_logits_that_are_not_finite_are_not_the_requests_fault(
    worker: Any, tmp_path: Path, is_finite: bool, kind: str | None
) -> None:
    worker.FailureLog(tmp_path).add("a", is_finite=is_finite)
    failure = worker.FailedRequests(tmp_path).take("a")
    assert failure is not None
    assert failure[1] == kind


@pytest.mark.parametrize("looks", [True, False])
def test_the_first_cause_of_a_failure_stays(worker: Any, tmp_path: Path, looks: bool) -> None:
    failed, log = worker.FailedRequests(tmp_path), worker.FailureLog(tmp_path)
    log.add("a", is_finite=False)
    first = failed.take("a") if looks else None
    log.add("a", is_finite=True)
    failure = failed.take("a")
    assert failure is not None
    assert "not finite" in failure[0]
    assert first in (failure, None)


def test_a_request_that_has_ended_is_forgotten(worker: Any, tmp_path: Path) -> None:
    failed, log = worker.FailedRequests(tmp_path), worker.FailureLog(tmp_path)
    log.add("a", is_finite=True)
    assert failed.take("a")
    failed.forget("a")
    assert not failed.take("a")
