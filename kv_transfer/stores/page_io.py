"""One page to the store, or from it, on an I/O thread: sealed when it is saved, verified when it is loaded.

A damaged page is removed from the store, so that the next request writes it again and does not fail on it too. Its
successors may be damaged as well: `inspect` verifies them without a request.

A circuit breaker stops using a store that does not work, so that a dead store costs one timeout now and then and not
one per page:

    closed ──max_failures in a row──▶ open ──retry_s──▶ one try ──ok──▶ closed
                                       ▲──────failed───────┘

Saves and loads have a breaker each: a store that is full or read-only rejects writes, and its pages can still be read.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, Queue

from engine import failpoints
from engine.failpoints import FailpointError
from kv_transfer.page.format import (
    HEADER_BYTES,
    Buffer,
    PageError,
    PageKey,
    PageName,
    PageNaming,
    check_header,
    check_payload,
    seal,
)
from kv_transfer.page.memory import PageMemory, write_page
from kv_transfer.stores.base import BadValue, BlockStore, NotWritable, StoreError, UnreadableValue
from kv_transfer.transfer.connector import SKIPPED, IOThreads, OpResult, self_test_error
from kv_transfer.transfer.loader import DAMAGED, MISSING, LoadOp
from kv_transfer.transfer.producer import SaveOp


@dataclass(slots=True, kw_only=True)
class CircuitBreaker:
    """Thread-safe. Call `allows` before an operation, and `record` or `not_tried` after it."""

    max_failures: int = 3
    retry_s: float = 2.0
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _num_failures: int = 0
    _retry_at: float = 0.0

    @property
    def is_open(self) -> bool:
        """The store is not used for a while."""
        return self._num_failures >= self.max_failures

    def allows(self) -> bool:
        """Whether to try. While open, one caller per `retry_s` may."""
        with self._lock:
            if not self.is_open:
                return True
            now = self.clock()
            if now < self._retry_at:
                return False
            self._retry_at = now + self.retry_s
            return True

    def record(self, *, ok: bool) -> None:
        with self._lock:
            if ok:
                self._num_failures = 0
                return
            self._num_failures += 1
            if self.is_open:
                self._retry_at = self.clock() + self.retry_s

    def not_tried(self) -> None:
        """The operation that was allowed has not shown whether the store works: the next one may."""
        with self._lock:
            self._retry_at = 0.0


STORE_DOWN = "store_down"
_DELETE_PAUSES_S = (0.05, 0.2, 0.0)
"""After each try to remove a page."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageIO:
    """Carries operations out on an I/O thread. `key` None: digests are neither made nor checked."""

    store: BlockStore
    memory: PageMemory
    key: bytes | None
    writer_epoch: bytes
    save_breaker: CircuitBreaker
    load_breaker: CircuitBreaker
    saves: bool = True
    """Off: the store is only read, and a damaged page is left to those that write."""
    faults: set[str] = field(default_factory=set)
    """Reasons of failures that no store should have, and that are logged."""

    def execute(self, op: SaveOp | LoadOp) -> OpResult:
        """Carry out one operation. Never raises."""
        if op.is_cancelled:
            return OpResult(op, SKIPPED)
        breaker = self.save_breaker if isinstance(op, SaveOp) else self.load_breaker
        was_open = breaker.is_open
        if not breaker.allows():
            return OpResult(op, STORE_DOWN)
        started = time.perf_counter()
        try:
            num_bytes = self._save(op, is_trial=was_open) if isinstance(op, SaveOp) else self._load(op)
        except (PageError, BadValue) as error:
            breaker.record(ok=not isinstance(error, UnreadableValue))  # else the store works, and the page does not
            if was_open or not breaker.is_open:  # of several that cannot be read in a row, one for each trial
                self.delete(op.name.key)
            return OpResult(op, DAMAGED + error.reason, duration_s=time.perf_counter() - started)
        except Exception as error:
            breaker.record(ok=False)
            reason = _reason(error)
            if not isinstance(error, StoreError | OSError | FailpointError) and reason not in self.faults:
                self.faults.add(reason)
                _log.exception("the %s connector has a fault, counted as %s; KV is computed", self.store.name, reason)
            return OpResult(op, reason, duration_s=time.perf_counter() - started)
        if isinstance(op, LoadOp) or num_bytes:
            breaker.record(ok=True)
        elif was_open:
            breaker.not_tried()
        failure = None if num_bytes is not None else SKIPPED if isinstance(op, SaveOp) else MISSING
        return OpResult(op, failure, num_bytes or 0, time.perf_counter() - started)

    def inspect(self, name: PageName) -> bool:
        """Verify one page, and remove it if it is damaged. Whether the store works, as far as this one shows."""
        try:
            self._read(name, bytearray(HEADER_BYTES), bytearray(name.spec.payload_bytes))
        except (PageError, BadValue) as error:
            if isinstance(error, UnreadableValue):
                return False
            self.delete(name.key)
        except Exception as error:
            _log.debug("could not inspect a page: %s", _reason(error))
            return False
        return True

    def delete(self, key: PageKey) -> bool:
        """Remove a page; whether it is gone. Retried while the store is busy, not while it accepts no writes."""
        if not self.saves:
            return False
        for pause_s in _DELETE_PAUSES_S:
            try:
                self.store.delete(key)
            except Exception as error:
                if self.save_breaker.is_open:
                    break
                _log.debug("could not remove a page: %s", _reason(error))
                time.sleep(pause_s)
            else:
                return True
        return False

    def round_trip(self, name: PageName, block_id: int) -> bytearray | None:
        """Save a block as page `name`, read it into new memory, and remove it. None: the store has lost it. Raises what
        the store raises."""
        header, page = bytearray(HEADER_BYTES), bytearray(name.spec.payload_bytes)
        try:
            self.store.put(name.key, self._sealed(name, block_id))
            found = self.store.contains(name.key, HEADER_BYTES + len(page)) and self._read(name, header, page)
            self.store.delete(name.key)
        except Exception:
            self.delete(name.key)
            raise
        return page if found else None

    def look_for(self, name: PageName) -> None:
        """Read a page that the store need not have, into new memory. Raises what the store raises."""
        self._read(name, bytearray(HEADER_BYTES), bytearray(name.spec.payload_bytes))

    def _save(self, op: SaveOp, *, is_trial: bool) -> int | None:
        """Returns the bytes written: 0 where the page is there already, None where the save was cancelled and its block
        may be written to while it is copied. A trial writes without a look: other pages of its transfer, which the open
        breaker refuses, would cancel it meanwhile, time after time."""
        failpoints.hit("kv.save")
        name = op.name
        if not (is_trial or name.spec.is_tail) and self.store.contains(
            name.key, HEADER_BYTES + name.spec.payload_bytes
        ):
            return 0
        failpoints.hit("kv.store.put")
        header, page = self._sealed(name, op.block_id)
        if op.is_cancelled:
            return None
        self.store.put(name.key, (header, page))
        return HEADER_BYTES + len(page)

    def _load(self, op: LoadOp) -> int | None:
        failpoints.hit("kv.load")
        header, page = bytearray(HEADER_BYTES), self.memory.page_in(op.block_id)
        failpoints.hit("kv.store.get")
        if not self._read(op.name, header, page):
            return None
        self.memory.commit(op.block_id, page)
        return HEADER_BYTES + len(page)

    def _sealed(self, name: PageName, block_id: int) -> tuple[bytes, memoryview]:
        page = self.memory.page_out(block_id)
        return seal(name.spec, page, key=self.key, writer_epoch=self.writer_epoch), page

    def _read(self, name: PageName, header: bytearray, page: Buffer) -> bool:
        """Fill both buffers and verify them; False: there is no such page."""
        is_checked = False

        def check() -> None:
            nonlocal is_checked
            check_header(header, name.spec, digest=self.key is not None)
            is_checked = True

        if not self.store.get_into(name.key, (header, page), check):
            return False
        if not is_checked:  # no store is trusted with it: a digest that is right may be another page's
            check()
        check_payload(header, page, name.spec, key=self.key)
        return True


