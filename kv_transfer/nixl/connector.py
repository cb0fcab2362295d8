"""The NIXL connector: a decode instance reads pages straight out of the prefill instance's KV memory.

    prefill  block computed ─▶ digest (I/O thread) ─▶ announced ─▶ held until the lease ends ─▶ tag cleared, freed
    decode   announced ─▶ Read ─▶ reading thread: pages, then the lease tag ─▶ digests (I/O threads) ─▶ verified
                            └─deadline | abort─▶ given up: its blocks are pinned ──succeeded | disconnected──▶ freed
                                                           └─too many or for too long─▶ the agent is rebuilt ─▶ freed

Giving up on a read does not end it: over TCP it goes on writing for as long as its peer sends. So its blocks stay with
the connector, and the request is computed in others, until the read itself has ended, never by time alone. Destroying
the agent ends every read, which bounds the number of pinned blocks. It delays all other reads, so that reads of a
healthy peer, given up because their request was aborted, first get the time to end.

Two agents, so that ending a bad read never disturbs peers that read from here: one that lends memory, whose metadata
peers keep, and one that reads. Works on what UCX finds: shared memory between processes of one user (CMA), TCP, RDMA.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

from engine import failpoints
from engine.core.messages import EngineRequest, HoldKV, LeaseCommand, RemoteKV, TransferEvent
from engine.errors import EngineError
from engine.failpoints import FailpointError
from engine.kv_connector import KVConnectorOutput, KVLoadResult, KVMemory
from engine.kv_layout import PageLayout
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request
from kv_transfer.nixl.agent import NixlAgent, Region, UcxSettings, keep_to_process_end, ucx
from kv_transfer.nixl.reader import PageReader, Read
from kv_transfer.nixl.transfers import (
    EPOCH_BYTES,
    LeaseTags,
    LendingAgent,
    MemoryLoader,
    MemoryProducer,
    page_digest,
)
from kv_transfer.page.format import PageNaming
from kv_transfer.page.memory import layers_of, make_page_memory, write_page
from kv_transfer.transfer.connector import (
    GIVEN_UP,
    SKIPPED,
    OpResult,
    ReadCounters,
    TransferConnector,
    TransferCounters,
    TransferOptions,
    parse_options,
    progress_of,
    self_test_error,
)
from kv_transfer.transfer.loader import Load, LoadOp
from kv_transfer.transfer.producer import SaveOp

_log = logging.getLogger(__name__)

_READ_BYTES = 16 << 20
"""Maximum bytes in one read: while they are verified, the next ones move."""
_END_WAIT_S = 1.0
"""How long reads that were given up may pin more than the limit: most end by themselves."""
_LOG_INTERVAL_S = 1.0
"""Between two looks into the log of UCX."""


class NixlOptions(TransferOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str = "127.0.0.1"
    """Address that peers reach this instance at; UCX listens on the network device that has it."""
    ucx_tls: str = ""
    """Transports that UCX may use (UCX_TLS), e.g. "tcp"; empty: the environment's, else UCX's choice. TCP is always
    added: UCX needs it to notice that a peer has died."""
    ucx_net_devices: str = ""
    """Network devices that UCX may use (UCX_NET_DEVICES); empty: the environment's, else the one of `address`, which is
    added to a list of RDMA devices alone: TCP cannot use them."""
    max_transfers: int = 65_536
    """Transfers that can be lent at the same time, 8 bytes each; readers of further ones compute."""
    max_quarantined_fraction: float = 0.1
    """Fraction of the blocks that given-up reads may pin for more than a second. Above it the reading agent is rebuilt,
    which ends them."""
    max_quarantine_s: float = 60.0
    """Age of a given-up read at which the reading agent is rebuilt, seconds."""


class NixlConnector(TransferConnector):
    """Implements engine.kv_connector.KVConnector over NIXL."""

    needs_all_blocks = True
    _producer: MemoryProducer
    _loader: MemoryLoader

    def __init__(
        self, *, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> None:
        parsed = parse_options(NixlOptions, "nixl", options)
        super().__init__("nixl", parsed, wake=wake, clock=clock)
        self.counters = TransferCounters(reads=ReadCounters())
        self.num_rebuilt = 0
        self._options = parsed
        self._settings = UcxSettings(parsed.ucx_tls, parsed.ucx_net_devices, parsed.address)
        self._epoch = os.urandom(EPOCH_BYTES)
        self._tags = LeaseTags(parsed.max_transfers)
        self._reads: dict[Read, None] = {}  # those that have not ended, oldest first
        self._log_read_at = -math.inf
        self._is_reading_log = False
        """An I/O thread does; it may be blocked there."""
        self._is_rebuilding = False
        """The agent is being destroyed, which ends the reads that were given up one by one."""
        self._lending_agent: LendingAgent
        self._reader: PageReader
        self._pages: Region
        self._naming: PageNaming

    @property
    def num_quarantined_blocks(self) -> int:
        return len(self.pinned_block_ids)

    @property
    def pinned_block_ids(self) -> set[int]:
        """Blocks that a read that was given up may still write to."""
        return {op.block_id for read in self._reads if read.owner.holds_blocks for op in read.ops}

    # Worker side

    def register_kv_cache(self, kv_cache: KVMemory, layout: PageLayout, fingerprint: bytes) -> None:
        naming = self._naming = PageNaming.of(fingerprint, layout)
        self._memory = make_page_memory(kv_cache)
        self._pages = _region(kv_cache, layout)
        self._num_pages_per_read = max(1, _READ_BYTES // layout.bytes_per_block)
        self._loader = MemoryLoader(naming, load_timeout_s=self._options.load_timeout_s, key=self._key)
        self._lending_agent = self._make_lending_agent()
        self._producer = MemoryProducer(naming, self._leases, self._tags, self._lending_agent)
        self._reader = self._make_reader()

    def self_test(self) -> str | None:
        """Moves one block to another by a hand-over to this instance itself, while all blocks are free and zeros, as
        they are again afterwards. Raises EngineError."""
        first, last = 0, self._pages.num_pages - 1
        if first == last:
            return None
        content = os.urandom(self._pages.page_bytes)
        write_page(self._memory, first, content)
        failure = _hand_over(self, self._naming, first, last)
        if failure is not None and not self.counters.loaded.failures["page_digest"]:
            # On a busy machine a read may take longer than its time-out.
            _log.warning("self-test of the nixl connector: %s; trying again with a new agent", failure)
            self._reader.rebuild()
            failure = _hand_over(self, self._naming, first, last)
        if failure is not None:
            raise self_test_error(self.name, f"a block did not come back ({failure})")
        if self._memory.page_out(last) != content:
            raise self_test_error(self.name, "a block came back with other bytes")
        for block_id in (first, last):
            write_page(self._memory, block_id, bytes(len(content)))
        self.counters = TransferCounters(reads=ReadCounters())  # it was not for a request
        return None

    def start_io(self) -> None:
        now = self._clock()
        for _, group in groupby(self._loader.take_ops(), key=lambda op: id(op.owner)):
            ops = list(group)
            for first in range(0, len(ops), self._num_pages_per_read):
                some = ops[first : first + self._num_pages_per_read]
                source = self._loader.source(some[0])
                digests = [source.digests[op.block_index] for op in some] if self._key is not None else []
                owner = some[0].owner
                read = Read(owner, source.metadata, some, digests, owner.read_deadline(now))
                self._reads[read] = None
                self._reader.submit(read)
        for op in self._producer.take_ops():
            if self._key is None:
                self._end_op(OpResult(op, None))
            else:
                self._submit(op, partial(self._digest, op))

    def poll(self) -> KVConnectorOutput:
        now = self._clock()
        self._read_log(now)
        self._apply_results(now)
        self._producer.expire(now)
        self._give_up_late_reads(now)
        self._rebuild_if_due(now)
        return self._output()

    def next_deadline_s(self) -> float | None:
        waited_for = (read.late_at for read in self._reads if not read.owner.holds_blocks)
        return self._seconds_until(self._leases.next_deadline, *waited_for, self._rebuild_due_at())

    def shutdown(self) -> None:
        if not hasattr(self, "_reader"):  # without KV memory it has begun nothing
            self._threads.shutdown(self._options.shutdown_timeout_s)
            return
        self._producer.cancel_all(self._clock())
        self._loader.cancel_all()
        for read in self._reads:
            self._loader.give_up(read.owner, "the instance ends")
        self._reader.shutdown(self._options.shutdown_timeout_s)
        self._threads.shutdown(self._options.shutdown_timeout_s)
        self._apply_results(self._clock())

    # Lending

    def _make_lending_agent(self) -> LendingAgent:
        """Neither closed nor freed: peers may read from it past any lease, and only the process's end stops that
        without harm to them."""
        keep_to_process_end(self._memory, self._tags)
        return LendingAgent(self._epoch, self._pages, self._tags.region, self._settings, self._key)

    def _digest(self, op: SaveOp) -> OpResult:
        started = time.perf_counter()
        failpoints.hit("kv.save")
        digest = self._page_digest(op, self._epoch)
        self._call_later(lambda now: self._producer.add_digest(op, digest))
        return OpResult(op, None, 0, time.perf_counter() - started)

    # Reading

    def _make_reader(self) -> PageReader:
        return PageReader(
            lambda: NixlAgent(f"reads-{self._epoch.hex()}", self._settings),
            self._pages,
            own_name=self._lending_agent.name,
            on_end=self._end_read,
            on_stuck=lambda read, failure: self._call_later(lambda now: self._read_stuck(read, failure)),
            on_rebuilt=lambda: self._call_later(self._rebuild_ended),
        )

    def _end_read(self, read: Read, failure: str | None, duration_s: float) -> None:
        """On the reading thread: nothing writes to the read's pages any more."""
        self._call_later(lambda now: self._read_ended(read, failure, duration_s))
        duration_per_page_s = duration_s / len(read.ops)
        for index, op in enumerate(read.ops):
            if failure is None and self._key is not None:
                self._submit(op, partial(self._verify, op, read, read.digests[index], duration_per_page_s))
            else:
                num_bytes = 0 if failure else self._pages.page_bytes
                self._end_op(OpResult(op, failure, num_bytes, duration_per_page_s))

    def _read_ended(self, read: Read, failure: str | None, duration_s: float) -> None:
        """Reads that were given up or never begun are no failures."""
        self._reads.pop(read, None)
        reads = self.counters.reads
        assert reads is not None, "this connector has ReadCounters"
        if failure is None:
            num_bytes = len(read.ops) * self._pages.page_bytes
            num_descriptors = len(read.ops) * self._pages.num_layers
            reads.count_success(duration_s, read.post_s, num_bytes, num_descriptors)
        elif failure not in (SKIPPED, GIVEN_UP):
            reads.num_failed += 1

    def _read_stuck(self, read: Read, failure: str) -> None:
        """Something may write to its pages, and it will not end: it is given up, which counts no failure itself."""
        assert self.counters.reads is not None, "this connector has ReadCounters"
        self.counters.reads.num_failed += 1
        self._give_up(read.owner, failure, failure)

    def _verify(self, op: LoadOp, read: Read, digest: bytes, read_s: float) -> OpResult:
        if op.is_cancelled:
            return OpResult(op, SKIPPED)
        started = time.perf_counter()
        is_good = hmac.compare_digest(self._page_digest(op, read.source.epoch), digest)
        duration_s = read_s + time.perf_counter() - started
        return OpResult(op, None if is_good else "page_digest", self._pages.page_bytes, duration_s)

    def _submit(self, op: SaveOp | LoadOp, work: Callable[[], OpResult]) -> None:
        """Digest or verify a page on an I/O thread."""

        def run() -> None:
            try:
                result = work()
            except FailpointError:
                result = OpResult(op, "failpoint")
            except Exception:
                _log.exception("a page could not be digested")
                result = OpResult(op, "io_error")
            self._end_op(result)

        self._threads.submit(run)

    def _page_digest(self, op: SaveOp | LoadOp, epoch: bytes) -> bytes:
        assert self._key is not None
        return page_digest(op.name.spec, self._memory.page_out(op.block_id), key=self._key, epoch=epoch)

    def _rebuild_ended(self, now: float) -> None:
        del now
        self.num_rebuilt += 1
        self._is_rebuilding = False

    def _give_up_late_reads(self, now: float) -> None:
        for read in list(self._reads):
            if read.late_at <= now:
                self._give_up(read.owner, read.owner.lateness("pages did not come"), "timeout")

    def _give_up(self, load: Load, why: str, failure: str) -> None:
        """Stop waiting for the reads of a load, and count their pages; `failure` is the counter's label."""
        if load.holds_blocks:
            return
        self._loader.give_up(load, why)
        self.counters.loaded.failures[failure] += sum(len(read.ops) for read in self._reads if read.owner is load)

    def _read_log(self, now: float) -> None:
        """Pass UCX's new warnings on; on an I/O thread, because C's buffers are flushed for it, which may block."""
        if now - self._log_read_at < _LOG_INTERVAL_S or self._is_reading_log:
            return

        def read() -> None:
            ucx.forward_warnings()
            self._is_reading_log = False

        self._log_read_at, self._is_reading_log = now, True
        self._threads.submit(read)

    def _rebuild_if_due(self, now: float) -> None:
        for read in self._reads:
            if read.owner.holds_blocks:
                read.given_up_at = min(read.given_up_at, now)
        due_at = self._rebuild_due_at()
        if due_at is not None and due_at <= now:
            self._is_rebuilding = True
            self._reader.rebuild()

    def _rebuild_due_at(self) -> float | None:
        """When the agent must be destroyed if no read that was given up ends until then; None: never."""
        given_up = sorted((read.given_up_at, len(read.ops)) for read in self._reads if read.given_up_at < math.inf)
        if self._is_rebuilding or not given_up:
            return None
        num_left = int(self._options.max_quarantined_fraction * self._pages.num_pages)
        due_at = given_up[0][0] + self._options.max_quarantine_s
        for given_up_at, num_blocks in given_up:
            num_left -= num_blocks
            if num_left < 0:
                return min(due_at, given_up_at + _END_WAIT_S)
        return due_at


