from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch


@pytest.mark.usefixtures("names_of_vllm")
def test_layers_that_share_their_kv_count_once() -> None:
    """As in Gemma 3n: vLLM lists the one memory for each of them, and a page has it once."""
    own, shared = torch.zeros(4, 32), torch.zeros(4, 32)
    facts = importlib.import_module("vllm_engine.worker").WorkerFacts()
    facts.model_runner = SimpleNamespace(kv_caches=[own, shared, shared.view(4, 32)], attn_groups=[])
    found = facts.tandem_facts()
    assert found["kv_bytes"] == 2 * 4 * 32 * 4
    assert found["kv_shape"] == [[4, 32], [4, 32]]
