"""The NIXL connector: a decode instance reads pages straight out of the prefill instance's KV memory.

    prefill  block computed ─▶ digest (I/O thread) ─▶ announced ─▶ held until the lease ends ─▶ word dropped, freed
    decode   announced ─▶ Read ─▶ reading thread: pages, then the lease word ─▶ digests (I/O threads) ─▶ verified
                            └─deadline─▶ given up: computed into other blocks; its own wait in quarantine

Two agents, so that ending a bad read never disturbs those who read from here: one that lends memory, whose metadata
peers hold, and one that reads. Works on what UCX finds: shared memory between processes of one user (CMA), TCP, RDMA.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import msgspec

from engine import failpoints
from engine.errors import EngineError
from engine.failpoints import FailpointError
from engine.kv_connector import KVConnectorMeta, KVConnectorOutput
from engine.kv_layout import KVLayout
from kv_transfer.counters import ReadCounters, TransferCounters
from kv_transfer.loads import LoadOp
from kv_transfer.nixl_agent import NixlAgent, Region
from kv_transfer.nixl_digest import page_digest
from kv_transfer.nixl_lender import Lender
from kv_transfer.nixl_loads import MemoryLoader
from kv_transfer.nixl_metadata import EPOCH_BYTES
from kv_transfer.nixl_production import MemoryProducer
from kv_transfer.nixl_reader import PageReader
from kv_transfer.nixl_ucx import UcxSettings
from kv_transfer.nixl_wire import GIVEN_UP, Read, ReadEnd, Wire
from kv_transfer.nixl_words import LeaseWords
from kv_transfer.page_io import SKIPPED, IOEnd
from kv_transfer.page_memory import make_page_memory
from kv_transfer.page_naming import PageNaming
from kv_transfer.production import SaveOp
from kv_transfer.quarantine import Quarantine
from kv_transfer.self_test import HAND_OVER_TIMEOUT_S, self_test_hand_over
from kv_transfer.transfer_connector import TransferConnector, TransferOptions

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

_READ_BYTES = 16 << 20
"""Bytes in one read at the most: while they are verified, the next ones move."""


class NixlOptions(TransferOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the nixl connector."""

    address: str = "127.0.0.1"
    """Address that peers reach this instance at; UCX listens on the network device that has it."""
    ucx_tls: str = ""
    """Transports that UCX may use (UCX_TLS), e.g. "tcp"; empty: the environment's, else UCX's choice. TCP is always
    among them: UCX needs it to notice that a peer has died."""
    ucx_net_devices: str = ""
    """Network devices that UCX may use (UCX_NET_DEVICES); empty: the environment's, else the one of `address`."""
    max_transfers: int = 65_536
    """Transfers that can be lent at the same time, 8 bytes each; what is beyond is computed by its reader."""
    max_quarantined_fraction: float = 0.1
    """Share of the blocks that given-up reads may keep before the reading agent is rebuilt to end them."""
    max_quarantine_s: float = 60.0
    """Age of a given-up read at which the agent is rebuilt, seconds."""


@dataclass(frozen=True, slots=True)
class DigestEnd(IOEnd):
    """A page's digest is there."""

    digest: bytes = b""


