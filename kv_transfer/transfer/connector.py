"""What all connectors share: options, counters, I/O threads, and the scheduler side around a Producer and a Loader.

    scheduler side   Producer (prefill, leases) and Loader (decode) decide: operations, events, results
    worker side      a subclass carries operations out on threads, which pass results to `_end_op`; its poll() applies
                     them

Everything but `_end_op` and `_call_later` belongs to the step loop's thread. Neither side depends on a role: one
instance may produce some transfers and load others.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from engine.core.messages import KVMoved, KVProgress, KVReads, KVTotals, LeaseCommand, TransferEvent
from engine.errors import EngineError
from engine.kv_connector import KVConnector, KVConnectorOutput
from engine.scheduling.request import Request
from kv_transfer.secret import load_secret
from kv_transfer.transfer.lease import LeaseTable
from kv_transfer.transfer.loader import Loader, LoadOp
from kv_transfer.transfer.producer import Producer, SaveOp
from serving.histogram import Histogram

_log = logging.getLogger(__name__)

MAX_REASONS = 24
"""Different reasons of failures, in each direction: a store may report its own, and each becomes a label."""
MAX_REASON_LEN = 48
OTHER = "other"

POST_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
READ_BUCKETS_S = POST_BUCKETS_S[1:]
READ_BUCKETS_BYTES = tuple(2**power for power in range(11, 35, 2))
READ_BUCKETS_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
"""Bounds by which reads are counted: those of vLLM's NIXL connector."""


class FailureCounter(Counter[str]):
    """Failures by reason: `counter[reason] += 1`. Reasons past the bounds are counted as `OTHER`."""

    def __setitem__(self, reason: str, count: int) -> None:
        is_new = reason not in self
        if is_new and (len(reason) > MAX_REASON_LEN or len(self) >= MAX_REASONS):
            reason, count = OTHER, self[OTHER] + count
        super().__setitem__(reason, count)


@dataclass(slots=True)
class ReadCounters:
    """Reads of several blocks in one operation. Written in the step loop alone."""

    seconds: Histogram = field(default_factory=lambda: Histogram(READ_BUCKETS_S))
    post_seconds: Histogram = field(default_factory=lambda: Histogram(POST_BUCKETS_S))
    num_bytes: Histogram = field(default_factory=lambda: Histogram(READ_BUCKETS_BYTES))
    num_descriptors: Histogram = field(default_factory=lambda: Histogram(READ_BUCKETS_DESCRIPTORS))
    num_failed: int = 0

    def count_success(self, seconds: float, post_seconds: float, num_bytes: int, num_descriptors: int) -> None:
        self.seconds.observe(seconds)
        self.post_seconds.observe(post_seconds)
        self.num_bytes.observe(num_bytes)
        self.num_descriptors.observe(num_descriptors)

    def totals(self) -> KVReads:
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
class MoveCounters:
    """One direction of a connector. Seconds are summed over I/O threads."""

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=FailureCounter)

    def totals(self) -> KVMoved:
        return KVMoved(self.num_blocks, self.num_bytes, self.seconds, dict(self.failures))


@dataclass(slots=True)
class TransferCounters:
    """Totals of one connector since its start. Written in the step loop alone."""

    saved: MoveCounters = field(default_factory=MoveCounters)
    loaded: MoveCounters = field(default_factory=MoveCounters)
    num_shared_blocks: int = 0
    """Pages that were already in the store."""
    reads: ReadCounters | None = None
    """Of a connector that reads several blocks in one operation."""

    def totals(self, connector: str) -> KVTotals:
        """As a message. The engine itself reports leases and recomputed blocks."""
        return KVTotals(
            connector=connector,
            saved=self.saved.totals(),
            loaded=self.loaded.totals(),
            num_shared_blocks=self.num_shared_blocks,
            reads=None if self.reads is None else self.reads.totals(),
        )


Job = Callable[[], object]


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """A daemon: if it hangs in a dead file system, it must not keep the process alive. An exception in it ends the
    process: without the thread, what waits for it would keep its blocks for good."""

    def run_or_exit() -> None:
        try:
            run()
        except BaseException:
            _log.exception("the thread %s has failed, the process ends", name)
            os._exit(1)

    thread = threading.Thread(target=run_or_exit, name=name, daemon=True)
    thread.start()
    return thread


