"""What a connector has moved, and what went wrong. Totals since the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.messages import KVMoved, KVReads, KVTotals
from serving.histogram import Histogram

MAX_REASONS = 24
"""Different words for failures, in each direction: a store may answer with words of its own, and each is a label."""
MAX_REASON_LEN = 48
OTHER = "other"

POST_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
READ_BUCKETS_S = POST_BUCKETS_S[1:]
READ_BUCKETS_BYTES = tuple(2**power for power in range(11, 35, 2))
READ_BUCKETS_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
"""Bounds by which reads are counted: those of vLLM's NIXL connector."""


class FailureCounter(Counter[str]):
    """Failures by reason. Words past the bounds are counted as `OTHER`; meant for `counter[word] += 1`."""

    def __setitem__(self, reason: str, count: int) -> None:
        is_new = reason not in self
        if is_new and (len(reason) > MAX_REASON_LEN or len(self) >= MAX_REASONS):
            super().__setitem__(OTHER, self[OTHER] + count)
        else:
            super().__setitem__(reason, count)


@dataclass(slots=True)
class ReadCounters:
    """Reads of several blocks in one go. Written in the step loop alone."""

    seconds: Histogram = field(default_factory=lambda: Histogram(READ_BUCKETS_S))
    post_seconds: Histogram = field(default_factory=lambda: Histogram(POST_BUCKETS_S))
    num_bytes: Histogram = field(default_factory=lambda: Histogram(READ_BUCKETS_BYTES))
    num_descriptors: Histogram = field(default_factory=lambda: Histogram(READ_BUCKETS_DESCRIPTORS))
    num_failed: int = 0

    def ended_well(self, seconds: float, post_seconds: float, num_bytes: int, num_descriptors: int) -> None:
        """One read has brought its blocks."""
        self.seconds.observe(seconds)
        self.post_seconds.observe(post_seconds)
        self.num_bytes.observe(num_bytes)
        self.num_descriptors.observe(num_descriptors)

    def totals(self) -> KVReads:
        """The same for the front."""
        return KVReads(
            by_seconds=self.seconds.counts(),
            by_post_seconds=self.post_seconds.counts(),
            by_bytes=self.num_bytes.counts(),
            by_descriptors=self.num_descriptors.counts(),
            seconds=self.seconds.sum,
            post_seconds=self.post_seconds.sum,
            num_bytes=int(self.num_bytes.sum),
            num_descriptors=int(self.num_descriptors.sum),
            num_failed=self.num_failed,
        )


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
    reads: ReadCounters | None = None
    """Of a connector that reads several blocks in one go."""

    def totals(self, connector: str) -> KVTotals:
        """The same for the front. What the engine counts itself (leases, recomputed blocks) goes with its load."""
        return KVTotals(
            connector=connector,
            saved=KVMoved(self.num_saved_blocks, self.num_saved_bytes, self.save_s, dict(self.save_failures)),
            loaded=KVMoved(self.num_loaded_blocks, self.num_loaded_bytes, self.load_s, dict(self.load_failures)),
            num_shared_blocks=self.num_shared_blocks,
            reads=None if self.reads is None else self.reads.totals(),
        )