def _region(kv_cache: KVMemory, layout: PageLayout) -> Region:
    """The KV memory as one piece. Raises EngineError where its layers do not follow each other without a gap."""
    layers = layers_of(kv_cache)
    first, layer_bytes = layers[0], layers[0].numel() * layers[0].element_size()
    for index, layer in enumerate(layers):
        if layer.data_ptr() != first.data_ptr() + index * layer_bytes or layer.shape != first.shape:
            raise EngineError("the nixl connector needs the KV of all layers in one piece of memory")
    is_host = first.device.type == "cpu"
    return Region(
        memory_type="DRAM" if is_host else "VRAM",
        device_id=0 if is_host else first.device.index or 0,
        address=first.data_ptr(),
        span_bytes=layout.bytes_per_block // len(layers),
        num_pages=len(first),
        num_layers=len(layers),
    )


# Self-test: lent block ─▶ announced to this instance ─▶ read into another block ─▶ verified ─▶ released ─▶ equal?

_SELF_TEST_TIMEOUT_S = 30.0
"""A busy machine is not a broken one."""
_SELF_TEST_PAUSE_S = 2e-4


def _hand_over(connector: NixlConnector, naming: PageNaming, lent_id: int, loaded_id: int) -> str | None:
    """Plays the step loop, the transfer server and the transfer client for a request that lends a block and one that
    loads it. Returns when the lease is over: why the block was not read, None if it was. Raises EngineError if neither
    happens in time."""
    deadline = time.monotonic() + _SELF_TEST_TIMEOUT_S
    transfer_id = f"self-test-{os.urandom(8).hex()}"
    hold = HoldKV(transfer_id=transfer_id, lease_s=_SELF_TEST_TIMEOUT_S)
    remote = RemoteKV(transfer_id=transfer_id, reservation_s=_SELF_TEST_TIMEOUT_S)
    lent = _self_test_request(f"{transfer_id}-lent", naming, hold_kv=hold)
    loaded = _self_test_request(f"{transfer_id}-loaded", naming, remote_kv=remote)
    results: list[KVLoadResult] = []
    freed: list[str] = []

    def step() -> None:
        if time.monotonic() > deadline:
            raise self_test_error(connector.name, f"a block did not come back within {_SELF_TEST_TIMEOUT_S:g} s")
        output = connector.poll()
        results.extend(output.loaded)
        freed.extend(output.freed_request_ids)
        for event in output.events:
            if isinstance(event, TransferEvent):
                connector.handle(progress_of(event, loaded.request_id))
        connector.start_io()
        if not output.loaded and not output.events:
            time.sleep(_SELF_TEST_PAUSE_S)

    connector.update_state_after_alloc(loaded, [loaded_id], 0)
    lent.finish_reason = "hand_over"
    is_held = connector.request_finished(lent, [lent_id])
    while not results:
        step()
    connector.request_finished(loaded, [loaded_id])
    connector.handle(LeaseCommand(transfer_id, "release"))
    while is_held and lent.request_id not in freed:
        step()
    return results[0].reason if results[0].num_recomputed_blocks else None


def _self_test_request(
    request_id: str, naming: PageNaming, *, hold_kv: HoldKV | None = None, remote_kv: RemoteKV | None = None
) -> Request:
    spec = EngineRequest(
        request_id=request_id,
        prompt_token_ids=[0] * naming.block_size,
        params=SamplingParams(),
        hold_kv=hold_kv,
        remote_kv=remote_kv,
    )
    return Request.from_spec(spec, arrival=0, fingerprint=naming.fingerprint.hex())
