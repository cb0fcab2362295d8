"""The store connector: KV pages through any BlockStore. Its I/O threads carry operations out with PageIO."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from engine.errors import EngineError
from engine.kv_connector import KVConnectorOutput, KVMemory
from engine.kv_layout import PageLayout
from kv_transfer.page.format import EPOCH_BYTES, PageNaming
from kv_transfer.page.memory import make_page_memory
from kv_transfer.stores.base import BlockStore
from kv_transfer.stores.page_io import SELF_TEST_TIMEOUT_S, STORE_DOWN, CircuitBreaker, PageIO, self_test_store
from kv_transfer.transfer.connector import SKIPPED, OpResult, TransferConnector, TransferOptions
from kv_transfer.transfer.loader import DAMAGED, Load, Loader, LoadOp
from kv_transfer.transfer.producer import MAX_WAITING, PrefixProducer, ProducedTransfer, Producer, SaveOp


class StoreOptions(TransferOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that every store connector has."""

    breaker_failures: int = 3
    """Failed reads, or failed writes, in a row after which the store is not read, or not written, for a while."""
    breaker_retry_s: float = 2.0
    """How long that is before the next try, seconds."""
    lookup: bool = True
    """Before a prompt is computed, look up its blocks in the store; in a list of connectors also those of a hand-over
    that the first one lacked."""
    save: bool = True
    """Save what is computed here. Off: nothing of the store is written or removed. Can be off only where `prefix_only`
    is on."""
    prefix_only: bool = False
    """Hand nothing over, and keep full blocks for requests with the same prompt: set by the multi connector."""


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
        """Owns `store` from here on, also if it raises EngineError."""
        try:
            if not (options.save or options.prefix_only):
                raise EngineError(f"the {store.name} connector cannot hand KV over with save off")
            super().__init__(store.name, options, wake=wake, clock=clock)
        except BaseException:
            store.close()
            raise
        self._store = store
        self._options = options
        self._io: PageIO
        self._naming: PageNaming
        self._saves: dict[int, tuple[SaveOp, float]] = {}
        """Saves that have not ended and when each was queued, by the operation's id; the oldest is first."""
        self._ended_at = -math.inf
        """When a thread has last ended an operation."""
        self._queued: dict[int, SaveOp | LoadOp] = {}
        """Operations that no thread has begun, by their id. They belong to the one that takes them out: a thread that
        begins one, or the step loop."""
        self._in_flight: dict[ProducedTransfer | Load, dict[int, int]] = {}
        """By owner, the blocks of its operations that have not ended, by the page's index."""

    # Worker side

    def register_kv_cache(self, kv_cache: KVMemory, layout: PageLayout, fingerprint: bytes) -> None:
        naming = self._naming = PageNaming.of(fingerprint, layout, self._key)
        options, memory = self._options, make_page_memory(kv_cache)
        save_breaker, load_breaker = (
            CircuitBreaker(max_failures=options.breaker_failures, retry_s=options.breaker_retry_s) for _ in range(2)
        )
        self._io = PageIO(
            self._store, memory, self._key, os.urandom(EPOCH_BYTES), save_breaker, load_breaker, options.save
        )
        if options.prefix_only:
            max_waiting = MAX_WAITING if options.save else 0
            self._producer = PrefixProducer(naming, self._leases, max_waiting=max_waiting)
        else:
            self._producer = Producer(naming, self._leases)
        self._loader = Loader(
            naming, load_timeout_s=options.load_timeout_s, lookup=options.lookup, prefix_only=options.prefix_only
        )

    def self_test(self) -> str | None:
        return self_test_store(self.name, self._io, self._naming, self._threads, SELF_TEST_TIMEOUT_S)

    def start_io(self) -> None:
        ops: list[LoadOp | SaveOp] = [*self._loader.take_ops(), *self._producer.take_ops()]
        for op in ops:
            self._submit(op)

    def poll(self) -> KVConnectorOutput:
        now = self._clock()
        self._apply_results(now)
        self._producer.expire(now)
        for _ in range(self._loader.expire(now)):
            self._io.load_breaker.record(ok=False)  # a store that hangs reports nothing itself
        self._give_up_late_saves(now)
        has_cancelled = any(owner.has_cancelled for owner in self._in_flight)
        if has_cancelled:
            self._end_cancelled(now)
        for key in self._producer.take_deletes():
            if not self._hangs:  # else they would pile up behind the threads: the rest expires
                self._threads.submit(lambda key=key: self._io.delete(key))  # type: ignore[misc]
        output = self._output()
        if has_cancelled:
            output.needed = self._needed()
        return output

    def next_deadline_s(self) -> float | None:
        if self._producer.deletes:
            return 0.0
        oldest = self._oldest_save()
        return self._seconds_until(self._leases.next_deadline, self._loader.next_deadline, oldest and oldest[1])

    def shutdown(self) -> None:
        if not hasattr(self, "_io"):  # without KV memory it has begun nothing
            self._threads.shutdown(self._options.shutdown_timeout_s)
            self._store.close()
            return
        self._producer.cancel_all(self._clock())
        for op, _ in self._saves.values():
            op.owner.cancelled = True  # also of a finished request that a prefix store still saves
        self._loader.cancel_all()
        self._threads.shutdown(self._options.shutdown_timeout_s)
        self._apply_results(self._clock())
        all(map(self._io.delete, self._producer.take_deletes()))  # up to the first failure: the rest expires
        self._store.close()

    # Inside

    def _submit(self, op: SaveOp | LoadOp) -> None:
        """Operations that would only queue behind threads that hang fail here. One thread that does not hang tries the
        store again."""
        self._in_flight.setdefault(op.owner, {})[op.block_index] = op.block_id
        if self._hangs:
            self._end_op(OpResult(op, STORE_DOWN))
            return
        if isinstance(op, SaveOp):
            self._saves[id(op)] = op, self._clock()
        self._queued[id(op)] = op
        # A prompt waits for what is looked up; what is saved may be hundreds of pages of a slow store.
        self._threads.submit(lambda: self._run(op), is_urgent=isinstance(op, LoadOp))

    @property
    def _hangs(self) -> bool:
        """Whether all threads hang in the store, which does not report it: in pages, or in what they remove."""
        is_any_open = self._io.save_breaker.is_open or self._io.load_breaker.is_open
        return is_any_open and self._threads.are_busy_for(self._options.breaker_retry_s)

    def _run(self, op: SaveOp | LoadOp) -> None:
        """On an I/O thread."""
        if self._queued.pop(id(op), None) is not None:
            result = self._io.execute(op)
            self._ended_at = self._clock()
            self._end_op(result)

    def _oldest_save(self) -> tuple[SaveOp, float] | None:
        """Of those that are still wanted, and when it is late: while a slow store ends operations, none is."""
        for op, queued_at in self._saves.values():
            if not op.is_cancelled:
                return op, max(queued_at, self._ended_at) + self._options.load_timeout_s
        return None

    def _give_up_late_saves(self, now: float) -> None:
        """Each counts once per request, as late reads do."""
        failure = f"the store did not take KV within {self._options.load_timeout_s:g} s"
        while (oldest := self._oldest_save()) is not None and oldest[1] <= now:
            self._io.save_breaker.record(ok=False)
            self._producer.give_up(oldest[0].owner, failure, now)

    def _end_cancelled(self, now: float) -> None:
        """Ends what was cancelled before it began, so that it keeps no blocks while the threads hang in the store."""
        for op in [op for op in list(self._queued.values()) if op.is_cancelled]:
            if self._queued.pop(id(op), None) is not None:
                self._apply(OpResult(op, SKIPPED), now)

    def _needed(self) -> dict[str, frozenset[int]]:
        """The blocks of what had begun when it was cancelled: threads may hang in it for long. Complete only where no
        other operation of the owner is left to be ended, and nothing else needs its blocks."""
        return {
            owner.held_id: frozenset(blocks.values())
            for owner, blocks in self._in_flight.items()
            if owner.has_cancelled and owner.holds_blocks
            if owner.num_in_flight == len(blocks) and self._held.get(owner.held_id) == 1
        }

    def _apply(self, result: OpResult, now: float) -> None:
        self._saves.pop(id(result.op), None)
        blocks = self._in_flight[result.op.owner]
        del blocks[result.op.block_index]
        if not blocks:
            del self._in_flight[result.op.owner]
        if isinstance(result.op, SaveOp):
            self.counters.num_shared_blocks += result.failure is None and result.num_bytes == 0
        elif result.failure is not None and result.failure.startswith(DAMAGED):
            self._inspect_successors(result.op)
        super()._apply(result, now)

    def _inspect_successors(self, op: LoadOp) -> None:
        """Once per load, one page at a time, so that other requests' reads do not wait long; as long as the store
        works."""
        load = op.owner
        if load.inspected:
            return
        load.inspected = True
        names = (load.pages[index] for index in range(op.block_index + 1, load.num_full_blocks))

        def inspect_next() -> None:
            name = None if self._threads.is_ending else next(names, None)
            if name is not None and self._io.inspect(name):
                self._threads.submit(inspect_next)

        self._threads.submit(inspect_next)
