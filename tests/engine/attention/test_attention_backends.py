"""Every backend computes what the reference computes, and the reference what SDPA does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention import AttentionMetadata, amx_kernels, cpu, cpu_kernels, pair_kernels, select_backend
from engine.attention.compilation import Products, has_pairs, has_tiles
from engine.attention.reference import ReferenceAttention
from engine.errors import UnsupportedModel
from tests.engine.attention.paged_step import in_tokens, in_vectors, paged_step, paged_tensors, step_behind_windows

CPU = torch.device("cpu")
BFLOAT16_STEP = 2**-7
"""Between neighbours, relative to them: products of pairs and tiles round their weights too."""
PRODUCTS: list[Products] = ["floats", "pairs", "tiles"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BF16 = torch.bfloat16
LAYER = 1
EACH = list(range(1, 301))
GROWTHS = [1, 10]


requests = st.lists(
    st.integers(1, 150).flatmap(
        lambda seq_len: st.tuples(
            st.one_of(st.just(1), st.integers(1, min(seq_len, 40)), st.just(seq_len)), st.just(seq_len)
        )
    ),
    min_size=1,
    max_size=5,
)


@example(
    requests=[(400, 400), (1, 333), (17, 50)],
    block_size=32,
    kv_heads=2,
    group=3,
    head_dim=96,
    window=70,
    softcap=None,
    dtype=BF16,
    products="tiles",
    growth=10,
)
@example(
    requests=[(400, 400)],
    block_size=16,
    kv_heads=1,
    group=1,
    head_dim=64,
    window=None,
    softcap=None,
    dtype=BF16,
    products="pairs",
    growth=10,
)
@settings(max_examples=40)
@given(
    requests=requests,
    block_size=st.sampled_from([16, 32, 48]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([16, 32, 48, 64, 128]),
    window=st.one_of(st.none(), st.integers(1, 60)),
    softcap=st.sampled_from([None, 2.0, 50.0]),
    dtype=st.sampled_from([*TOLERANCE]),
    products=st.sampled_from(PRODUCTS),
    growth=st.sampled_from(GROWTHS),
)
def test_compiled_attention_equals_the_reference(
    requests: list[tuple[int, int]],
    block_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    products: Products,
    growth: int,
) -> None:
    metadata, _, num_blocks = paged_step(requests, block_size=block_size)
    query, key, value, cache = paged_tensors(
        metadata, num_blocks, block_size=block_size, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype
    )
    key = growing(key, growth)
    expected_cache, cache = cache, in_vectors(cache)
    backend = select_backend("cpu", block_size=block_size, head_dim=head_dim, dtype=dtype, device=CPU, softcap=softcap)
    scale = head_dim**-0.5

    with multiplying(products):
        output = backend.forward(
            query, key, value, cache, layer=LAYER, metadata=metadata, scale=scale, sliding_window=window
        )
    expected = ReferenceAttention(softcap).forward(
        query, key, value, expected_cache, layer=LAYER, metadata=metadata, scale=scale, sliding_window=window
    )

    rtol = BFLOAT16_STEP if products != "floats" and dtype == torch.bfloat16 else 0
    torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=rtol)
    if dtype != torch.float32:
        zero_partners(expected_cache, metadata)
    torch.testing.assert_close(in_tokens(cache), expected_cache, atol=0, rtol=0, equal_nan=True)


def growing(key: torch.Tensor, growth: int) -> torch.Tensor:
    """With the scores of a step's last token `growth` times as large: a row's maximum moves from tile to tile."""
    ramp = torch.linspace(1, growth, len(key))[:, None, None]
    return (key * ramp).to(key.dtype)


def zero_partners(cache: torch.Tensor, metadata: AttentionMetadata) -> None:
    """Of a last token with an even place: its value is multiplied together with the next one."""
    block_size = cache.shape[4]
    for table, seq_len in zip(metadata.block_tables.tolist(), metadata.seq_lens.tolist(), strict=True):
        if seq_len % 2:
            cache[table[seq_len // block_size], LAYER, 1, :, seq_len % block_size] = 0


@contextmanager
def multiplying(products: Products) -> Iterator[None]:
    """As on a processor that multiplies bfloat16 so, where this one can, or on another one."""
    with (
        patch.object(cpu, "multiplies_pairs", lambda: products == "pairs" and has_pairs()),
        patch.object(cpu, "has_tiles", lambda: products == "tiles" and has_tiles()),
    ):
        yield


def test_tiles_and_pairs_are_of_bfloat16_and_tiles_of_whole_ones() -> None:
    for has_them, multiplies, dtype, head_dim, kernels in (
        (True, False, BF16, 64, amx_kernels),
        (True, False, BF16, 80, cpu_kernels),
        (True, True, BF16, 80, pair_kernels),
        (True, True, torch.float32, 64, cpu_kernels),
        (False, True, BF16, 64, pair_kernels),
        (False, False, BF16, 64, cpu_kernels),
    ):
        with (
            patch.object(cpu, "has_tiles", lambda has_them=has_them: has_them),
            patch.object(cpu, "multiplies_pairs", lambda multiplies=multiplies: multiplies),
        ):
            assert cpu._attention_address_of(dtype, head_dim) == kernels.paged_attention_address


def products_of(name: str) -> Products:
    """Of a backend's name in a test: "cpu in tiles"."""
    return next((products for products in PRODUCTS if name.endswith(products)), "floats")


