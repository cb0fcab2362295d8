"""The physical KV blocks of one engine: who refers to them, what they hold, which one goes next.

A block is *free* (no reference, no content worth finding), *cached* (no reference, but its content can be found by
hash) or *in use* (one reference per request that has it in its block table). Free and cached blocks stand in one list,
the next to be taken first; taking a cached block forgets its content.

    free ──take──▶ in use ──last reference gone──▶ free or, if hashed, cached ──touch──▶ in use
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class KVBlock:
    """One physical block. Only the pool writes to it."""

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None
    """Set while the block can be found by its content."""
    previous: KVBlock | None = None
    next: KVBlock | None = None


class FreeList:
    """Doubly linked list of blocks with ref_count 0: constant-time removal from the middle, which a prefix hit
    needs."""

    def __init__(self) -> None:
        self._head = KVBlock(-1)
        self._tail = KVBlock(-1)
        self._head.next, self._tail.previous = self._tail, self._head
        self.count = 0

    def append(self, block: KVBlock) -> None:
        """Put `block` last: it is taken after all others."""
        self._insert(block, self._tail)

    def prepend(self, block: KVBlock) -> None:
        """Put `block` first."""
        assert self._head.next is not None
        self._insert(block, self._head.next)

    def remove(self, block: KVBlock) -> None:
        """Take `block` out, wherever it stands."""
        assert block.previous is not None, f"block {block.block_id} is not in the free list"
        assert block.next is not None
        block.previous.next, block.next.previous = block.next, block.previous
        block.previous = block.next = None
        self.count -= 1

    def pop(self) -> KVBlock:
        """Take the first out."""
        block = self._head.next
        assert block is not None
        assert block is not self._tail, "the free list is empty"
        self.remove(block)
        return block

    def _insert(self, block: KVBlock, before: KVBlock) -> None:
        after = before.previous
        assert after is not None
        assert block.next is None
        block.previous, block.next = after, before
        after.next = before.previous = block
        self.count += 1


class BlockPool:
    """Owns every block. Called by the KV cache manager, in the step loop alone."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self._free = FreeList()
        for block in self.blocks:
            self._free.append(block)
        self._by_hash: dict[bytes, KVBlock] = {}
        self._num_cached = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free and cached."""
        return self._free.count

    @property
    def num_cached(self) -> int:
        """Blocks without a reference whose content can be found."""
        return self._num_cached

    def take(self, count: int) -> list[KVBlock]:
        """`count` blocks with one reference each. The caller has checked `num_available`."""
        taken = []
        for _ in range(count):
            block = self._free.pop()
            if block.block_hash is not None:
                self._num_cached -= 1
                self._forget(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def find(self, block_hash: bytes) -> KVBlock | None:
        """The block with this content, if there is one."""
        return self._by_hash.get(block_hash)

    def touch(self, blocks: Iterable[KVBlock]) -> None:
        """One more reference to each."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
                self._num_cached -= 1
            block.ref_count += 1

    def release(self, blocks: Sequence[KVBlock]) -> None:
        """One reference less to each block of a block table. The end of the table is taken again before its beginning:
        a prefix is worth more the shorter it is."""
        for block in reversed(blocks):
            assert block.ref_count > 0, f"block {block.block_id} is released more often than taken"
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.block_hash is None:
                self._free.prepend(block)
            else:
                self._num_cached += 1
                self._free.append(block)

    def publish(self, block: KVBlock, block_hash: bytes) -> None:
        """`block` is full and final: let it be found. A second block of the same content stays private."""
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block

    def forget_all(self) -> None:
        """Empty the prefix cache. Blocks in use go on, but are no longer found."""
        for block in list(self._by_hash.values()):
            self._forget(block)
        self._num_cached = 0

    def _forget(self, block: KVBlock) -> None:
        assert block.block_hash is not None
        del self._by_hash[block.block_hash]
        block.block_hash = None
