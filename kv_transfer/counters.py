"""What a connector has moved, and what went wrong. Totals since the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.messages import KVMoved, KVTotals

MAX_REASONS = 24
"""Different words for failures, in each direction: a store may answer with words of its own, and each is a label."""
MAX_REASON_LEN = 48
OTHER = "other"


class FailureCounter(Counter[str]):
    """Failures by reason. Words past the bounds are counted as `OTHER`; meant for `counter[word] += 1`."""

    def __setitem__(self, reason: str, count: int) -> None:
        is_new = reason not in self
        if is_new and (len(reason) > MAX_REASON_LEN or len(self) >= MAX_REASONS):
            super().__setitem__(OTHER, self[OTHER] + count)
        else:
            super().__setitem__(reason, count)


@dataclass(slots=True)
class TransferCounters:
    """Written in the step loop alone. Seconds are summed over I/O threads."""

    num_saved_blocks: int = 0
    num_saved_bytes: int = 0
    save_s: float = 0.0
    num_shared_blocks: int = 0
    """Pages that were in the store already."""
    num_loaded_blocks: int = 0
    num_loaded_bytes: int = 0
    load_s: float = 0.0
    num_recomputed_blocks: int = 0
    """Blocks that were to come from elsewhere and did not."""
    num_expired_leases: int = 0
    save_failures: Counter[str] = field(default_factory=FailureCounter)
    load_failures: Counter[str] = field(default_factory=FailureCounter)

    def totals(self, connector: str) -> KVTotals:
        """The same for the front. What the engine counts itself (leases, recomputed blocks) goes with its load."""
        return KVTotals(
            connector=connector,
            saved=KVMoved(self.num_saved_blocks, self.num_saved_bytes, self.save_s, dict(self.save_failures)),
            loaded=KVMoved(self.num_loaded_blocks, self.num_loaded_bytes, self.load_s, dict(self.load_failures)),
            num_shared_blocks=self.num_shared_blocks,
        )