def _reason(error: Exception) -> str:
    if isinstance(error, StoreError):
        return f"store_{error.reason}"
    if isinstance(error, FailpointError):
        return "failpoint"
    if isinstance(error, OSError) and error.errno is not None:
        return f"store_{errno.errorcode.get(error.errno, str(error.errno)).lower()}"
    return f"store_{type(error).__name__.lower()}"


# Self-test: block ─▶ sealed ─▶ put ─▶ get_into ─▶ verified ─▶ deleted ─▶ equal?; of a store that is only read: get_into

SELF_TEST_TIMEOUT_S = 5.0
_SELF_TEST_BLOCK = 0


def self_test_store(
    connector_name: str, io: PageIO, naming: PageNaming, threads: IOThreads, timeout_s: float
) -> str | None:
    """Move one block to the store and back, while all blocks are free and zeros, as they are again afterwards.

    None: the store works. A sentence, logged: the store is unavailable, full or slow; the instance starts and computes
    what it cannot load. An error is logged where it saves and may not write there. Raises EngineError where the block
    comes back with other bytes or the connector has a fault. A store that is only read is asked for a page alone.
    A store that answers after `timeout_s` never writes to a block: it reads into memory of its own.
    """
    content = os.urandom(naming.layout.bytes_per_block)
    write_page(io.memory, _SELF_TEST_BLOCK, content)
    done: Queue[bytearray | Exception | None] = Queue()
    threads.submit(lambda: done.put(_outcome(io, naming.private_page())))
    try:
        outcome = done.get(timeout=timeout_s)
    except Empty:
        return _unavailable(connector_name, f"did not answer within {timeout_s:g} s")
    finally:
        write_page(io.memory, _SELF_TEST_BLOCK, bytes(len(content)))
    if isinstance(outcome, Exception):
        return _explain(connector_name, outcome)
    if not io.saves:
        return None
    if outcome is None:
        return _unavailable(connector_name, "lost a page that it had just taken")
    if outcome != content:
        raise self_test_error(connector_name, "a block came back with other bytes")
    return None


