"""What the decode role counts beside what every role does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from instance.metrics import RequestMetrics, Stages
from serving.events import RequestEvent


@dataclass(slots=True)
class Metrics(RequestMetrics):
    """Totals of this role since the start."""

    STAGES: ClassVar[Stages] = {
        **RequestMetrics.STAGES,
        "reserve": (RequestEvent.RECEIVED, RequestEvent.KV_RESERVED),
        "load": (RequestEvent.KV_RESERVED, RequestEvent.KV_LOADED),
    }
    COUNTERS: ClassVar[dict[str, tuple[str, str]]] = {
        **RequestMetrics.COUNTERS,
        "num_seeded": ("tandem_decode_seeded_requests", "Requests that went on after a first token from elsewhere."),
        "num_loaded": ("tandem_decode_loaded_transfers", "Transfers that were received, as far as they came."),
    }

    num_seeded: int = 0
    """Requests that went on after a first token from elsewhere."""
    num_loaded: int = 0
    """Transfers that were received, as far as they came."""
    num_external_tokens: int = 0
    """Prompt tokens whose KV came with them."""
    num_recomputed_blocks: int = 0
    """Blocks that should have come with them."""
