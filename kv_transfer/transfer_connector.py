"""What the connectors of this folder have in common: the scheduler half, around a Producer and a Loader.

    scheduler half   Producer (prefill side, leases) and Loader (decode side) decide: operations, events, results
    worker half      a subclass has operations carried out on threads; their ends go through `_end_op` into
                     `_take_ended`, and its poll() applies them

Everything but `_end_op` belongs to the step loop's thread. Neither half depends on a role: one instance may produce
some transfers and load others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from engine.errors import EngineError
from engine.kv_connector import KVConnectorMeta, KVConnectorOutput
from engine.messages import KVProgress, KVTotals, LeaseCommand
from engine.request import Request
from kv_transfer.counters import TransferCounters
from kv_transfer.io_threads import IOThreads
from kv_transfer.leases import LeaseTable
from kv_transfer.loads import Loader
from kv_transfer.page_io import IOEnd
from kv_transfer.prefix_production import PrefixProducer
from kv_transfer.production import Producer
from kv_transfer.secret import load_secret


class TransferOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that every connector of ours has."""

    kv_secret_file: str = ""
    """File with the key of the digests (64 hex digits), the same for all instances. Needed while `digest` is on."""
    digest: bool = True
    """Keyed BLAKE3 over every page. Off: pages are trusted as far as their header goes."""
    num_io_threads: int = 2
    """Threads that read and write pages."""
    max_lease_s: float = 300.0
    """Longest lease that a request or a reader can ask for, seconds."""
    tombstone_s: float = 120.0
    """How long a release that came before its offer is remembered, seconds."""
    max_tombstones: int = 10_000
    """Such releases, and ended transfers, remembered at the most."""
    load_timeout_s: float = 10.0
    """How long pages may take once they were announced, seconds; what has not come by then is computed."""
    shutdown_timeout_s: float = 10.0
    """How long I/O in flight is waited for at the end, seconds."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"{field} is {value}; it must be greater than 0")

    def digest_key(self) -> bytes | None:
        """The key, or None where digests are off."""
        if not self.digest:
            return None
        if not self.kv_secret_file:
            raise EngineError("kv_secret_file is not set; name the file with the pages' key, or set digest to false")
        return load_secret(self.kv_secret_file)


class TransferConnector:
    """The scheduler half of engine.kv_connector.KVConnector. A subclass sets `_producer` and `_loader` when it is given
    the KV memory, and has the worker half."""

    name: str

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
        self._held: dict[str, int] = {}  # request_id → halves that still need its blocks
        self._threads = IOThreads(options.num_io_threads, f"kv-{name}")
        self._ended: list[IOEnd] = []
        self._ended_lock = threading.Lock()
        self._producer: Producer | PrefixProducer
        self._loader: Loader

    # Scheduler half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return self._loader.num_external_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_local_blocks: int) -> None:
        self._loader.reserve(request, block_ids, num_local_blocks, self._clock())

    def request_progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        self._producer.progressed(request, block_ids, num_computed_tokens, self._clock())

    def build_connector_meta(self) -> KVConnectorMeta:
        return KVConnectorMeta(saves=self._producer.take_ops(), loads=self._loader.take_ops())

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        num_halves = self._producer.finished(request, block_ids, self._clock()) + self._loader.finished(request)
        if num_halves:
            self._held[request.request_id] = num_halves
        return num_halves > 0

    def handle(self, command: KVProgress | LeaseCommand) -> None:
        if isinstance(command, KVProgress):
            self._loader.progress(command, self._clock())
        else:
            self._producer.command(command, self._clock())

    @property
    def num_transfers(self) -> int:
        return len(self._leases)

    @property
    def num_quarantined_blocks(self) -> int:
        return 0

    @property
    def totals(self) -> KVTotals:
        """For EngineLoad; optional, as far as the engine is concerned."""
        return self.counters.totals(self.name)

    # Inside

    def _end_op(self, end: IOEnd) -> None:
        """On an I/O thread."""
        with self._ended_lock:
            first = not self._ended
            self._ended.append(end)
        if first:
            self._wake()

    def _take_ended(self) -> list[IOEnd]:
        with self._ended_lock:
            ended, self._ended = self._ended, []
        return ended

    def _output(self) -> KVConnectorOutput:
        output = KVConnectorOutput(loaded=self._loader.take_results(), events=[*self._producer.take_events()])
        self._held.update({result.retained_id: 1 for result in output.loaded if result.retained_id is not None})
        for request_id in (*self._producer.take_freed(), *self._loader.take_freed()):
            self._held[request_id] -= 1
            if not self._held[request_id]:
                del self._held[request_id]
                output.freed_request_ids.append(request_id)
        output.num_expired_leases = self._producer.take_num_expired()
        self.counters.num_expired_leases += output.num_expired_leases
        self.counters.num_recomputed_blocks += sum(result.num_recomputed_blocks for result in output.loaded)
        return output
