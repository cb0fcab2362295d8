"""What the decode role counts beside what every role does."""

from __future__ import annotations

from dataclasses import dataclass

from instance.metrics import RequestMetrics


@dataclass(slots=True)
class Metrics(RequestMetrics):
    """Totals of this role since the start."""

    num_seeded: int = 0
    """Requests that went on after a first token from elsewhere."""
    num_loaded: int = 0
    """Transfers that were received, as far as they came."""
    num_external_tokens: int = 0
    """Prompt tokens whose KV came with them."""
    num_recomputed_blocks: int = 0
    """Blocks that should have come with them."""
