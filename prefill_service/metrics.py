"""What the prefill role counts beside what every role does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from instance.metrics import RequestMetrics


@dataclass(slots=True)
class Metrics(RequestMetrics):
    """Totals of this role since the start."""

    COUNTERS: ClassVar[dict[str, tuple[str, str]]] = {
        **RequestMetrics.COUNTERS,
        "num_leases_given_up": (
            "tandem_prefill_given_up_leases",
            "Transfers released here, because their request was cancelled, failed or needed no hand-over.",
        ),
    }

    num_leases_given_up: int = 0
    """Transfers released here, because their request was cancelled, failed or needed no hand-over."""
