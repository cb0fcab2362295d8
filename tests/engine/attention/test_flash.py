"""What the library flash-attn is called with: a stand-in of its function, by its documentation, gives the reference's
results."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention import select_backend
from engine.attention.flash import FlashAttention
from engine.attention.reference import ReferenceAttention
from engine.errors import UnsupportedModel
from tests.engine.attention.paged_step import paged_step, paged_tensors

SIZES: dict[str, Any] = {"block_size": 256, "head_dim": 64, "dtype": torch.bfloat16, "device": torch.device("cuda")}


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, softmax_scale: float, causal: bool, window_size: tuple[int, int],
    softcap: float, block_table: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """By definition, with the checks of the library. `causal`: the last query sees the last key."""
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1
    for starts in (cu_seqlens_q, cu_seqlens_k):
        assert starts.dtype == block_table.dtype == torch.int32
        assert starts.is_contiguous()
    assert causal
    output = torch.empty_like(q)
    for index, table in enumerate(block_table):
        rows = slice(int(cu_seqlens_q[index]), int(cu_seqlens_q[index + 1]))
        num_keys, num_queries = int(cu_seqlens_k[index + 1] - cu_seqlens_k[index]), rows.stop - rows.start
        assert num_queries <= max_seqlen_q
        assert num_keys <= max_seqlen_k
        keys, values = (pages[table.long()].flatten(0, 1)[:num_keys].float() for pages in (k, v))
        keys, values = (one.repeat_interleave(q.shape[1] // k.shape[2], dim=1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(num_keys) - torch.arange(num_queries)[:, None] - (num_keys - num_queries)
        left = window_size[0] if window_size[0] >= 0 else num_keys
        hidden = (distance > 0) | (distance < -left)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return output


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (300, 5.0)])
def test_calls_give_what_the_reference_computes(window: int | None, softcap: float | None) -> None:
    backend = FlashAttention(softcap)
    for requests in ([(1, 300), (33, 33), (5, 260), (1, 1)], [(1, 7), (1, 513)]):
        metadata, _, num_blocks = paged_step(requests, block_size=256)
        query, key, value, cache = paged_tensors(
            metadata, num_blocks, block_size=256, kv_heads=2, group=3, head_dim=64, dtype=torch.bfloat16
        )
        expected_cache = cache.clone()
        options: dict[str, Any] = {"layer": 1, "metadata": metadata, "scale": 0.125, "sliding_window": window}
        found = backend.forward(query, key, value, cache, **options)
        expected = ReferenceAttention(softcap).forward(query, key, value, expected_cache, **options)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=0)
        torch.testing.assert_close(cache, expected_cache, atol=0, rtol=0, equal_nan=True)


def test_auto_takes_the_library_on_cuda_for_large_blocks_in_16_bits() -> None:
    assert select_backend("auto", **SIZES).name == "flash"
    for change in ({"block_size": 16}, {"dtype": torch.float32}, {"head_dim": 100}):
        assert select_backend("auto", **{**SIZES, **change}).name != "flash"
    with pytest.raises(UnsupportedModel, match="attention backend flash does not support block_size 16"):
        select_backend("flash", **{**SIZES, "block_size": 16})


def test_without_the_library_auto_takes_another_and_the_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert select_backend("auto", **SIZES).name != "flash"
    with pytest.raises(UnsupportedModel, match="flash requires the package flash-attn"):
        select_backend("flash", **SIZES)
