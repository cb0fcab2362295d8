"""What the NIXL connector asks for and who carries it out: reads of pages, and the Wire that PageReader implements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.loads import Load, LoadOp
from kv_transfer.nixl_metadata import TransferMetadata

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

    @property
    def is_cancelled(self) -> bool:
        """Not worth beginning any more."""
        return all(op.is_cancelled for op in self.ops)


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