@pytest.mark.parametrize("requests", [[(1, 100), (1, 500), (1, 7)], [(4, 100), (70, 200), (1, 70)]])
@pytest.mark.parametrize("window", [1, 40])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["cpu", "cpu in pairs", "cpu in tiles", "reference"])
def test_a_window_leaves_out_what_lies_in_the_null_block(
    name: str, dtype: torch.dtype, window: int, requests: list[tuple[int, int]]
) -> None:
    sizes: dict[str, Any] = {"block_size": 16, "kv_heads": 2, "group": 3, "head_dim": 64, "dtype": dtype}
    whole, dropped, num_blocks = step_behind_windows(requests, block_size=16, window=window)
    query, key, value, cache = paged_tensors(whole, num_blocks, **sizes)
    assert cache[0].isnan().all()
    backend = select_backend(name.split()[0], block_size=16, head_dim=64, dtype=dtype, device=CPU)
    pages = cache if name == "reference" else in_vectors(cache)
    with multiplying(products_of(name)):
        outputs = [
            backend.forward(
                query, key, value, pages.clone(), layer=LAYER, metadata=metadata, scale=0.125, sliding_window=window
            )
            for metadata in (whole, dropped)
        ]
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)


def test_the_reference_equals_sdpa_on_a_whole_prompt() -> None:
    metadata, _, num_blocks = paged_step([(37, 37)], block_size=8)
    query, key, value, cache = paged_tensors(
        metadata, num_blocks, block_size=8, kv_heads=2, group=3, head_dim=16, dtype=torch.float32
    )
    output = ReferenceAttention().forward(
        query, key, value, cache, layer=LAYER, metadata=metadata, scale=0.25, sliding_window=None
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.repeat_interleave(3, dim=1).transpose(0, 1)[None],
        value.repeat_interleave(3, dim=1).transpose(0, 1)[None],
        is_causal=True,
        scale=0.25,
    )
    torch.testing.assert_close(output, expected[0].transpose(0, 1), atol=1e-5, rtol=0)


@example(
    ends=EACH,
    group=2,
    head_dim=64,
    window=None,
    dtype=torch.float32,
    neighbours=[],
    products="floats",
    growth=10,
    has_sinks=True,
)
@example(
    ends=EACH,
    group=3,
    head_dim=80,
    window=100,
    dtype=BF16,
    neighbours=[(40, 40)],
    products="floats",
    growth=1,
    has_sinks=True,
)
@example(
    ends=EACH,
    group=3,
    head_dim=96,
    window=100,
    dtype=BF16,
    neighbours=[(40, 40)],
    products="tiles",
    growth=10,
    has_sinks=True,
)
@example(
    ends=[],
    group=6,
    head_dim=64,
    window=None,
    dtype=BF16,
    neighbours=[],
    products="tiles",
    growth=1,
    has_sinks=False,
)
@example(
    ends=EACH,
    group=3,
    head_dim=96,
    window=100,
    dtype=BF16,
    neighbours=[(40, 40)],
    products="pairs",
    growth=10,
    has_sinks=True,
)
@settings(max_examples=25)
@given(
    ends=st.lists(st.integers(1, 300), max_size=8, unique=True).map(sorted),
    group=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([16, 64, 80]),
    window=st.sampled_from([None, 1, 20, 100]),
    dtype=st.sampled_from([*TOLERANCE]),
    products=st.sampled_from(PRODUCTS),
    neighbours=st.lists(st.sampled_from([(1, 9), (3, 50), (40, 40)]), max_size=2),
    growth=st.sampled_from(GROWTHS),
    has_sinks=st.booleans(),
)
def test_the_bits_of_a_row_do_not_depend_on_its_chunk_or_its_neighbours(
    ends: list[int],
    group: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    neighbours: list[tuple[int, int]],
    products: Products,
    growth: int,
    has_sinks: bool,
) -> None:
    """A prompt in one step beside other requests, then the same prompt alone, in chunks that end at `ends`."""
    num_tokens, kv_heads = 301, 2
    metadata, _, num_blocks = paged_step([(num_tokens, num_tokens), *neighbours], block_size=16)
    query, key, value, cache = paged_tensors(
        metadata, num_blocks, block_size=16, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype
    )
    cache, key = in_vectors(cache), growing(key, growth)
    sinks = torch.linspace(-2, 6, query.shape[1]) if has_sinks else None
    backend = select_backend("cpu", block_size=16, head_dim=head_dim, dtype=dtype, device=CPU)

    def forward(rows: slice, of: AttentionMetadata, into: torch.Tensor) -> torch.Tensor:
        with multiplying(products):
            return backend.forward(
                query[rows], key[rows], value[rows], into, layer=LAYER, metadata=of, scale=0.2, sliding_window=window,
                sinks=sinks,
            )  # fmt: skip

    in_chunks = cache.clone()
    whole = forward(slice(None), metadata, cache)[:num_tokens]
    for start, end in pairwise([0, *ends, num_tokens]):
        chunk = AttentionMetadata(
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=metadata.block_tables[:1],
            slot_mapping=metadata.slot_mapping[start:end],
            max_query_len=end - start,
            max_seq_len=end,
        )
        assert torch.equal(forward(slice(start, end), chunk, in_chunks), whole[start:end])


