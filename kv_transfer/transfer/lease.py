"""The lease table: which transfers are offered, which are being read, and until when they are held.

The state of a transfer has two axes.

    production   computing {num_ready_blocks grows} ──▶ complete | failed
    lease        offered ──▶ attached ──▶ released | expired

    offer ─▶ offered ──attach──▶ attached ──renew──┐     every arrow sets a new deadline
               │  │                │  ▲────────────┘
               │  └───────release──┴──────▶ ended "released"
               ├──────── deadline ─┴──────▶ ended "expired"
               └── production failed ─────▶ ended "failed"

A transfer ends exactly once, which frees what it holds: `take_ended` names each once. Until a reader attaches, progress
extends an offer, for the request itself has deadlines; once attached, only its reader does. A release may come before
the offer (the router gave up first): it leaves a tombstone, and the offer then ends at once. The end of a transfer
leaves a tombstone too, so that its id is never used twice. Tombstones are bounded in number and time.

Pure: the caller passes the time. One thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from engine.core.messages import TransferEvent

Ended = Literal["released", "expired", "failed"]


@dataclass(slots=True)
class Lease:
    """One transfer that has not ended. Times are the caller's monotonic seconds."""

    transfer_id: str
    lease_s: float
    deadline: float
    attached: bool = False
    num_ready_blocks: int = 0
    is_complete: bool = False


class LeaseTable:
    """Owns the leases of one engine core. Commands about unknown transfers are ignored, releases are remembered."""

    def __init__(self, *, max_lease_s: float = 300.0, tombstone_s: float = 120.0, max_tombstones: int = 10_000) -> None:
        self._max_lease_s = max_lease_s
        self._tombstone_s = tombstone_s
        self._max_tombstones = max_tombstones
        self._leases: dict[str, Lease] = {}
        self._tombstones: OrderedDict[str, float] = OrderedDict()  # transfer_id → time at which it is forgotten
        self._ended: list[TransferEvent] = []
        self._earliest = math.inf  # no deadline is before this

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, transfer_id: str) -> Lease | None:
        return self._leases.get(transfer_id)

    # Producer

    def offer(self, transfer_id: str, *, lease_s: float, now: float) -> bool:
        """A transfer begins. False: it was released before, has ended, or already exists; nothing is held."""
        if transfer_id in self._leases:
            return False
        if transfer_id in self._tombstones:
            reason = "released before it was offered"
            self._ended.append(TransferEvent(transfer_id, 0, ended="released", reason=reason))
            return False
        lease = self._leases[transfer_id] = Lease(transfer_id, self._bounded(lease_s), math.inf)
        self._extend(lease, now)
        return True

    def progress(self, transfer_id: str, num_ready_blocks: int, *, is_complete: bool = False, now: float) -> None:
        """More blocks can be read; `is_complete`: everything can."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.is_complete:
            return
        lease.num_ready_blocks = max(lease.num_ready_blocks, num_ready_blocks)
        lease.is_complete = is_complete
        if not lease.attached:
            self._extend(lease, now)

    def fail(self, transfer_id: str, reason: str, *, now: float) -> None:
        """Production has failed, which ends the transfer."""
        if transfer_id in self._leases:
            self._end(transfer_id, "failed", now, reason)

    # Reader

    def attach(self, transfer_id: str, *, lease_s: float, now: float) -> None:
        if (lease := self._leases.get(transfer_id)) is not None:
            lease.attached = True
            self.renew(transfer_id, lease_s=lease_s, now=now)

    def renew(self, transfer_id: str, *, lease_s: float, now: float) -> None:
        """Its reader is alive."""
        if (lease := self._leases.get(transfer_id)) is not None:
            if lease_s > 0:
                lease.lease_s = self._bounded(lease_s)
            self._extend(lease, now)

    def release(self, transfer_id: str, *, now: float) -> bool:
        """The reader has finished with it. Idempotent; False: it was not held."""
        if transfer_id in self._leases:
            self._end(transfer_id, "released", now)
            return True
        if transfer_id not in self._tombstones:
            self._add_tombstone(transfer_id, now)
        return False

    # Time

    def expire(self, now: float) -> None:
        """End what is past its deadline."""
        while self._tombstones and next(iter(self._tombstones.values())) <= now:
            self._tombstones.popitem(last=False)
        if now < self._earliest:
            return
        for lease in [lease for lease in self._leases.values() if lease.deadline <= now]:
            self._end(lease.transfer_id, "expired", now, f"not renewed for {lease.lease_s:g} s")
        self._earliest = min((lease.deadline for lease in self._leases.values()), default=math.inf)

    @property
    def next_deadline(self) -> float | None:
        """No lease expires before this; None: there is none."""
        return self._earliest if self._leases else None

    def take_ended(self) -> list[TransferEvent]:
        """Transfers that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # Inside

    def _bounded(self, lease_s: float) -> float:
        return min(lease_s, self._max_lease_s) if lease_s > 0 else self._max_lease_s

    def _extend(self, lease: Lease, now: float) -> None:
        lease.deadline = now + lease.lease_s
        self._earliest = min(self._earliest, lease.deadline)

    def _end(self, transfer_id: str, ended: Ended, now: float, reason: str | None = None) -> None:
        lease = self._leases.pop(transfer_id)
        self._add_tombstone(transfer_id, now)
        self._ended.append(TransferEvent(transfer_id, lease.num_ready_blocks, ended=ended, reason=reason))

    def _add_tombstone(self, transfer_id: str, now: float) -> None:
        self._tombstones[transfer_id] = now + self._tombstone_s
        while len(self._tombstones) > self._max_tombstones:
            self._tombstones.popitem(last=False)
