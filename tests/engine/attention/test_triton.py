"""The Triton kernels compute what the reference does. In the interpreter: the same source runs on CPU, in numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention import AttentionMetadata, triton_attention
from engine.attention.reference import ReferenceAttention
from engine.attention.triton_attention import SPLIT_KEYS, TritonAttention
from tests.engine.attention.paged_step import paged_step, paged_tensors, step_behind_windows

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYER = 1

Requests = list[tuple[int, int]]

decodes = st.integers(1, 2 * SPLIT_KEYS + 40).map(lambda seq_len: (1, seq_len))
chunks = st.integers(1, 90).flatmap(
    lambda seq_len: st.tuples(st.integers(1, min(seq_len, 40)) | st.just(seq_len), st.just(seq_len))
)
short_chunks = st.tuples(st.integers(1, 10), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair)))
"""The interpreter takes a minute for 90 tokens of a large group."""


def on_device(metadata: AttentionMetadata) -> AttentionMetadata:
    names = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping")
    return replace(metadata, **{name: getattr(metadata, name).to(DEVICE) for name in names})


def check(
    requests: Requests, block_size: int, kv_heads: int, group: int, head_dim: int, window: int | None,
    dtype: torch.dtype, softcap: float | None = None,
) -> None:  # fmt: skip
    metadata, _, num_blocks = paged_step(requests, block_size=block_size)
    tensors = paged_tensors(
        metadata, num_blocks, block_size=block_size, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype
    )
    query, key, value, cache = (tensor.to(DEVICE) for tensor in tensors)
    metadata = on_device(metadata)
    expected_cache, scale = cache.clone(), head_dim**-0.5
    assert TritonAttention.supports(block_size=block_size, head_dim=head_dim, dtype=dtype, device=DEVICE)
    options = {"layer": LAYER, "metadata": metadata, "scale": scale, "sliding_window": window}

    output = TritonAttention(softcap).forward(query, key, value, cache, **options)

    expected = ReferenceAttention(softcap).forward(query, key, value, expected_cache, **options)
    torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(cache, expected_cache, atol=0, rtol=0, equal_nan=True)


SIZES: dict[str, Any] = {
    "block_size": st.sampled_from([16, 32, 48, 64]),
    "kv_heads": st.integers(1, 2),
    "group": st.integers(1, 16),
    "head_dim": st.sampled_from([64, 80, 96, 128, 192, 256]),
    "window": st.none() | st.integers(1, 300),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
}


@settings(max_examples=4)
@given(requests=st.lists(decodes | short_chunks, min_size=1, max_size=3), **SIZES)
@example([(1, 2 * SPLIT_KEYS), (1, 1), (33, 33)], 16, 1, 4, 128, None, torch.float32)
@example([(1, SPLIT_KEYS + 1), (9, 90)], 64, 1, 16, 256, None, torch.bfloat16)
@example([(1, 300), (20, 150)], 32, 1, 1, 64, 40, torch.float32)  # splits that a window leaves empty
def test_kernels_equal_the_reference(
    requests: Requests, block_size: int, kv_heads: int, group: int, head_dim: int, window: int | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    check(requests, block_size, kv_heads, group, head_dim, window, dtype)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=20)
@given(requests=st.lists(decodes | chunks, min_size=1, max_size=4), **SIZES)
def test_kernels_equal_the_reference_in_long_chunks(
    requests: Requests, block_size: int, kv_heads: int, group: int, head_dim: int, window: int | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    check(requests, block_size, kv_heads, group, head_dim, window, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_kernels_equal_the_reference_for_every_size(head_dim: int, group: int) -> None:
    for block_size in (16, 32, 64):
        requests = [(1, SPLIT_KEYS + block_size + group), (1, block_size), (37, 37), (5, 120)]
        check(requests, block_size, 2, group, head_dim, 50 if group % 2 else None, torch.float32)


def test_scores_are_capped() -> None:
    check([(1, 40), (6, 20)], 16, 1, 2, 64, None, torch.float32, softcap=3.0)


@pytest.mark.parametrize("requests", [[(1, 100), (1, SPLIT_KEYS + 30), (1, 7)], [(4, 100), (9, 90), (1, 70)]])
def test_a_window_leaves_out_what_lies_in_the_null_block(requests: Requests) -> None:
    sizes: dict[str, Any] = {"block_size": 16, "kv_heads": 2, "group": 2, "head_dim": 64, "dtype": torch.float32}
    whole, dropped, num_blocks = step_behind_windows(requests, block_size=16, window=40)
    query, key, value, cache = (tensor.to(DEVICE) for tensor in paged_tensors(whole, num_blocks, **sizes))
    assert cache[0].isnan().all()
    outputs = [
        TritonAttention().forward(
            query, key, value, cache.clone(), layer=LAYER, metadata=on_device(metadata), scale=0.125, sliding_window=40
        )
        for metadata in (whole, dropped)
    ]
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)


def test_the_memory_of_splits_is_bounded_without_another_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of a long context in a batch of short ones: as many launches as it takes."""
    metadata, _, num_blocks = paged_step([(1, 3 * SPLIT_KEYS), (1, 5), (1, 300), (4, 9)], block_size=16)
    sizes: dict[str, Any] = {"block_size": 16, "kv_heads": 1, "group": 2, "head_dim": 64}
    tensors = paged_tensors(metadata, num_blocks, **sizes, dtype=torch.float32)
    query, key, value, cache = (tensor.to(DEVICE) for tensor in tensors)
    options: dict[str, Any] = {"layer": LAYER, "metadata": on_device(metadata), "scale": 0.1, "sliding_window": None}
    at_once = TritonAttention().forward(query, key, value, cache, **options)
    launches, attend = [], triton_attention._Step.attend_in_splits
    monkeypatch.setattr(triton_attention, "_most_bytes_of_splits", lambda device: 2 * (2 * 3 * (64 + 2) * 4))

    def counted(step: triton_attention._Step, tiles: torch.Tensor, *rest: Any) -> None:
        launches.append(len(tiles))
        attend(step, tiles, *rest)

    monkeypatch.setattr(triton_attention._Step, "attend_in_splits", counted)
    assert torch.equal(TritonAttention().forward(query, key, value, cache, **options), at_once)
    assert launches == [2, 1]


def test_a_rank_reads_and_writes_its_slice_of_the_pages() -> None:
    """Layers and heads of one rank, in pages of all."""
    metadata, _, num_blocks = paged_step([(1, 70), (20, 20)], block_size=16)
    tensors = paged_tensors(metadata, num_blocks, block_size=16, kv_heads=4, group=2, head_dim=64, dtype=torch.float32)
    query, key, value, cache = (tensor.to(DEVICE) for tensor in tensors)
    metadata = on_device(metadata)
    mine = slice(2, 4)
    found, expected = cache.clone(), cache.clone()
    options = {"layer": 1, "metadata": metadata, "scale": 0.125, "sliding_window": None}
    arguments = (query[:, 4:8], key[:, mine], value[:, mine])
    output = TritonAttention().forward(*arguments, found[:, 1:, :, mine], **options)  # type: ignore[arg-type]
    reference = ReferenceAttention().forward(*arguments, expected[:, 1:, :, mine], **options)  # type: ignore[arg-type]
    torch.testing.assert_close(output, reference, atol=2e-5, rtol=0)
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
