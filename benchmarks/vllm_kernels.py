"""Which of vLLM's CPU kernels compute a row otherwise when others are computed with it.

    .venv-vllm/bin/python -m benchmarks.vllm_kernels

Each kernel that a Qwen3 of the 33 M shape runs, in float32 and bfloat16: one row alone, then the same row among others;
attention with the context in one chunk, in several, and beside other sequences. Prints how many of the row's values
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 4, 64
BLOCK_SIZE, MAX_BLOCKS = 32, 64
CONTEXT_LEN = 1500
LINEARS = {"qkv": (512, 1024), "o": (512, 512), "gate and up": (512, 3072), "down": (1536, 512), "head": (512, 8192)}
CHUNKINGS = {"one chunk": [1500], "chunks of 512": [512, 512, 476], "chunks of 37": [*[37] * 40, 20]}
NEIGHBOURS = {"beside 3": [40, 100, 200], "beside 7": [40, 100, 200, 600, 1000, 1500, 2000], "beside 1 long": [2000]}


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for name, (num_in, num_out) in LINEARS.items():
            weight = (torch.randn(num_out, num_in) / num_in**0.5).to(dtype)
            handler = ops.create_onednn_mm(weight.t(), 32)
            show(dtype, f"linear, {name}", rows_of(num_in, dtype), lambda rows: ops.onednn_mm(handler, rows, None))  # noqa: B023
        show(dtype, "RMS norm", rows_of(512, dtype), rms_norm)
        show(dtype, "SiLU and product", rows_of(3072, dtype), silu_and_mul)
        show_attention(dtype)


def rows_of(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(64, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def show(dtype: torch.dtype, name: str, rows: torch.Tensor, kernel: Callable[[torch.Tensor], torch.Tensor]) -> None:
    alone = kernel(rows[:1])[0]
    found = {num: int((kernel(rows[:num])[0] != alone).sum()) for num in (2, 4, 16, 64)}
    print(f"{dtype}, {name}: of {len(alone)} values differ among {found}")


def rms_norm(rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(rows)
    ops.rms_norm(out, rows, torch.full((rows.shape[1],), 0.7, dtype=rows.dtype), 1e-6)
    return out


def silu_and_mul(rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(rows), rows.shape[1] // 2, dtype=rows.dtype)
    torch.ops._C.silu_and_mul(out, rows)
    return out


def show_attention(dtype: torch.dtype) -> None:
    alone = attention(dtype, [CONTEXT_LEN - 1, 1])
    found = {name: attention(dtype, chunks) for name, chunks in CHUNKINGS.items()}
    found |= {name: attention(dtype, [CONTEXT_LEN - 1, 1], lens) for name, lens in NEIGHBOURS.items()}
    differing = {name: int((other != alone).sum()) for name, other in found.items()}
    print(f"{dtype}, attention: of {alone.numel()} values differ in {differing}")


def attention(dtype: torch.dtype, chunks: Sequence[int], neighbours: Sequence[int] = ()) -> torch.Tensor:
    """Of the context's last token, computed in these chunks, with the last of them sequences of `neighbours` tokens."""
    drawn = torch.Generator().manual_seed(1)

    def draw(num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, HEAD_DIM, generator=drawn).to(dtype)

    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    own = [draw(CONTEXT_LEN, num_heads) for num_heads in heads]
    num_blocks = MAX_BLOCKS * (1 + len(neighbours))
    cache = torch.zeros(num_blocks, NUM_KV_HEADS, 2 * BLOCK_SIZE, HEAD_DIM, dtype=dtype)
    num_done = 0
    for index, num_tokens in enumerate(chunks):
        others = neighbours if index == len(chunks) - 1 else ()
        lens = [num_done + num_tokens, *others]
        query, key, value = (
            torch.cat([rows[num_done : lens[0]], *(draw(1, num_heads) for _ in others)])
            for rows, num_heads in zip(own, heads, strict=True)
        )
        slots = [*range(num_done, lens[0])]
        slots += [(1 + other) * MAX_BLOCKS * BLOCK_SIZE + length - 1 for other, length in enumerate(others)]
        output = step(cache, (query, key, value), lens, num_tokens, slots)
        num_done = lens[0]
    return output[num_tokens - 1]


def step(
    cache: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lens: Sequence[int],
    num_tokens: int,
    slots: Sequence[int],
) -> torch.Tensor:
    """One call as vLLM's backend makes it: `num_tokens` rows of the first sequence, one of each other."""
    query, key, value = rows
    keys, values = cache.chunk(2, dim=2)
    isa = _get_attn_isa(query.dtype, BLOCK_SIZE, HEAD_DIM)
    starts = torch.tensor([0, *range(num_tokens, num_tokens + len(lens))], dtype=torch.int32)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    tables = torch.arange(MAX_BLOCKS * len(lens), dtype=torch.int32).view(len(lens), MAX_BLOCKS)
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.tensor(slots), isa)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lens), num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, seq_lens=seq_lens,
        dtype=query.dtype, query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True,
    )  # fmt: skip
    output = torch.zeros_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query, key_cache=keys, value_cache=values, output=output, query_start_loc=starts, seq_lens=seq_lens,
        scale=HEAD_DIM**-0.5, causal=True, alibi_slopes=None, sliding_window=-1, block_table=tables, softcap=0,
        scheduler_metadata=plan, s_aux=None,
    )  # fmt: skip
    return output


if __name__ == "__main__":
    main()