class NixlConnector(TransferConnector):
    """Implements engine.kv_connector.KVConnector over NIXL."""

    def __init__(
        self, *, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> None:
        try:
            parsed = msgspec.convert(options, NixlOptions, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(NixlOptions.__struct_fields__)
            raise EngineError(f"options of the nixl connector: {error}; known: {known}") from error
        super().__init__("nixl", parsed, wake=wake, clock=clock)
        self.counters = TransferCounters(reads=ReadCounters())
        self._options = parsed
        self._settings = UcxSettings(parsed.ucx_tls, parsed.ucx_net_devices, parsed.address)
        self._epoch = os.urandom(EPOCH_BYTES)
        self._words = LeaseWords(parsed.max_transfers)
        self._reads: dict[Read, None] = {}  # those that have not ended, oldest first
        self._read_ends: list[ReadEnd] = []
        self._num_rebuilt = 0  # written by the reading thread
        self.num_rebuilt = 0
        self._lender: Lender
        self._producer: MemoryProducer
        self._loader: MemoryLoader
        self._quarantine: Quarantine
        self._wire: Wire
        self._pages: Region
        self._naming: PageNaming

    @property
    def num_quarantined_blocks(self) -> int:
        """Also what was given up since the last poll, whose reads enter the quarantine with the next one."""
        given_up = (op.block_id for read in self._reads if read.owner.holds_blocks for op in read.ops)
        return len(self._quarantine.block_ids.union(given_up))

    # Worker half

    def register_kv_cache(self, kv_cache: torch.Tensor, layout: KVLayout, fingerprint: bytes) -> None:
        naming = self._naming = PageNaming.of(fingerprint, layout)
        self._memory = make_page_memory(kv_cache)
        is_host = kv_cache.device.type == "cpu"
        self._pages = Region(
            memory_type="DRAM" if is_host else "VRAM",
            device_id=0 if is_host else kv_cache.device.index or 0,
            address=kv_cache.data_ptr(),
            span_bytes=layout.bytes_per_block,
            num_spans=kv_cache.shape[0],
        )
        self._num_pages_per_read = max(1, _READ_BYTES // layout.bytes_per_block)
        self._quarantine = Quarantine(
            max_blocks=int(self._options.max_quarantined_fraction * kv_cache.shape[0]),
            max_age_s=self._options.max_quarantine_s,
        )
        self._loader = MemoryLoader(naming, load_timeout_s=self._options.load_timeout_s, key=self._key)
        self._lender = self._make_lender()
        self._producer = MemoryProducer(naming, self._leases, self._words, self._lender.describe)
        self._wire = self._make_wire()

    def self_test(self) -> str | None:
        num_blocks = self._pages.num_spans
        self_test_hand_over(self, self._memory, self._naming, num_blocks=num_blocks, timeout_s=HAND_OVER_TIMEOUT_S)
        self.counters = TransferCounters(reads=ReadCounters())  # it was no request's
        return None

    def start_load_kv(self, meta: KVConnectorMeta) -> None:
        deadline = self._clock() + self._options.load_timeout_s
        for _, group in groupby(cast(Sequence[LoadOp], meta.loads), key=lambda op: id(op.owner)):
            ops = list(group)
            for first in range(0, len(ops), self._num_pages_per_read):
                some = ops[first : first + self._num_pages_per_read]
                source = self._loader.source(some[0])
                digests = [source.digests[op.block_index] for op in some] if self._key is not None else []
                read = Read(some[0].owner, source.metadata, some, digests, deadline)
                self._reads[read] = None
                self._wire.submit(read)

    def save_kv(self, meta: KVConnectorMeta) -> None:
        for op in cast(Sequence[SaveOp], meta.saves):
            if self._key is None:
                self._end_op(IOEnd(op, None))
            else:
                self._threads.submit(lambda op=op: self._digest(op))  # type: ignore[misc]

    def poll(self) -> KVConnectorOutput:
        now = self._clock()
        self._apply_ends(now)
        self._producer.expire(now)
        self._give_up_late_reads(now)
        self._tend_quarantine(now)
        return self._output()

    def next_deadline_s(self) -> float | None:
        waited_for = (read.deadline for read in self._reads if not read.owner.holds_blocks)
        deadlines = [self._leases.next_deadline, next(waited_for, None), self._quarantine.next_deadline]
        known = [at for at in deadlines if at is not None]
        return max(0.0, min(known) - self._clock()) if known else None

    def shutdown(self) -> None:
        lends = len(self._leases) > 0
        self._producer.end_all(self._clock())
        self._loader.end_all()
        for read in self._reads:
            self._loader.give_up(read.owner, "the instance ends")
        self._wire.shutdown(self._options.shutdown_timeout_s)
        self._threads.shutdown(self._options.shutdown_timeout_s)
        self._apply_ends(self._clock())
        if not lends:
            self._lender.close()  # else a reader may be at it, and the end of the process ends that better

    # Inside: lending

    def _make_lender(self) -> Lender:
        return Lender(self._epoch, self._pages, self._words, self._settings, self._key)

    def _digest(self, op: SaveOp) -> None:
        """On an I/O thread."""
        assert self._key is not None
        started = time.perf_counter()
        try:
            failpoints.hit("kv.save")
            page = self._memory.page_out(op.block_id)
            digest = page_digest(op.name.spec, page, key=self._key, epoch=self._epoch)
        except FailpointError:
            self._end_op(IOEnd(op, "failpoint"))
            return
        except Exception:
            _log.exception("a page could not be digested")
            self._end_op(IOEnd(op, "io_error"))
            return
        self._end_op(DigestEnd(op, None, 0, time.perf_counter() - started, digest))

    # Inside: reading

    def _make_wire(self) -> Wire:
        name = f"reads-{self._epoch.hex()}"
        return PageReader(
            lambda: NixlAgent(name, self._settings),
            self._pages,
            own_lender=self._lender.name,
            on_end=self._end_read,
            on_rebuilt=self._end_rebuild,
        )

    def _end_read(self, read: Read, failure: str | None, duration_s: float) -> None:
        """On the reading thread: nothing writes to the read's pages any more."""
        with self._ended_lock:
            self._read_ends.append(ReadEnd(read, failure, duration_s))
        share_s = duration_s / len(read.ops)
        for index, op in enumerate(read.ops):
            if failure is None and self._key is not None:
                digest = read.digests[index]
                self._threads.submit(lambda op=op, digest=digest: self._verify(op, read, digest, share_s))  # type: ignore[misc]
            else:
                num_bytes = 0 if failure else op.name.spec.payload_bytes
                self._end_op(IOEnd(op, failure, num_bytes, share_s))
        self._wake()

    def _verify(self, op: LoadOp, read: Read, digest: bytes, moved_s: float) -> None:
        """On an I/O thread."""
        if op.is_cancelled:
            self._end_op(IOEnd(op, SKIPPED))
            return
        assert self._key is not None
        started = time.perf_counter()
        try:
            page = self._memory.page_out(op.block_id)
            found = page_digest(op.name.spec, page, key=self._key, epoch=read.source.epoch)
        except Exception:
            _log.exception("a page could not be verified")
            self._end_op(IOEnd(op, "io_error"))
            return
        is_good = hmac.compare_digest(found, digest)
        duration_s = moved_s + time.perf_counter() - started
        self._end_op(IOEnd(op, None if is_good else "page_digest", len(page), duration_s))

    def _end_rebuild(self) -> None:
        """On the reading thread."""
        with self._ended_lock:
            self._num_rebuilt += 1
        self._wake()

    def _apply_ends(self, now: float) -> None:
        ends = self._take_ended()  # first: a read's end is told before those of its pages, so it is never missed here
        with self._ended_lock:
            read_ends, self._read_ends = self._read_ends, []
            num_rebuilt = self._num_rebuilt
        for ended in read_ends:
            self._reads.pop(ended.read, None)
            self._quarantine.ended(ended.read)
            ended.count(self.counters)
        if num_rebuilt > self.num_rebuilt:
            self.num_rebuilt = num_rebuilt
            self._quarantine.rebuilt()
        for end in ends:
            self._apply(end, now)

    def _give_up_late_reads(self, now: float) -> None:
        for read in list(self._reads):
            if read.deadline <= now and not read.owner.holds_blocks:
                self._loader.give_up(read.owner, f"pages did not come within {self._options.load_timeout_s:g} s")
                self.counters.load_failures["timeout"] += 1

    def _tend_quarantine(self, now: float) -> None:
        for read in self._reads:
            if read.owner.holds_blocks:
                self._quarantine.put(read, (op.block_id for op in read.ops), now)
        if self._quarantine.rebuild_due(now):
            self._quarantine.rebuild_started()
            self._wire.rebuild()

    def _apply(self, end: IOEnd, now: float) -> None:
        counters = self.counters
        if isinstance(end.op, SaveOp):
            counters.save_s += end.duration_s
            if isinstance(end, DigestEnd):
                self._producer.digested(end.op, end.digest)
            elif end.failure is not None:
                counters.save_failures[end.failure] += 1
            self._producer.op_ended(end.op, end.failure, now)
            return
        counters.load_s += end.duration_s
        counters.num_loaded_bytes += end.num_bytes
        if end.failure is None:
            counters.num_loaded_blocks += 1
        elif end.failure not in (SKIPPED, GIVEN_UP):
            counters.load_failures[end.failure] += 1
        self._loader.op_ended(end.op, end.failure)
