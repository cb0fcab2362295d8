"""What the NIXL connector asks for and who carries it out: reads of pages, and the Wire that PageReader implements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.counters import TransferCounters
from kv_transfer.loads import Load, LoadOp
from kv_transfer.nixl_metadata import TransferMetadata
from kv_transfer.page_io import SKIPPED

GIVEN_UP = "given_up"


@dataclass(slots=True, eq=False)
class Read:
    """A few pages of one load, read in one go."""

    owner: Load
    source: TransferMetadata
    ops: list[LoadOp]
    digests: list[bytes]
    """One for each operation; empty while digests are off."""
    deadline: float
    post_s: float = 0.0
    """Seconds that it took to hand it to NIXL."""

    @property
    def is_cancelled(self) -> bool:
        """Not worth beginning any more."""
        return all(op.is_cancelled for op in self.ops)


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """How a read ended: `failure` None, well."""

    read: Read
    failure: str | None
    duration_s: float

    def count(self, counters: TransferCounters) -> None:
        """What was given up or never begun has not failed."""
        reads, ops = counters.reads, self.read.ops
        assert reads is not None, "a connector that reads in one go counts it"
        if self.failure is None:
            num_bytes = sum(op.name.spec.payload_bytes for op in ops)
            reads.ended_well(self.duration_s, self.read.post_s, num_bytes, len(ops))
        elif self.failure not in (SKIPPED, GIVEN_UP):
            reads.num_failed += 1


class Wire(Protocol):
    """What carries reads out. `on_end(read, failure, seconds)` tells the end of each, from any thread."""

    def submit(self, read: Read) -> None:
        """Begin soon. Returns at once."""
        ...

    def rebuild(self) -> None:
        """End every read that was given up (`owner.holds_blocks`), whatever it takes, then call `on_rebuilt`."""
        ...

    def shutdown(self, timeout_s: float) -> bool:
        """End all; False: it took longer, and reads may be left."""
        ...


OnEnd = Callable[[Read, str | None, float], None]
