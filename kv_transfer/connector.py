"""The store connector: KV pages through anything that is a BlockStore, and the one over a shared folder.

    scheduler half   Producer (prefill side, leases) and Loader (decode side) decide: operations, events, results
    worker half      I/O threads carry operations out (PageIO) and put their ends into `_ended`; poll() applies them

Everything but `_end_op` and what the I/O threads run belongs to the step loop's thread. Neither half depends on a
role: one instance may produce some transfers and load others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from engine.errors import EngineError
from engine.kv_connector import KVConnectorMeta, KVConnectorOutput
from engine.kv_layout import KVLayout
from kv_transfer.breaker import Breaker
from kv_transfer.loads import Loader, LoadOp
from kv_transfer.page import EPOCH_BYTES
from kv_transfer.page_io import SKIPPED, STORE_DOWN, IOEnd, PageIO
from kv_transfer.page_memory import make_page_memory
from kv_transfer.page_naming import PageNaming
from kv_transfer.prefix_production import PrefixProducer
from kv_transfer.production import Producer, SaveOp
from kv_transfer.self_test import TIMEOUT_S, self_test_store
from kv_transfer.shared_storage import SharedStorage
from kv_transfer.store import BlockStore
from kv_transfer.transfer_connector import TransferConnector, TransferOptions

if TYPE_CHECKING:
    import torch


class StoreOptions(TransferOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that every store connector has."""

    breaker_failures: int = 3
    """Errors of the store in a row after which it is left alone for a while."""
    breaker_retry_s: float = 2.0
    """How long it is left alone before the next try, seconds."""
    lookup: bool = True
    """Before a prompt is computed, look whether the store has its blocks."""
    save: bool = True
    """Save what is computed here. Only as a further one in a list of connectors can a store do without."""
    prefix_only: bool = False
    """A further one in a list of connectors: hands nothing over, keeps full blocks for whoever has the same prompt."""


