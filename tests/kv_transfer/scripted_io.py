"""Store and NIXL connectors whose I/O begins when they start it and ends when the test ends it, on no thread.

What is in flight is recorded here, independently of the connector, whose account is checked against it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import torch

from engine.core.messages import KVProgress
from engine.kv_connector import KVConnector
from engine.scheduling.request import Request
from kv_transfer.multi_connector import MultiConnector
from kv_transfer.nixl.connector import NixlConnector
from kv_transfer.nixl.reader import PageReader, Read
from kv_transfer.nixl.transfers import MAC_BYTES, VERSION, LendingAgent, TransferMetadata, encode
from kv_transfer.secret import load_secret
from kv_transfer.stores.connector import StoreConnector, StoreOptions
from kv_transfer.transfer.connector import GIVEN_UP, SKIPPED, IOThreads, Job, OpResult
from kv_transfer.transfer.loader import LoadOp
from kv_transfer.transfer.producer import SaveOp
from tests.kv_transfer.harness import BLOCK_SIZE, FINGERPRINT, LAYOUT
from tests.kv_transfer.memory_store import MemoryStore

LOAD_TIMEOUT_S = 5.0
MAX_QUARANTINE_S = 20.0
_EPOCH = bytes(range(16))


class ScriptedIO(KVConnector, Protocol):
    """What a test can do to either connector, and what it knows of it."""

    @property
    def writes_in_flight(self) -> set[int]:
        """Blocks that I/O may still write to, or is about to verify."""
        ...

    @property
    def reads_in_flight(self) -> set[int]:
        """Blocks that I/O may still read."""
        ...

    @property
    def pinned(self) -> set[int]:
        """Blocks of reads that were given up."""
        ...

    @property
    def num_endable(self) -> int:
        """Operations that can end."""
        ...

    def end(self, index: int, failure: str | None) -> None:
        """One of them ends."""
        ...

    def announce(self, request: Request, num_ready_blocks: int, *, whole: bool) -> None:
        """A producer's announcement to a request that waits for KV."""
        ...

    @property
    def rebuild_requested(self) -> bool: ...

    def rebuild(self) -> None:
        """Carry out the requested rebuild."""
        ...


class FakeReader(PageReader):
    """Reads that end when the test says so."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.rebuild_requested = False

    def submit(self, read: Read) -> None:
        self.reads.append(read)

    def rebuild(self) -> None:
        assert not self.rebuild_requested, "asked twice"
        self.rebuild_requested = True

    def shutdown(self, timeout_s: float) -> None:
        del timeout_s


class _NoThreads(IOThreads):
    """Runs a job when it is submitted."""

    def __init__(self) -> None:
        super().__init__(0, "none")

    def are_busy_for(self, seconds: float) -> bool:
        """As those that hang."""
        return seconds >= 0

    def submit(self, job: Job, *, is_urgent: bool = False) -> None:
        job()


def blocks_lent(connector_metadata: bytes) -> list[int]:
    """The blocks in a producer's metadata, unchecked."""
    return msgspec.msgpack.decode(connector_metadata[MAC_BYTES:], type=TransferMetadata).block_ids


def _memory(num_blocks: int) -> torch.Tensor:
    return torch.zeros((num_blocks, *LAYOUT.page_shape))


