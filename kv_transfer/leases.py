"""The lease table: which transfers are offered, who reads them, and until when.

The state of a transfer has two axes.

    production   computing {num_ready_blocks grows} ──▶ complete {num_tokens} | failed
    lease        offered ──▶ attached ──▶ released | expired

    offer ─▶ offered ──attach──▶ attached ──renew──┐     every arrow sets a new deadline
               │  │                │  ▲────────────┘
               │  └───────release──┴──────▶ ended "released"
               ├──────── deadline ─┴──────▶ ended "expired"
               └── production failed ─────▶ ended "failed"

A transfer ends exactly once, and its end is what gives back what it holds: `take_ended` names each one time. While it
is computed and nobody has attached, progress keeps an offer alive, for the request itself has deadlines; once
attached, only its reader does. A release may come before the offer (the router gave up first): it leaves a tombstone,
and the offer then ends at once. The end of a transfer leaves a tombstone too, so that its id never lives twice.
Tombstones are bounded in number and time.

Pure: the caller says what time it is. One thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

Ended = Literal["released", "expired", "failed"]


@dataclass(slots=True)
class Lease:
    """One transfer that has not ended. Times are the caller's monotonic seconds."""

    transfer_id: str
    lease_s: float
    deadline: float
    attached: bool = False
    num_ready_blocks: int = 0
    num_tokens: int | None = None
    """Set when production is complete."""


@dataclass(frozen=True, slots=True)
class EndedLease:
    """How a transfer ended."""

    transfer_id: str
    ended: Ended
    num_ready_blocks: int = 0
    reason: str | None = None


class LeaseTable:
    """Owns the leases of one engine core. Commands about unknown transfers are ignored, releases are remembered."""

    def __init__(self, *, max_lease_s: float = 300.0, tombstone_s: float = 120.0, max_tombstones: int = 10_000) -> None:
        self._max_lease_s = max_lease_s
        self._tombstone_s = tombstone_s
        self._max_tombstones = max_tombstones
        self._leases: dict[str, Lease] = {}
        self._tombstones: OrderedDict[str, float] = OrderedDict()  # transfer_id → time at which it is forgotten
        self._ended: list[EndedLease] = []
        self._earliest = math.inf  # no deadline is before this

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._leases

    def get(self, transfer_id: str) -> Lease | None:
        """The lease, if it has not ended."""
        return self._leases.get(transfer_id)

    @property
    def num_tombstones(self) -> int:
        """Ids that may not be offered."""
        return len(self._tombstones)

    # The producer's side

    def offer(self, transfer_id: str, *, lease_s: float, now: float) -> bool:
        """A transfer begins. False: it was released before, has ended, or is already there; nothing is held."""
        if transfer_id in self._leases:
            return False
        if transfer_id in self._tombstones:
            self._ended.append(EndedLease(transfer_id, "released", reason="released before it was offered"))
            return False
        lease = self._leases[transfer_id] = Lease(transfer_id, self._bounded(lease_s), math.inf)
        self._extend(lease, now)
        return True

    def progress(self, transfer_id: str, num_ready_blocks: int, *, now: float) -> None:
        """More blocks can be read."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.num_tokens is not None:
            return
        lease.num_ready_blocks = max(lease.num_ready_blocks, num_ready_blocks)
        if not lease.attached:
            self._extend(lease, now)

    def complete(self, transfer_id: str, num_tokens: int, *, now: float) -> None:
        """Everything can be read."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.num_tokens is not None:
            return
        lease.num_tokens = num_tokens
        if not lease.attached:
            self._extend(lease, now)

    def fail(self, transfer_id: str, reason: str, *, now: float) -> None:
        """Production has come to a bad end; the transfer ends with it."""
        if transfer_id in self._leases:
            self._end(transfer_id, "failed", now, reason)

    # The reader's side

    def attach(self, transfer_id: str, *, lease_s: float, now: float) -> None:
        """Somebody reads."""
        lease = self._leases.get(transfer_id)
        if lease is not None:
            lease.attached = True
            self._renew(lease, lease_s, now)

    def renew(self, transfer_id: str, *, lease_s: float, now: float) -> None:
        """Its reader is alive."""
        lease = self._leases.get(transfer_id)
        if lease is not None:
            self._renew(lease, lease_s, now)

    def release(self, transfer_id: str, *, now: float) -> bool:
        """Nobody needs it any more. Idempotent; False: it was not held."""
        if transfer_id in self._leases:
            self._end(transfer_id, "released", now)
            return True
        if transfer_id not in self._tombstones:
            self._bury(transfer_id, now)
        return False

    # Time

    def expire(self, now: float) -> None:
        """End what is past its deadline."""
        while self._tombstones and next(iter(self._tombstones.values())) <= now:
            self._tombstones.popitem(last=False)
        if now < self._earliest:
            return
        for lease in [lease for lease in self._leases.values() if lease.deadline <= now]:
            self._end(lease.transfer_id, "expired", now, f"no sign of its reader for {lease.lease_s:g} s")
        self._earliest = min((lease.deadline for lease in self._leases.values()), default=math.inf)

    @property
    def next_deadline(self) -> float | None:
        """No lease expires before this; None: there is none."""
        return self._earliest if self._leases else None

    def take_ended(self) -> list[EndedLease]:
        """Transfers that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # Inside

    def _bounded(self, lease_s: float) -> float:
        return min(lease_s, self._max_lease_s) if lease_s > 0 else self._max_lease_s

    def _renew(self, lease: Lease, lease_s: float, now: float) -> None:
        if lease_s > 0:
            lease.lease_s = self._bounded(lease_s)
        self._extend(lease, now)

    def _extend(self, lease: Lease, now: float) -> None:
        lease.deadline = now + lease.lease_s
        self._earliest = min(self._earliest, lease.deadline)

    def _end(self, transfer_id: str, ended: Ended, now: float, reason: str | None = None) -> None:
        lease = self._leases.pop(transfer_id)
        self._bury(transfer_id, now)
        self._ended.append(EndedLease(transfer_id, ended, lease.num_ready_blocks, reason))

    def _bury(self, transfer_id: str, now: float) -> None:
        self._tombstones[transfer_id] = now + self._tombstone_s
        while len(self._tombstones) > self._max_tombstones:
            self._tombstones.popitem(last=False)
