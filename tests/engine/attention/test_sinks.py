"""Attention sinks: every backend computes the softmax with one more score, which has no value."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention import AttentionMetadata, select_backend
from engine.attention.reference import gather_kv
from engine.errors import UnsupportedModel
from tests.engine.attention.paged_step import in_vectors, paged_step, paged_tensors
from tests.engine.attention.test_attention_backends import BFLOAT16_STEP, TOLERANCE, multiplying, products_of

LAYER, SCALE = 1, 0.3
SIZES: dict[str, Any] = {"block_size": 16, "kv_heads": 2, "group": 3, "head_dim": 64}
REQUESTS = [(1, 300), (20, 70), (1, 5), (33, 33)]
SINKS = torch.tensor([-float("inf"), -3.0, 0.0, 4.0, 9.0, 1e4])
BACKENDS = ["cpu", "cpu in pairs", "cpu in tiles", "triton", "reference"]


def attend(
    name: str, dtype: torch.dtype, window: int | None, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backend's results, and those of the definition in float64."""
    metadata, _, num_blocks = paged_step(REQUESTS, block_size=16)
    query, key, value, cache = paged_tensors(metadata, num_blocks, **SIZES, dtype=dtype)
    backend = select_backend(name.split()[0], block_size=16, head_dim=64, dtype=dtype, device=torch.device("cpu"))
    options: dict[str, Any] = {"layer": LAYER, "metadata": metadata, "scale": SCALE, "sliding_window": window}
    pages = in_vectors(cache) if backend.name == "cpu" else cache.clone()
    with multiplying(products_of(name)) if backend.name == "cpu" else nullcontext():
        found = backend.forward(query, key, value, pages, **options, sinks=sinks)
    block, offset = metadata.slot_mapping // 16, metadata.slot_mapping % 16
    cache[block, LAYER, 0, :, offset], cache[block, LAYER, 1, :, offset] = key, value
    return found, by_definition(query, cache, metadata, window, sinks)


def by_definition(
    query: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    sinks = torch.full((query.shape[1],), -float("inf")) if sinks is None else sinks
    rows = []
    for table, seq_len, tokens in zip(
        metadata.block_tables,
        metadata.seq_lens.tolist(),
        query.split(metadata.query_start_loc.diff().tolist()),
        strict=True,
    ):
        keys, values = (
            one.double().repeat_interleave(SIZES["group"], dim=1)
            for one in gather_kv(cache, table, layer=LAYER, seq_len=seq_len)
        )
        for position, row in enumerate(tokens.double(), seq_len - len(tokens)):
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            powers = torch.exp(torch.einsum("hd,shd->hs", row, keys[seen]) * SCALE)
            total = powers.sum(1) + torch.exp(sinks.double())
            rows.append(torch.einsum("hs,shd->hd", powers, values[seen]) / total[:, None])
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_sink_takes_its_part_of_the_sum_and_adds_no_value(name: str, dtype: torch.dtype, window: int | None) -> None:
    found, expected = attend(name, dtype, window, SINKS)
    assert found[:, -1].abs().max() <= 1e-30
    torch.testing.assert_close(
        found.double(), expected, atol=TOLERANCE[dtype], rtol=BFLOAT16_STEP if products_of(name) != "floats" else 0
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", BACKENDS)
def test_sinks_of_minus_infinity_change_no_bit(name: str, dtype: torch.dtype) -> None:
    none, of_nothing = (attend(name, dtype, 40, sinks)[0] for sinks in (None, torch.full((6,), -float("inf"))))
    assert torch.equal(none, of_nothing)
    assert not torch.equal(none, attend(name, dtype, 40, SINKS)[0])


def test_a_model_with_sinks_does_not_run_by_the_library_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=None))
    sizes: dict[str, Any] = {"block_size": 256, "head_dim": 64, "dtype": torch.bfloat16, "device": torch.device("cuda")}
    assert select_backend("auto", **sizes).name == "flash"
    assert select_backend("auto", **sizes, has_sinks=True).name == "triton"
    with pytest.raises(UnsupportedModel, match="attention backend flash has no attention sinks"):
        select_backend("flash", **sizes, has_sinks=True)
