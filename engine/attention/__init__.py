"""Paged attention: the interface between a model and its backend, and the choice of one: a slow reference, and fast
backends by device."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import UnsupportedModel, shown

if TYPE_CHECKING:
    import torch

    from engine.kv_layout import PageOrder


def _import_numba() -> None:
    """numba looks for a BLAS in scipy.linalg, where that is installed: half a second of CPU at each start. No kernel
    here calls one, so to numba it is absent."""
    modules: dict[str, Any] = sys.modules
    if modules.setdefault("scipy.linalg", None) is None:
        try:
            importlib.import_module("numba.np.arraymath")
        finally:
            del modules["scipy.linalg"]


_import_numba()


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Positions of one step's tokens. A step is a flat sequence of tokens, request after request; each request has its
    next `query_len` tokens in it, a prefill chunk or a single decode token.

    All tensors are on the model's device.
    """

    query_start_loc: torch.Tensor
    """int32 [num_requests + 1]: request i owns tokens query_start_loc[i]:query_start_loc[i + 1]."""
    seq_lens: torch.Tensor
    """int32 [num_requests]: tokens in the KV cache after this step, the step's own included. The last query token of
    request i is at position seq_lens[i] - 1, and its queries are the last query_len positions."""
    block_tables: torch.Tensor
    """int32 [num_requests, max_blocks]: physical block ids; entries past the request's blocks are not read."""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]: block_id * block_size + offset, where each token's key and value are written."""
    max_query_len: int
    max_seq_len: int


class AttentionBackend(Protocol):
    """Writes the step's keys and values into the pages, then attends over the pages, causally.

    kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous from the heads on: the layers
    and heads of a rank are a slice of the pages of all ranks. Keys and values of a head lie in the order
    `page_order(name)`.
    """

    name: str

    @staticmethod
    def supports(*, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this backend can run with these sizes on this device."""

    def forward(  # noqa: PLR0913 - as many as attention has
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        layer: int,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [num_queries, num_heads, head_dim], key/value [num_tokens, num_kv_heads, head_dim] ->
        [num_queries, num_heads, head_dim] in query's dtype. `sliding_window` w: position p sees (p - w, p].
        `sinks` float32 [num_heads], contiguous: a score of each head that takes its part of the softmax's sum, without
        a value; -inf is none.

        Queries are those of `metadata.query_start_loc`, keys and values those of its slot_mapping: of the same tokens,
        but in a model's last layer, where only some queries are needed."""


BACKENDS = ("cpu", "flash", "triton", "reference")
_AUTO = {"cpu": ("cpu", "reference"), "cuda": ("flash", "triton", "reference")}
"""By type of device, the fastest first."""
_PACKAGES = {"flash": "flash-attn", "triton": "triton"}


def select_backend(
    name: str,
    *,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest that supports these sizes on this device.

    With `softcap` c, a score s becomes c * tanh(s / c) before the softmax (Gemma 2). `has_sinks`: layers have attention
    sinks (gpt-oss), which the library flash-attn does not compute.
    Raises UnsupportedModel for an unknown name or unsupported sizes.
    """
    if name not in (*BACKENDS, "auto"):
        raise UnsupportedModel(f"attention backend {shown(name)} is not known; known: auto, {', '.join(BACKENDS)}")
    for candidate in _AUTO.get(device.type, ("reference",)) if name == "auto" else (name,):
        if has_sinks and candidate == "flash":
            if name == "auto":
                continue
            raise UnsupportedModel("attention backend flash has no attention sinks, which the model needs")
        package = _PACKAGES.get(candidate)
        if package is not None and not _is_installed(package):
            if name == "auto":
                continue
            raise UnsupportedModel(
                f"attention backend {candidate} requires the package {package}, which is not installed"
            )
        backend = _backend(candidate, softcap)
        if backend.supports(block_size=block_size, head_dim=head_dim, dtype=dtype, device=device):
            return backend
    raise UnsupportedModel(
        f"attention backend {name} does not support block_size {block_size}, head_dim {head_dim}, {dtype} on {device}"
    )


def page_order(name: str) -> PageOrder:
    """The order of elements in the pages of the backend called `name`."""
    return "vectors" if name == "cpu" else "tokens"


def _is_installed(package: str) -> bool:
    try:
        importlib.import_module(package.replace("-", "_"))
    except ImportError:
        return False
    return True


def _backend(name: str, softcap: float | None) -> AttentionBackend:
    """Imported late: compiled backends cost start-up time."""
    if name == "cpu":
        from engine.attention.cpu import CpuAttention

        return CpuAttention(softcap)
    if name == "flash":
        from engine.attention.flash import FlashAttention

        return FlashAttention(softcap)
    if name == "triton":
        from engine.attention.triton_attention import TritonAttention

        return TritonAttention(softcap)
    from engine.attention.reference import ReferenceAttention

    return ReferenceAttention(softcap)


def query_tiles(starts: list[int], seq_lens: list[int], tile_tokens: int) -> list[tuple[int, int, int, int]]:
    """Pieces of at most `tile_tokens` queries of one request: request, first token of the step, tokens, position of the
    first token. Of the metadata's query_start_loc and seq_lens."""
    return [
        (request, first, min(tile_tokens, stop - first), seq_len - stop + first)
        for request, ((start, stop), seq_len) in enumerate(zip(pairwise(starts), seq_lens, strict=True))
        for first in range(start, stop, tile_tokens)
    ]


def adjacent_heads(rows: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] with adjacent heads; a copy if they are not."""
    return rows if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] else rows.contiguous()
