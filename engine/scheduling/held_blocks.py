"""The blocks that the connector still needs although no request has them in its table.

    request ends, connector needs its blocks ─▶ held ──the connector needs only some──▶ abandoned, the others are free
    load given up, reads may still write ─────────────────────────────────────────────▶ abandoned
    held | abandoned ──the connector names the id as freed──▶ free

Abandoned I/O may hang for as long as its store does. So it takes nothing from the share of transfers, and a request
that does not fit beside it stops no other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.scheduling.kv_cache_manager import KVBlock, KVCacheManager
from engine.scheduling.request import Request


class HeldBlocks(dict[str, list[KVBlock]]):
    """By request id or retained id. Each holds a reference to its blocks."""

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
