from __future__ import annotations

import importlib
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