def _outcome(io: PageIO, name: PageName) -> bytearray | Exception | None:
    """On an I/O thread, whose jobs must not raise."""
    try:
        if io.saves:
            return io.round_trip(name, _SELF_TEST_BLOCK)
        io.look_for(name)
    except Exception as error:
        return error
    return None


def _explain(connector_name: str, error: Exception) -> str:
    """An unavailable store is no reason not to start; any other error is. Raises EngineError."""
    if isinstance(error, PageError | BadValue) and not isinstance(error, UnreadableValue):
        raise self_test_error(connector_name, f"a block came back wrong ({error.reason})") from error
    if isinstance(error, StoreError):
        return _unavailable(connector_name, f"cannot be used now ({error.reason})", is_logged=error.is_logged)
    if isinstance(error, NotWritable):
        return _not_writable(connector_name, error)
    if isinstance(error, OSError):
        return _unavailable(connector_name, f"cannot be used now ({error.strerror or error})")
    raise self_test_error(connector_name, f"{type(error).__name__}: {error}") from error


def _unavailable(connector_name: str, problem: str, *, is_logged: bool = False) -> str:
    sentence = f"the store of the {connector_name} connector {problem}; KV is computed instead until it can"
    if not is_logged:
        _log.warning("%s", sentence)
    return sentence


def _not_writable(connector_name: str, error: NotWritable) -> str:
    sentence = (
        f"the store of the {connector_name} connector cannot write to {error.filename} ({error.strerror}),"
        f" so no KV is saved there; {error.remedy}"
    )
    _log.error("%s", sentence)
    return sentence