class SharedStorageOptions(StoreOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the connector over a shared folder."""

    path: str
    """The folder, the same one for all instances; made if it is not there."""
    capacity_bytes: int = 16 << 30
    """Bytes of pages, of all instances together, above which the least recently used go."""
    scan_interval_s: float = 60.0
    """How often the folder is looked through for what others wrote and left, seconds."""
    temp_max_age_s: float = 3600.0
    """Age from which a file that nobody finished writing is removed, seconds."""
    tail_max_age_s: float = 3600.0
    """Age from which a transfer's own page is removed if its owner did not, seconds; longer than any lease."""


class StoreConnector(TransferConnector):
    """Implements engine.kv_connector.KVConnector over a store."""

    def __init__(
        self,
        store: BlockStore,
        options: StoreOptions,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store.name, options, wake=wake, clock=clock)
        if not (options.save or options.prefix_only):
            raise EngineError(f"the {store.name} connector cannot hand KV over with save off")
        self._store = store
        self._options = options
        self._io: PageIO
        self._naming: PageNaming
        self._submitted: dict[int, float] = {}
        """When each operation that has not ended was, by its id; the oldest is first."""

    # Worker half

    def register_kv_cache(self, kv_cache: torch.Tensor, layout: KVLayout, fingerprint: bytes) -> None:
        naming = self._naming = PageNaming.of(fingerprint, layout)
        breaker = Breaker(max_failures=self._options.breaker_failures, retry_s=self._options.breaker_retry_s)
        memory = make_page_memory(kv_cache)
        self._io = PageIO(self._store, memory, self._key, os.urandom(EPOCH_BYTES), breaker)
        options = self._options
        if options.prefix_only:
            self._producer = PrefixProducer(naming) if options.save else PrefixProducer(naming, max_waiting=0)
        else:
            self._producer = Producer(naming, self._leases)
        self._loader = Loader(
            naming,
            load_timeout_s=options.load_timeout_s,
            looks_up=options.lookup,
            follows=not options.prefix_only,
        )

    def self_test(self) -> str | None:
        return self_test_store(self.name, self._io, self._naming, self._threads, TIMEOUT_S)

    def start_load_kv(self, meta: KVConnectorMeta) -> None:
        for op in meta.loads:
            assert isinstance(op, LoadOp)
            self._submit(op)

    def save_kv(self, meta: KVConnectorMeta) -> None:
        for op in meta.saves:
            assert isinstance(op, SaveOp)
            self._submit(op)

    def poll(self) -> KVConnectorOutput:
        now = self._clock()
        for end in self._take_ended():
            self._apply(end, now)
        self._producer.expire(now)
        for _ in range(self._loader.expire(now)):
            self._io.breaker.record(good=False)  # a store that hangs has no word of its own
        for key in self._producer.take_deletes():
            self._threads.submit(lambda key=key: self._io.delete(key))  # type: ignore[misc]
        return self._output()

    def next_deadline_s(self) -> float | None:
        if self._producer.has_deletes:
            return 0.0
        deadlines = [at for at in (self._leases.next_deadline, self._loader.next_deadline) if at is not None]
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    def shutdown(self) -> None:
        self._producer.end_all(self._clock())
        self._loader.end_all()
        self._threads.shutdown(self._options.shutdown_timeout_s)
        for end in self._take_ended():
            self._apply(end, self._clock())
        for key in self._producer.take_deletes():
            self._io.delete(key)
        self._store.close()

    # Inside

    def _submit(self, op: SaveOp | LoadOp) -> None:
        """Threads that hang in a store cannot say that it is down: what would only queue behind them ends here."""
        now = self._clock()
        oldest = next(iter(self._submitted.values()), now)
        if self._io.breaker.is_open and now - oldest > self._options.breaker_retry_s:
            self._end_op(IOEnd(op, STORE_DOWN))
            return
        self._submitted[id(op)] = now
        self._threads.submit(lambda: self._end_op(self._io.run(op)))

    def _apply(self, end: IOEnd, now: float) -> None:
        self._submitted.pop(id(end.op), None)
        counters = self.counters
        if isinstance(end.op, SaveOp):
            counters.save_s += end.duration_s
            counters.num_saved_bytes += end.num_bytes
            if end.failure is None:
                counters.num_saved_blocks += end.num_bytes > 0
                counters.num_shared_blocks += end.num_bytes == 0
            elif end.failure != SKIPPED:
                counters.save_failures[end.failure] += 1
            self._producer.op_ended(end.op, end.failure, now)
        else:
            counters.load_s += end.duration_s
            counters.num_loaded_bytes += end.num_bytes
            if end.failure is None:
                counters.num_loaded_blocks += 1
            elif end.failure != SKIPPED:
                counters.load_failures[end.failure] += 1
            if end.is_damage:
                self._inspect_successors(end.op)
            self._loader.op_ended(end.op, end.failure)

    def _inspect_successors(self, op: LoadOp) -> None:
        """Once per load, one page at a time, so that nobody's reads wait long behind it."""
        load = op.owner
        if load.inspected:
            return
        load.inspected = True
        names = iter(load.pages[op.block_index + 1 : load.num_full_blocks])

        def inspect_next() -> None:
            if (name := next(names, None)) is not None:
                self._io.inspect(name)
                self._threads.submit(inspect_next)

        self._threads.submit(inspect_next)


class SharedStorageConnector(StoreConnector):
    """Pages as files in a folder that all instances see. Outlives every instance."""

    def __init__(self, *, wake: Callable[[], None], **options: Any) -> None:
        try:
            parsed = msgspec.convert(options, SharedStorageOptions, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(SharedStorageOptions.__struct_fields__)
            raise EngineError(f"options of the shared_storage connector: {error}; known: {known}") from error
        store = SharedStorage(
            parsed.path,
            capacity_bytes=parsed.capacity_bytes,
            scan_interval_s=parsed.scan_interval_s,
            temp_max_age_s=parsed.temp_max_age_s,
            tail_max_age_s=parsed.tail_max_age_s,
        )
        super().__init__(store, parsed, wake=wake)
