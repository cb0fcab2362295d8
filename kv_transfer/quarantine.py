"""Blocks that a read may still write to although nobody waits for it any more.

    read in flight ──deadline | abort──▶ quarantined ──done | disconnected──▶ ended: its blocks are free
                                              │
                                              └─too many blocks, or for too long─▶ rebuild: the agent is destroyed
                                                                                   and rebuilt ─▶ ended

Giving up on a read does not end it: over TCP it goes on writing for as long as its peer sends. So its blocks stay with
the connector until the read itself has ended, never by time alone. What bounds them is the destruction of the agent,
which ends every read.

Pure: the caller says what time it is. One thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _GivenUp:
    block_ids: frozenset[int]
    since: float


class Quarantine:
    """Owns the given-up reads of one connector, by whatever names them."""

    def __init__(self, *, max_blocks: int, max_age_s: float) -> None:
        self._max_blocks = max_blocks
        self._max_age_s = max_age_s
        self._reads: dict[Hashable, _GivenUp] = {}  # oldest first
        self._rebuilding = False

    def __contains__(self, read: Hashable) -> bool:
        return read in self._reads

    @property
    def block_ids(self) -> frozenset[int]:
        """Blocks that must not be used."""
        return frozenset().union(*(given_up.block_ids for given_up in self._reads.values()))

    @property
    def num_blocks(self) -> int:
        """How many."""
        return len(self.block_ids)

    def put(self, read: Hashable, block_ids: Iterable[int], now: float) -> None:
        """A read in flight was given up. Idempotent."""
        if read not in self._reads:
            self._reads[read] = _GivenUp(frozenset(block_ids), now)

    def ended(self, read: Hashable) -> None:
        """A read has come to an end by itself, or with its agent. Unknown ones are ignored."""
        self._reads.pop(read, None)

    # The agent

    def rebuild_due(self, now: float) -> bool:
        """Whether the agent is to be destroyed now."""
        if self._rebuilding or not self._reads:
            return False
        return self.num_blocks > self._max_blocks or self._oldest + self._max_age_s <= now

    def rebuild_started(self) -> None:
        """The agent is being destroyed. What is in here ends with it, read by read."""
        self._rebuilding = True

    def rebuilt(self) -> None:
        """There is a new agent."""
        self._rebuilding = False

    @property
    def next_deadline(self) -> float | None:
        """When `rebuild_due` may change by itself; None: never."""
        return self._oldest + self._max_age_s if self._reads and not self._rebuilding else None

    @property
    def _oldest(self) -> float:
        return next(iter(self._reads.values())).since
