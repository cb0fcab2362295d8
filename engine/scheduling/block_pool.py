"""The physical KV blocks of one engine: their references, contents and order of eviction.

A block is *free* (no reference, no content), *cached* (no reference, but found by its content's hash) or *in use* (one
reference per request with the block in its block table). Free and cached blocks are in one list, the next to be taken
first; taking a cached block discards its content.

    free ──take──▶ in use ──last reference gone──▶ free or, if hashed, cached ──touch──▶ in use
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class KVBlock:
    """One physical block, written by the pool alone."""

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None
    """Set while the block can be found by its content."""


class BlockPool:
    """Owns every block. Called by the KV cache manager, from the step loop alone."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self._free = OrderedDict.fromkeys(self.blocks)
        """Free and cached blocks, the next to be taken first; a prefix hit removes from the middle."""
        self._by_hash: dict[bytes, KVBlock] = {}
        self.num_cached = 0
        self.null_block = KVBlock(0, ref_count=1)
        """In a block table it stands for a block that no later token sees. It has no memory of its own."""

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free and cached."""
        return len(self._free)

    def take(self, count: int) -> list[KVBlock]:
        """`count` blocks with one reference each. The caller has checked `num_available`."""
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if block.block_hash is not None:
                self.num_cached -= 1
                self._forget(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def find(self, block_hash: bytes) -> KVBlock | None:
        return self._by_hash.get(block_hash)

    def touch(self, blocks: Iterable[KVBlock]) -> None:
        """Add a reference to each."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count == 0:
                del self._free[block]
                self.num_cached -= 1
            block.ref_count += 1

    def release(self, blocks: Sequence[KVBlock]) -> None:
        """Remove a reference from each block of a block table. The table's end is evicted before its beginning, since
        shorter prefixes are hit more often."""
        for block in reversed(blocks):
            if block is self.null_block:
                continue
            assert block.ref_count > 0, f"block {block.block_id} is released more often than taken"
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            self._free[block] = None
            if block.block_hash is None:
                self._free.move_to_end(block, last=False)
            else:
                self.num_cached += 1

    def publish(self, block: KVBlock, block_hash: bytes) -> None:
        """Make a full, final block available by its content. A second block of the same content stays private."""
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block

    def forget_all(self) -> None:
        """Empty the prefix cache. Blocks in use stay valid but are no longer found."""
        for block in list(self._by_hash.values()):
            self._forget(block)
        self.num_cached = 0

    def _forget(self, block: KVBlock) -> None:
        assert block.block_hash is not None
        del self._by_hash[block.block_hash]
        block.block_hash = None