class IOThreads:
    """Threads that run jobs, urgent ones first, else in order: the step loop never waits for a disk or a network. A job
    must not raise."""

    def __init__(self, num_threads: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: queue.PriorityQueue[tuple[int, int, Job | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._busy_since: dict[int, float] = {}
        """When each thread has begun the job that it runs, by the thread's id."""
        self.is_ending = False
        self._threads = [start_thread(self._run, f"{name}-{index}") for index in range(num_threads)]

    def are_busy_for(self, seconds: float) -> bool:
        """Every thread has been in one job for longer than this."""
        since = list(self._busy_since.values())
        return len(since) == len(self._threads) and self._clock() - max(since) > seconds

    def submit(self, job: Job, *, is_urgent: bool = False) -> None:
        self._jobs.put((0 if is_urgent else 1, next(self._numbers), job))

    def shutdown(self, timeout_s: float) -> None:
        """Finish what was queued, then end the threads; some may be left after `timeout_s`. A job that queues another
        must not do so while `is_ending`."""
        self.is_ending = True
        for _ in self._threads:
            self._jobs.put((2, next(self._numbers), None))
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            self._busy_since[threading.get_ident()] = self._clock()
            job()
            del self._busy_since[threading.get_ident()]


SKIPPED = "skipped"
"""Failure of an operation that was cancelled before it began; not counted."""
GIVEN_UP = "given_up"
"""Failure of a read that the connector stopped waiting for; counted when it is given up."""


@dataclass(frozen=True, slots=True)
class OpResult:
    """The result of one operation. `failure` is a counter's label, None on success; `num_bytes` were moved in
    `duration_s`."""

    op: SaveOp | LoadOp
    failure: str | None
    num_bytes: int = 0
    duration_s: float = 0.0


def progress_of(event: TransferEvent, request_id: str) -> KVProgress:
    """What the transfer client of `request_id` makes of a producer's event: the attach stream without a network."""
    return KVProgress(
        request_id,
        event.num_ready_blocks,
        digests=[*event.digests, *([event.tail_digest] if event.tail_digest else [])],
        connector_metadata=event.connector_metadata,
        num_tokens=event.num_tokens,
        failed=event.ended,
    )


def self_test_error(connector_name: str, problem: str) -> EngineError:
    """The connector would hand over wrong KV, or none: the instance must not start with it."""
    return EngineError(f"self-test of the {connector_name} connector: {problem}; the instance does not start with it")


MAX_LEASE_S = 300.0
"""Longest lease, unless a connector's options have another."""
_MAX_TIME_S = 1e9
"""32 years. Threads and sockets cannot wait for centuries."""


class TransferOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of every connector in this package."""

    kv_secret_file: str = ""
    """File with the key of the digests (64 hex digits), the same for all instances. Required while `digest` is on."""
    digest: bool = True
    """Keyed BLAKE3 over every page. Off: only headers are checked, not contents."""
    num_io_threads: int = 2
    """Threads that read and write pages."""
    max_lease_s: float = MAX_LEASE_S
    """Longest lease that a request or a reader can get, seconds."""
    tombstone_s: float = 120.0
    """How long a release that came before its offer is remembered, seconds."""
    max_tombstones: int = 10_000
    """Maximum number of such releases, and of ended transfers, remembered."""
    load_timeout_s: float = 10.0
    """How long pages may take once they were announced, or looked up, and after each page that came, seconds; pages
    that are late are computed. In all a hand-over has nine tenths of its reservation, a prompt nine tenths of the time
    within which it must begin, and a lookup three times as long as this, or once this if its prompt is handed over.
    Pages that are announced, or looked up, when little or nothing is left of that have half of the rest of the time. A
    store that ends nothing for so long counts as hanging, and fails the hand-overs that it should save."""
    shutdown_timeout_s: float = 2.0
    """How long to wait for I/O in flight at shutdown, seconds. An instance kills its core after 5 s."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not 0 < value < math.inf:  # as for NaN
                raise ValueError(f"{name} is {value}; it must be greater than 0 and finite")
            if is_number and name.endswith("_s") and not name.endswith("_per_s") and value > _MAX_TIME_S:
                raise ValueError(f"{name} is {value:g}; it must be at most {_MAX_TIME_S:g}")

    def digest_key(self) -> bytes | None:
        """The key, or None where digests are off."""
        if not self.digest:
            return None
        if not self.kv_secret_file:
            raise EngineError(
                "kv_secret_file is not set: make a key with `openssl rand -hex 32`, the same for all instances, and"
                " give its file by --kv-secret-file or in --kv-options; or set digest to false there"
            )
        return load_secret(self.kv_secret_file)


Options = TypeVar("Options", bound=TransferOptions)


def parse_options(kind: type[Options], connector_name: str, options: Mapping[str, object]) -> Options:
    """Options from settings, whose values may be strings. Raises EngineError that lists the known options."""
    try:
        return msgspec.convert(options, kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise EngineError(f"options of the {connector_name} connector: {error}; known: {known}") from error


class TransferConnector(KVConnector):
    """The scheduler side of a connector. A subclass sets `_producer` and `_loader` in
    `register_kv_cache`, and implements the worker side."""

    def __init__(
        self, name: str, options: TransferOptions, *, wake: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.counters = TransferCounters()
        self._key = options.digest_key()
        self._wake = wake
        self._clock = clock
        self._leases = LeaseTable(
            max_lease_s=options.max_lease_s, tombstone_s=options.tombstone_s, max_tombstones=options.max_tombstones
        )
        self._held: dict[str, int] = {}  # request_id → how many of producer and loader still need its blocks
        self._threads = IOThreads(options.num_io_threads, f"kv-{name}", clock)
        self._calls: list[Callable[[float], None]] = []
        self._calls_lock = threading.Lock()
        self._producer: Producer
        self._loader: Loader

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return self._loader.num_external_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_local_blocks: int) -> None:
        self._loader.reserve(request, block_ids, num_local_blocks, self._clock())

    def request_progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._producer.request_progressed(request, block_ids, num_computed_tokens, self._clock())

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        is_produced = self._producer.request_finished(request, block_ids, self._clock())
        is_loaded = self._loader.request_finished(request)
        if is_produced or is_loaded:
            self._held[request.request_id] = is_produced + is_loaded
        return is_produced or is_loaded

    def handle(self, command: KVProgress | LeaseCommand) -> None:
        if isinstance(command, KVProgress):
            self._loader.handle_progress(command, self._clock())
        else:
            self._producer.handle_command(command, self._clock())

    @property
    def num_transfers(self) -> int:
        return len(self._leases)

    @property
    def totals(self) -> list[KVTotals]:
        return [self.counters.totals(self.name)]

    # Inside

    def _seconds_until(self, *deadlines: float | None) -> float | None:
        """Until the first of them, 0 where it has passed; None: there is none."""
        known = [at for at in deadlines if at is not None]
        return max(0.0, min(known) - self._clock()) if known else None

    def _end_op(self, result: OpResult) -> None:
        """From any thread."""
        self._call_later(lambda now: self._apply(result, now))

    def _call_later(self, call: Callable[[float], None]) -> None:
        """From any thread: the step loop calls it, in the order of these calls, with the time."""
        with self._calls_lock:
            is_first = not self._calls
            self._calls.append(call)
        if is_first:
            self._wake()

    def _apply_results(self, now: float) -> None:
        with self._calls_lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call(now)

    def _apply(self, result: OpResult, now: float) -> None:
        """Count a result, and pass it to the producer or the loader."""
        op, failure = result.op, result.failure
        counters = self.counters.saved if isinstance(op, SaveOp) else self.counters.loaded
        counters.seconds += result.duration_s
        counters.num_bytes += result.num_bytes
        counters.num_blocks += failure is None and result.num_bytes > 0
        if failure is not None and failure not in (SKIPPED, GIVEN_UP):
            counters.failures[failure] += 1
        if isinstance(op, SaveOp):
            self._producer.op_ended(op, failure, now)
        else:
            self._loader.op_ended(op, failure, now)

    def _output(self) -> KVConnectorOutput:
        produced, loaded = self._producer.take_output(), self._loader.take_output()
        output = KVConnectorOutput(
            loaded.loaded, events=produced.events, num_expired_leases=produced.num_expired_leases
        )
        self._held.update({result.retained_id: 1 for result in output.loaded if result.retained_id is not None})
        for request_id in produced.freed_request_ids + loaded.freed_request_ids:
            self._held[request_id] -= 1
            if not self._held[request_id]:
                del self._held[request_id]
                output.freed_request_ids.append(request_id)
        return output
