"""What a connector has moved, and what went wrong. Totals since the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
    save_failures: Counter[str] = field(default_factory=Counter)
    load_failures: Counter[str] = field(default_factory=Counter)
