"""Blocks that a given-up read may still write to.

    read in flight ──deadline | abort──▶ pinned ──succeeded | disconnected──▶ ended: its blocks are free
                                            │
                                            └─too many blocks, or for too long─▶ rebuild: the agent is destroyed
                                                                                 and made again ─▶ ended

Giving up on a read does not end it: over TCP it goes on writing for as long as its peer sends. So its blocks stay with
the connector until the read itself has ended, never by time alone. Destroying the agent ends every read, which bounds
the number of pinned blocks.

Pure: the caller passes the time. One thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _GivenUp:
    block_ids: frozenset[int]
    since: float


class PinnedBlocks:
    """Owns the given-up reads of one connector, under any hashable names."""

    def __init__(self, *, max_blocks: int, max_age_s: float) -> None:
        self._max_blocks = max_blocks
        self._max_age_s = max_age_s
        self._reads: dict[Hashable, _GivenUp] = {}  # oldest first
        self.rebuilding = False
        """The agent is being destroyed, which ends the pinned reads one by one. The caller sets it."""

    @property
    def block_ids(self) -> frozenset[int]:
        """Blocks that must not be used."""
        return frozenset().union(*(given_up.block_ids for given_up in self._reads.values()))

    def pin(self, read: Hashable, block_ids: Iterable[int], now: float) -> None:
        """A read in flight was given up. Idempotent."""
        if read not in self._reads:
            self._reads[read] = _GivenUp(frozenset(block_ids), now)

    def unpin(self, read: Hashable) -> None:
        """A read has ended. Unknown ones are ignored."""
        self._reads.pop(read, None)

    def rebuild_due(self, now: float) -> bool:
        """Whether the agent must be destroyed now."""
        if self.rebuilding or not self._reads:
            return False
        return len(self.block_ids) > self._max_blocks or self._oldest + self._max_age_s <= now

    @property
    def next_deadline(self) -> float | None:
        """When `rebuild_due` may change by itself; None: never."""
        return self._oldest + self._max_age_s if self._reads and not self.rebuilding else None

    @property
    def _oldest(self) -> float:
        return next(iter(self._reads.values())).since
