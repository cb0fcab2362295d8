"""The physical KV blocks of one engine, and the block tables of its requests: the blocks of their tokens, in order.

A block is *free* (no reference, no content), *cached* (no reference, but found by its content's hash) or *in use* (one
reference per request with the block in its block table). Free and cached blocks are in one list, the next to be taken
first; taking a cached block discards its content.

    free ──take──▶ in use ──last reference gone──▶ free or, if hashed, cached ──touch──▶ in use

A table is append-only while its request runs, but for blocks that have left the sliding window of every layer, whose
place the null block takes, and for those that another block of the same content replaces. Its block ids are also a row
of a numpy array, from which the model runner gathers the tables of a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from engine.scheduling.request import Request


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

    def publish(self, block: KVBlock, block_hash: bytes) -> KVBlock:
        """Make a full, final block available by its content. Returns the block that is found by it: this one, or an
        earlier one."""
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block
        return self._by_hash.get(block_hash, block)

    def _forget(self, block: KVBlock) -> None:
        assert block.block_hash is not None
        del self._by_hash[block.block_hash]
        block.block_hash = None


class KVCacheManager:
    """Finds prefixes, allocates and frees blocks. Owned by the scheduler."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        enable_prefix_caching: bool,
        window: int | None = None,
    ) -> None:
        """`window`: the widest of the layers, so that position p sees (p - window, p]; None: a layer has none."""
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._window = window
        self.block_tables = np.zeros((max_num_seqs, self.num_blocks_for(max_model_len)), np.int32)
        """int32 [max_num_seqs, max_blocks_per_request]; row `self.rows[request_id]` is that request's table."""
        self.rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._tables: dict[str, list[KVBlock]] = {}
        self._num_published: dict[str, int] = {}
        self._num_dropped: dict[str, int] = {}
        """Null blocks at the beginning of each table."""
        self._coming: dict[bytes, KVBlock] = {}
        """Blocks that the step being decided completes, by content."""

    @property
    def has_window(self) -> bool:
        """A request needs no more blocks than its window, however long it is."""
        return self._window is not None

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(
        self, request: Request, max_tokens: int, *, is_whole: bool = False, is_filled: bool = False
    ) -> list[KVBlock]:
        """The longest cached prefix of the request in full blocks, at most `max_tokens` tokens; unless `is_filled`,
        with the blocks that the step being decided completes (`expect`). Adds no references.

        With a window the null block is in the place of those that the next token does not see, unless `is_whole`."""
        if not self.enable_prefix_caching:
            return []
        request.update_block_hashes(self.block_size)
        hashes = request.block_hashes[: max_tokens // self.block_size]
        find = self.pool.find if is_filled else self._find
        if self._window is None or is_whole:
            return _until_missing(map(find, hashes))
        found, last, run = [find(block_hash) for block_hash in hashes], 0, 0
        for count, block in enumerate(found, 1):
            run = 0 if block is None else run + 1
            if run >= count - self._num_unseen(count * self.block_size):
                last = count
        unseen = self._num_unseen(last * self.block_size)
        return [self.pool.null_block] * unseen + [block for block in found[unseen:last] if block is not None]

    def _find(self, block_hash: bytes) -> KVBlock | None:
        return self.pool.find(block_hash) or self._coming.get(block_hash)

    def begin_step(self) -> None:
        """A step is about to be decided."""
        self._coming.clear()

    def expect(self, request: Request, num_tokens: int) -> None:
        """The step being decided computes the request's tokens up to `num_tokens`. Requests that join the same step
        may have the blocks which that completes as their prefix: every layer writes the keys and values of all tokens
        of a step, or of a micro-batch of them in this order, before it computes attention."""
        if not self.enable_prefix_caching:
            return
        first, last = self._num_published[request.request_id], num_tokens // self.block_size
        if last <= first:
            return
        request.update_block_hashes(self.block_size)
        table = self._tables[request.request_id]
        for index in range(first, last):
            self._coming.setdefault(request.block_hashes[index], table[index])

    def num_published_tokens(self, request: Request) -> int:
        """Tokens in the full blocks at the beginning of the request's table that others find as well: without those
        of the step being decided."""
        blocks = takewhile(lambda block: block.block_hash is not None, self._tables[request.request_id])
        return sum(1 for _ in blocks) * self.block_size

    def allocate(self, request: Request, num_tokens: int, prefix: Sequence[KVBlock] = ()) -> bool:
        """Extend the request's table to `num_tokens` tokens; `prefix` starts a new table. False, without effect, if
        there are too few blocks."""
        table = self._tables.get(request.request_id)
        num_new = self.num_blocks_for(num_tokens) - len(prefix if table is None else table)
        if table is not None and num_new <= 0:
            return True
        unreferenced = sum(block.ref_count == 0 for block in prefix)
        if num_new > self.pool.num_available - unreferenced:
            return False
        if table is None:
            table = self._open_table(request.request_id, prefix)
        new_blocks = self.pool.take(num_new)
        row = self.rows[request.request_id]
        self.block_tables[row, len(table) : len(table) + len(new_blocks)] = [block.block_id for block in new_blocks]
        table.extend(new_blocks)
        return True

    def adopt(self, request: Request, max_tokens: int) -> int:
        """Replace the blocks that the request has yet to fill by blocks of the same content that `find_prefix` would
        find, up to `max_tokens` tokens. Returns how many tokens it need not compute because of that."""
        if not self.enable_prefix_caching:
            return 0
        request.update_block_hashes(self.block_size)
        first = request.num_computed_tokens // self.block_size
        adopted = _until_missing(map(self._find, request.block_hashes[first : max_tokens // self.block_size]))
        if not adopted:
            return 0
        self._replace(request, first, adopted)
        end = self._num_published[request.request_id] = first + len(adopted)
        return end * self.block_size - request.num_computed_tokens

    def drop_unseen(self, request: Request) -> None:
        """Release the blocks that no token after the computed ones sees. They stay cached until they are evicted."""
        if self._window is None:
            return
        first, past = self._num_dropped[request.request_id], self._num_unseen(request.num_computed_tokens)
        if past <= first:
            return
        table = self._tables[request.request_id]
        self.pool.release(table[first:past])
        table[first:past] = [self.pool.null_block] * (past - first)
        self.block_tables[self.rows[request.request_id], first:past] = self.pool.null_block.block_id
        self._num_dropped[request.request_id] = past

    def _num_unseen(self, num_tokens: int) -> int:
        """Blocks at the beginning that the token after `num_tokens` tokens does not see."""
        assert self._window is not None
        return max(0, num_tokens - self._window + 1) // self.block_size

    def publish(self, request: Request) -> None:
        """Make the request's full, computed blocks available to others. Where another block of the same content is, as
        when requests with one beginning have loaded it at the same time, the request's own is freed in its favour."""
        if not self.enable_prefix_caching:
            return
        first = self._num_published[request.request_id]
        last = request.num_computed_tokens // self.block_size
        if last <= first:
            return
        request.update_block_hashes(self.block_size)
        table = self._tables[request.request_id]
        for index in range(first, last):
            found = self.pool.publish(table[index], request.block_hashes[index])
            if found is not table[index] and not request.is_offered:
                self._replace(request, index, [found])
        self._num_published[request.request_id] = last

    def _replace(self, request: Request, first: int, blocks: Sequence[KVBlock]) -> None:
        """Put these in the place of the request's blocks from `first` on, or behind its last one."""
        table, end = self._tables[request.request_id], first + len(blocks)
        self.pool.touch(blocks)
        self.pool.release(table[first:end])
        table[first:end] = blocks
        self.block_tables[self.rows[request.request_id], first:end] = [block.block_id for block in blocks]

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block table; empty if it has none."""
        return [block.block_id for block in self._tables.get(request_id, ())]

    def close_table(self, request_id: str) -> list[KVBlock]:
        """Remove the request's table and return its blocks, which the caller must pass to `pool.release`."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return []
        del self._num_published[request_id], self._num_dropped[request_id]
        self._free_rows.append(self.rows.pop(request_id))
        return table

    def _open_table(self, request_id: str, prefix: Sequence[KVBlock]) -> list[KVBlock]:
        self.pool.touch(prefix)
        table = self._tables[request_id] = list(prefix)
        row = self.rows[request_id] = self._free_rows.pop()
        self.block_tables[row, : len(table)] = [block.block_id for block in table]
        self._num_published[request_id] = len(table)
        self._num_dropped[request_id] = sum(block is self.pool.null_block for block in table)
        return table


def _until_missing(found: Iterable[KVBlock | None]) -> list[KVBlock]:
    return list(takewhile(lambda block: block is not None, found))  # type: ignore[arg-type]


class HeldBlocks(dict[str, list[KVBlock]]):
    """The blocks that the connector still needs although no request has them in its table, by request id or retained
    id. Each holds a reference to its blocks.

    request ends, connector needs its blocks ─▶ held ──the connector needs only some──▶ abandoned, the others are free
    load given up, reads may still write ─────────────────────────────────────────────▶ abandoned
    held | abandoned ──the connector names the id as freed──▶ free

    Abandoned I/O may hang for as long as its store does. So it takes nothing from the share of transfers, and a request
    that does not fit beside it stops no other.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        super().__init__()
        self._kv = kv
        self.abandoned: set[str] = set()

    def abandon(self, held_id: str, blocks: Sequence[KVBlock]) -> None:
        """Hold the blocks of a load that was given up."""
        self.abandoned.add(held_id)
        self[held_id] = list(blocks)

    def narrow(self, held_id: str, block_ids: Collection[int]) -> None:
        """The connector has abandoned I/O and needs only these of the id's blocks for it. Unknown ids are ignored."""
        blocks = self.get(held_id)
        if blocks is None:
            return
        self.abandoned.add(held_id)
        self[held_id] = [block for block in blocks if block.block_id in block_ids]
        self._kv.pool.release([block for block in blocks if block.block_id not in block_ids])

    def free(self, held_id: str) -> None:
        """The connector needs none of them any more."""
        self.abandoned.discard(held_id)
        self._kv.pool.release(self.pop(held_id, []))

    @property
    def ids(self) -> set[int]:
        return self._ids_of(self)

    def may_hold(self, num_tokens: int, others: Collection[Request], max_fraction: float) -> bool:
        """Whether one more transfer may begin: they hold at most a fraction of the blocks. Those of `others` count that
        are handed over beside streams, those of abandoned I/O do not."""
        begun = () if all(one.is_handed_over for one in others) else (one for one in others if one.is_handed_over)
        held = self._ids_of(self.keys() - self.abandoned)
        num_held = len(held.union(*(self._kv.block_ids(one.request_id) for one in begun)))
        num_held += self._kv.num_blocks_for(num_tokens) if num_held else 0
        return num_held <= max_fraction * self._kv.num_blocks

    def leave_room(self, num_tokens: int, *, is_whole: bool) -> bool:
        """Whether so many tokens fit beside abandoned I/O. `is_whole`: with a window, too, they need all blocks."""
        if self._kv.has_window and not is_whole:
            return True
        return self._kv.num_blocks_for(num_tokens) <= self._kv.num_blocks - len(self._ids_of(self.abandoned))

    def _ids_of(self, held_ids: Collection[str]) -> set[int]:
        null = self._kv.pool.null_block
        return {block.block_id for held_id in held_ids for block in self[held_id] if block is not null}