def test_a_plan_is_not_reused_for_another_step() -> None:
    backend = select_backend("cpu", block_size=16, head_dim=16, dtype=torch.float32, device=CPU)
    for seq_len in (5, 30, 6):
        metadata, _, num_blocks = paged_step([(1, seq_len)], block_size=16, seed=seq_len)
        query, key, value, cache = paged_tensors(
            metadata, num_blocks, block_size=16, kv_heads=1, group=2, head_dim=16, dtype=torch.float32
        )
        output, expected = (
            one.forward(query, key, value, pages, layer=0, metadata=metadata, scale=0.25, sliding_window=None)
            for one, pages in ((backend, in_vectors(cache)), (ReferenceAttention(), cache))
        )
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=0)


def test_auto_takes_the_compiled_backend_on_cpu_and_the_reference_where_sizes_do_not_fit() -> None:
    assert select_backend("auto", block_size=16, head_dim=64, dtype=torch.bfloat16, device=CPU).name == "cpu"
    assert select_backend("auto", block_size=8, head_dim=64, dtype=torch.bfloat16, device=CPU).name == "reference"
    assert select_backend("auto", block_size=16, head_dim=20, dtype=torch.float32, device=CPU).name == "reference"
    assert select_backend("auto", block_size=16, head_dim=64, dtype=torch.float64, device=CPU).name == "reference"


def test_unknown_and_unfit_backends_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'magic' is not known; known: auto, cpu, flash, triton, reference"):
        select_backend("magic", block_size=16, head_dim=64, dtype=torch.float32, device=CPU)
    with pytest.raises(UnsupportedModel, match="cpu does not support block_size 16, head_dim 20"):
        select_backend("cpu", block_size=16, head_dim=20, dtype=torch.float32, device=CPU)


def test_a_backend_without_its_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"block_size": 16, "head_dim": 64, "dtype": torch.bfloat16, "device": torch.device("cuda")}
    monkeypatch.setitem(sys.modules, "triton", None)
    assert select_backend("auto", **sizes).name == "reference"
    with pytest.raises(UnsupportedModel, match="attention backend triton requires the package triton, which is not"):
        select_backend("triton", **sizes)


# The kernels' scratch memory is not reused by other threads before they are done.

_ATTEND_AGAIN_AND_AGAIN = """
import torch
from engine.attention import AttentionMetadata
from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention

requests, length, heads, dim, block = 16, 24, 8, 64, 16
tokens = requests * length
query, key, value = (torch.randn(tokens, heads, dim) for _ in range(3))
tables = torch.arange(2 * requests, dtype=torch.int32).view(requests, 2)
metadata = AttentionMetadata(
    query_start_loc=torch.arange(0, tokens + 1, length, dtype=torch.int32),
    seq_lens=torch.full((requests,), length, dtype=torch.int32),
    block_tables=tables,
    slot_mapping=(torch.arange(length) + 2 * block * torch.arange(requests)[:, None]).flatten(),
    max_query_len=length,
    max_seq_len=length,
)
def attend(backend):
    cache = torch.zeros(2 * requests, 1, 2, heads, block, dim)
    return backend.forward(
        query, key, value, cache, layer=0, metadata=metadata, scale=dim**-0.5, sliding_window=None
    )

expected = attend(ReferenceAttention())
torch.set_num_threads(4)
for _ in range(100):
    torch.testing.assert_close(attend(CpuAttention()), expected, rtol=1e-4, atol=1e-5)
print("exact")
"""


def test_threads_that_share_one_heap_do_not_share_scratch() -> None:
    # With an arena for each thread, memory that one has freed too early is seldom another's at once.
    one_heap = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1", "OMP_WAIT_POLICY": "passive"}
    ran = subprocess.run(
        [sys.executable, "-c", _ATTEND_AGAIN_AND_AGAIN],
        env={**os.environ, **one_heap},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ran.returncode, ran.stdout) == (0, "exact\n"), ran.stderr