class ScriptedStoreConnector(StoreConnector):
    """Over a store that is never used. `max_begun`: operations that can be under way at a time, as many as threads."""

    rebuild_requested = False

    def __init__(
        self,
        num_blocks: int,
        clock: Callable[[], float],
        secret_file: str,
        *,
        max_begun: int = sys.maxsize,
        prefix_only: bool = False,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        options = StoreOptions(load_timeout_s=LOAD_TIMEOUT_S, kv_secret_file=secret_file, prefix_only=prefix_only)
        super().__init__(MemoryStore(), options, wake=wake, clock=clock)
        self._threads.shutdown(1.0)
        self._threads = _NoThreads()
        self._max_begun = max_begun
        self.waiting: list[SaveOp | LoadOp] = []
        self.in_flight: list[SaveOp | LoadOp] = []
        self.register_kv_cache(_memory(num_blocks), LAYOUT, FINGERPRINT)

    @property
    def writes_in_flight(self) -> set[int]:
        return {op.block_id for op in self.in_flight if isinstance(op, LoadOp)}

    @property
    def reads_in_flight(self) -> set[int]:
        return {op.block_id for op in self.in_flight if isinstance(op, SaveOp)}

    @property
    def pinned(self) -> set[int]:
        return set()

    @property
    def num_endable(self) -> int:
        return len(self.in_flight)

    def end(self, index: int, failure: str | None) -> None:
        op = self.in_flight.pop(index)
        self._ended_at = self._clock()
        self._end_op(OpResult(op, SKIPPED if failure and op.is_cancelled else failure))
        self._begin()

    def announce(self, request: Request, num_ready_blocks: int, *, whole: bool) -> None:
        num_tokens = request.num_initial_tokens if whole else None
        self.handle(KVProgress(request.request_id, num_ready_blocks, num_tokens=num_tokens))

    def rebuild(self) -> None:
        raise AssertionError("a store has no agent")

    def _run(self, op: SaveOp | LoadOp) -> None:
        self.waiting.append(op)
        self._begin()

    def _begin(self) -> None:
        while self.waiting and len(self.in_flight) < self._max_begun:
            op = self.waiting.pop(0)
            if self._queued.pop(id(op), None) is not None:
                self.in_flight.append(op)


class _FakeLendingAgent(LendingAgent):
    """Describes blocks and lends nothing."""

    def __init__(self, num_blocks: int, key: bytes) -> None:
        self._num_blocks = num_blocks
        self._key = key

    def describe(self, block_ids: Sequence[int], tag_index: int, tag: bytes) -> bytes:
        metadata = TransferMetadata(
            version=VERSION,
            agent_name=f"lends-{_EPOCH.hex()}",
            epoch=_EPOCH,
            agent_metadata=b"metadata",
            memory_type="DRAM",
            device_id=0,
            pages_address=1 << 20,
            page_bytes=LAYOUT.bytes_per_block,
            num_blocks=self._num_blocks,
            tags_address=1 << 16,
            num_tags=1 << 16,
            tag_index=tag_index,
            tag=tag,
            block_ids=list(block_ids),
        )
        return encode(metadata, self._key)


class ScriptedNixlConnector(NixlConnector):
    """Reads, digests and verifications end when the test ends them."""

    def __init__(
        self,
        num_blocks: int,
        clock: Callable[[], float],
        secret_file: str,
        *,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._num_blocks, self._secret = num_blocks, load_secret(secret_file)
        super().__init__(
            wake=wake,
            clock=clock,
            kv_secret_file=secret_file,
            load_timeout_s=LOAD_TIMEOUT_S,
            max_quarantined_fraction=0.3,
            max_quarantine_s=MAX_QUARANTINE_S,
        )
        self._threads.shutdown(1.0)
        self._threads = _NoThreads()
        self.digesting: list[SaveOp] = []
        self.verifying: list[LoadOp] = []
        self.register_kv_cache(_memory(num_blocks), LAYOUT, FINGERPRINT)
        self._num_pages_per_read = 2

    @property
    def writes_in_flight(self) -> set[int]:
        return {op.block_id for op in (*self._ops_read(), *self.verifying)}

    @property
    def reads_in_flight(self) -> set[int]:
        return {op.block_id for op in self.digesting}

    @property
    def pinned(self) -> set[int]:
        return {op.block_id for op in self._ops_read() if op.owner.holds_blocks}

    @property
    def num_endable(self) -> int:
        return len(self.reader.reads) + len(self.verifying) + len(self.digesting)

    def end(self, index: int, failure: str | None) -> None:
        if index < len(self.reader.reads):
            self._end_read(self.reader.reads.pop(index), failure, 0.0)
            return
        index -= len(self.reader.reads)
        if index < len(self.verifying):
            self._end_op(OpResult(self.verifying.pop(index), failure and "page_digest"))
            return
        op = self.digesting.pop(index - len(self.verifying))
        if not failure:
            self._producer.add_digest(op, b"d" * 32)
        self._end_op(OpResult(op, "failpoint" if failure else None))

    def announce(self, request: Request, num_ready_blocks: int, *, whole: bool) -> None:
        num_full, num_tail = divmod(request.num_initial_tokens, BLOCK_SIZE)
        num_pages = num_full + bool(num_tail)
        source = self._loader._sources.get(request.request_id)
        num_announced = 0 if source is None else len(source.digests)
        num_new = max(0, (num_pages if whole else num_ready_blocks) - num_announced)
        metadata = _FakeLendingAgent(self._num_blocks + num_pages, self._secret).describe(
            range(num_pages), 3, b"12345678"
        )
        num_tokens = request.num_initial_tokens if whole else None
        self.handle(
            KVProgress(
                request.request_id,
                num_ready_blocks,
                digests=[b"d" * 32] * num_new,
                connector_metadata=metadata,
                num_tokens=num_tokens,
            )
        )

    @property
    def rebuild_requested(self) -> bool:
        return self.reader.rebuild_requested

    def rebuild(self) -> None:
        given_up = [read for read in self.reader.reads if read.owner.holds_blocks]
        self.reader.reads = [read for read in self.reader.reads if not read.owner.holds_blocks]
        self.reader.rebuild_requested = False
        for read in given_up:
            self._end_read(read, GIVEN_UP, 0.0)
        self._call_later(self._rebuild_ended)

    def _ops_read(self) -> list[LoadOp]:
        return [op for read in self.reader.reads for op in read.ops]

    def _submit(self, op: SaveOp | LoadOp, work: Callable[[], OpResult]) -> None:
        del work
        if isinstance(op, SaveOp):
            self.digesting.append(op)
        else:
            self.verifying.append(op)

    def _make_lending_agent(self) -> LendingAgent:
        return _FakeLendingAgent(self._num_blocks, self._secret)

    def _make_reader(self) -> FakeReader:
        self.reader = FakeReader()
        return self.reader


class ScriptedList(MultiConnector, KVConnector):
    """NIXL hands over; behind it is a prefix store."""

    def __init__(self, num_blocks: int, clock: Callable[[], float], secret_file: str, *, max_begun: int) -> None:
        options = {"num_blocks": num_blocks, "clock": clock, "secret_file": secret_file}
        path = f"{__name__}:Scripted"
        nixl = {"class_path": f"{path}NixlConnector", "options": options}
        store = {"class_path": f"{path}StoreConnector", "options": {**options, "max_begun": max_begun}}
        super().__init__(wake=lambda: None, connectors=[nixl, store])
        first, second = self._connectors
        assert isinstance(first, ScriptedNixlConnector)
        assert isinstance(second, ScriptedStoreConnector)
        self.nixl, self.store = first, second
        self._block_size = BLOCK_SIZE

    @property
    def writes_in_flight(self) -> set[int]:
        return self.nixl.writes_in_flight | self.store.writes_in_flight

    @property
    def reads_in_flight(self) -> set[int]:
        return self.nixl.reads_in_flight | self.store.reads_in_flight

    @property
    def pinned(self) -> set[int]:
        return self.nixl.pinned

    @property
    def num_endable(self) -> int:
        return self.nixl.num_endable + self.store.num_endable

    def end(self, index: int, failure: str | None) -> None:
        num_nixl = self.nixl.num_endable
        connector: Any = self.nixl if index < num_nixl else self.store
        connector.end(index if index < num_nixl else index - num_nixl, failure)

    def announce(self, request: Request, num_ready_blocks: int, *, whole: bool) -> None:
        self.nixl.announce(request, num_ready_blocks, whole=whole)

    @property
    def rebuild_requested(self) -> bool:
        return self.nixl.rebuild_requested

    def rebuild(self) -> None:
        self.nixl.rebuild()
