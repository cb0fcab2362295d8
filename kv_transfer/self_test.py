"""One page through a connector's own path and back, before its instance is ready to serve.

    store    KV block ─▶ sealed ─▶ put ─▶ get_into ─▶ verified ─▶ deleted ─▶ KV block ─▶ equal?
    memory   lent block ─▶ announced to ourselves ─▶ read into another block ─▶ verified ─▶ released ─▶ equal?

What comes of it is one of three things. Well: None. The store cannot be used now (down, full, read-only, slow): a
sentence, which was logged; the instance serves all the same and computes what it cannot load. Other bytes, or a fault
in the connector: EngineError, and the instance does not start.

The step loop does not run yet, so all blocks are free; those used are zeros again afterwards. The page has a name of
its own, which no request can have, so nobody else ever finds it. What may still be read after the time is over goes to
memory of its own, never to a block; where pages are read into blocks, being late is a fault.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.kv_connector import KVConnector, KVLoadResult
from engine.messages import EngineRequest, HoldKV, KVProgress, LeaseCommand, RemoteKV, TransferEvent
from engine.request import Request
from engine.sampling_params import SamplingParams
from kv_transfer.io_threads import IOThreads
from kv_transfer.page import HEADER_BYTES, PageError, PageSpec, check_header, check_payload, seal
from kv_transfer.page_io import PageIO
from kv_transfer.page_memory import PageMemory
from kv_transfer.page_naming import PageName, PageNaming
from kv_transfer.redis_wire import LinkError
from kv_transfer.store import BadValue, PageKey, StoreError

TIMEOUT_S = 5.0
"""For a store, whose lateness costs a warning."""
HAND_OVER_TIMEOUT_S = 30.0
"""For memory to memory, whose lateness ends the start: a busy machine is not a broken one."""
_BLOCK_ID = 0
_PAUSE_S = 2e-4
_log = logging.getLogger(__name__)


def self_test_store(name: str, io: PageIO, naming: PageNaming, threads: IOThreads, timeout_s: float) -> str | None:
    """See the module. Raises EngineError."""
    content = _fill(io.memory, _BLOCK_ID, naming.layout.bytes_per_block)
    try:
        trip = _RoundTrip(io, _page_name(naming))
        threads.submit(trip.run)
        if not trip.ended.wait(timeout_s):
            return _degraded(name, f"did not answer within {timeout_s:g} s")
        if trip.error is not None:
            return _judge(name, trip.error)
        if trip.page is None:
            return _degraded(name, "lost a page that it had just taken")
        _put(io.memory, _BLOCK_ID, trip.page)
        _check_equal(name, io.memory, _BLOCK_ID, content)
    finally:
        _put(io.memory, _BLOCK_ID, bytes(naming.layout.bytes_per_block))
    return None


def self_test_hand_over(
    connector: KVConnector, memory: PageMemory, naming: PageNaming, *, num_blocks: int, timeout_s: float
) -> None:
    """A hand-over of one block to itself, for connectors that read from memory. Raises EngineError."""
    if num_blocks < 2:
        return
    num_bytes, block_ids = naming.layout.bytes_per_block, (_BLOCK_ID, num_blocks - 1)
    content = _fill(memory, block_ids[0], num_bytes)
    _HandOver(connector, naming, time.monotonic() + timeout_s).run(*block_ids)
    _check_equal(connector.name, memory, block_ids[1], content)
    for block_id in block_ids:
        _put(memory, block_id, bytes(num_bytes))


@dataclass(slots=True)
class _HandOver:
    """Plays the step loop and both fronts for one request that is lent and one that loads it."""

    connector: KVConnector
    naming: PageNaming
    deadline: float
    loaded: list[KVLoadResult] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)

    def run(self, lent_id: int, loaded_id: int) -> None:
        """Returns when the pages were read and the lease is over."""
        transfer_id = f"self-test-{os.urandom(8).hex()}"
        lent = self._request("lent", transfer_id, hold_kv=HoldKV(transfer_id=transfer_id, lease_s=HAND_OVER_TIMEOUT_S))
        remote = RemoteKV(transfer_id=transfer_id, reservation_s=HAND_OVER_TIMEOUT_S)
        loaded = self._request("loaded", transfer_id, remote_kv=remote)
        self.connector.update_state_after_alloc(loaded, [loaded_id], 0)
        lent.finish_reason = "hand_over"
        holds = self.connector.request_finished(lent, [lent_id])
        while not self.loaded:
            self._step(loaded.request_id)
        self.connector.request_finished(loaded, [loaded_id])
        self.connector.handle(LeaseCommand(transfer_id, "release"))
        while holds and lent.request_id not in self.freed:
            self._step(loaded.request_id)
        if (result := self.loaded[0]).num_recomputed_blocks:
            raise _failed(self.connector.name, f"a block did not come back ({result.reason})")

    def _step(self, loaded_id: str) -> None:
        if time.monotonic() > self.deadline:
            raise _failed(self.connector.name, f"a block did not come back within {HAND_OVER_TIMEOUT_S:g} s")
        output = self.connector.poll()
        self.loaded += output.loaded
        self.freed += output.freed_request_ids
        for event in output.events:
            if isinstance(event, TransferEvent):
                self.connector.handle(progress_of(event, loaded_id))
        meta = self.connector.build_connector_meta()
        self.connector.start_load_kv(meta)
        self.connector.save_kv(meta)
        if not output.loaded and not output.events:
            time.sleep(_PAUSE_S)

    def _request(self, role: str, transfer_id: str, **fields: HoldKV | RemoteKV) -> Request:
        spec = EngineRequest(
            request_id=f"{transfer_id}-{role}",
            prompt_token_ids=[0] * self.naming.block_size,
            params=SamplingParams(),
            **fields,  # type: ignore[arg-type]
        )
        return Request.from_spec(spec, arrival=0, fingerprint=self.naming.fingerprint.hex())


def progress_of(event: TransferEvent, request_id: str) -> KVProgress:
    """What the reader's front makes of the holder's event."""
    return KVProgress(
        request_id,
        event.num_ready_blocks,
        digests=event.digests,
        connector_metadata=event.connector_metadata,
        num_tokens=event.num_tokens,
        failed=event.ended,
    )


def _fill(memory: PageMemory, block_id: int, num_bytes: int) -> bytes:
    """Random bytes into a block; returns them."""
    content = os.urandom(num_bytes)
    _put(memory, block_id, content)
    return content


def _put(memory: PageMemory, block_id: int, content: bytes | bytearray) -> None:
    """`content` into a block."""
    page = memory.page_in(block_id)
    page[:] = content
    memory.commit(block_id, page)


def _check_equal(name: str, memory: PageMemory, block_id: int, content: bytes) -> None:
    """Raises EngineError where the block does not hold `content`."""
    if memory.page_out(block_id) != content:
        raise _failed(name, "a block came back with other bytes")


def _failed(name: str, what: str) -> EngineError:
    """This connector would hand over wrong KV, or none."""
    return EngineError(f"self-test of the {name} connector: {what}; the instance does not start with it")


@dataclass(slots=True)
class _RoundTrip:
    """Runs on an I/O thread. Once `ended` is set, `page` is what came back, None if nothing did."""

    io: PageIO
    name: PageName
    ended: threading.Event = field(default_factory=threading.Event)
    page: bytearray | None = None
    error: Exception | None = None

    def run(self) -> None:
        try:
            self._write()
            self.page = self._read()
            self.io.store.delete(self.name.key)
        except Exception as error:
            self.error = error
            self.io.delete(self.name.key)
        finally:
            self.ended.set()

    def _write(self) -> None:
        io, spec = self.io, self.name.spec
        page = io.memory.page_out(_BLOCK_ID)
        io.store.put(self.name.key, (seal(spec, page, key=io.key, writer_epoch=io.writer_epoch), page))

    def _read(self) -> bytearray | None:
        spec, key = self.name.spec, self.io.key
        header, page = bytearray(HEADER_BYTES), bytearray(spec.payload_bytes)

        def check() -> None:
            check_header(header, spec, digest=key is not None)

        if not self.io.store.get_into(self.name.key, (header, page), check):
            return None
        check_payload(header, page, spec, key=key)
        return page


def _page_name(naming: PageNaming) -> PageName:
    """A tail of no transfer: scope and hash are random, so that nobody else has them."""
    identity, scope = (hashlib.sha256(b"tandem-self-test" + os.urandom(32)).digest() for _ in range(2))
    spec = PageSpec(
        fingerprint=naming.fingerprint,
        layout_digest=naming.layout_digest,
        block_hash=identity,
        parent_hash=bytes(32),
        num_tokens=1,
        payload_bytes=naming.layout.bytes_per_block,
        is_tail=True,
    )
    return PageName(PageKey(naming.fingerprint, identity, scope), spec)


def _judge(name: str, error: Exception) -> str:
    """A store that cannot be used now is no reason not to start; anything else is."""
    if isinstance(error, PageError | BadValue):
        raise _failed(name, f"a block came back wrong ({error.reason})") from error
    if isinstance(error, LinkError):
        return _sentence(name, f"cannot be used now ({error.reason})")  # the store has logged it
    if isinstance(error, StoreError):
        return _degraded(name, f"cannot be used now ({error.reason})")
    if isinstance(error, OSError):
        return _degraded(name, f"cannot be used now ({error.strerror or error})")
    raise _failed(name, f"{type(error).__name__}: {error}") from error


def _degraded(name: str, what: str) -> str:
    sentence = _sentence(name, what)
    _log.warning("%s", sentence)
    return sentence


def _sentence(name: str, what: str) -> str:
    return f"the store of the {name} connector {what}; KV is computed instead until it can"
