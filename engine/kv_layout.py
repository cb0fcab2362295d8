"""The layout of a KV block in memory, on disk and on the wire.

The KV memory of an engine, on GPUs of each rank, is one contiguous array, block-major:

    [num_blocks, num_layers, 2 (keys, values), num_kv_heads, block_size, head_dim]

so that one block, the *page*, is contiguous: one file write, one Redis value, one NIXL descriptor. Another engine's
memory may be one array for each layer, [num_blocks, ...]; its page is the block of every layer, in their order.

The elements of one head's keys or values, [block_size, head_dim], lie token after token, or in the order in which the
compiled kernels of the CPU read them, where a vector has the same element of sixteen tokens (`PageOrder`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal, Protocol

LAYOUT_VERSION = 2
"""Raised by each change of what a page of the same shape looks like."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


PageOrder = Literal["tokens", "vectors"]
"""tokens: [block_size, head_dim]. vectors: in numbers of 32 bits, each n = 1 (float32) or 2 elements; keys
[block_size / 16, head_dim / n, 16, n], so that element d of token t is at [t // 16, d // n, t % 16, d % n]; values
[block_size / n, head_dim, n], where it is at [t // n, d, t % n], with zeros beside the last token of an odd number."""


class PageLayout(Protocol):
    """What connectors need to know of a page."""

    @property
    def block_size(self) -> int: ...

    @property
    def bytes_per_block(self) -> int: ...

    @property
    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a page. Instances exchange pages only if the digests of their layouts are equal."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    order: PageOrder = "tokens"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.block_size) < 1:
            raise ValueError(f"every size in a KV layout must be at least 1: {self}")

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """(num_layers, 2: keys and values, num_kv_heads, block_size, head_dim)."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one page."""
        return math.prod(self.page_shape) * DTYPE_BYTES[self.dtype]

    @property
    def digest(self) -> bytes:
        """32 bytes, equal exactly for equal layouts."""
        fields = (LAYOUT_VERSION, *self.page_shape, self.dtype, self.order)
        return hashlib.sha256(":".join(map(str, fields)).encode()).digest()
