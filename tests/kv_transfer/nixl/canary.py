"""A reader and a producer over real NIXL without a model. Every page of the reader's pool is filled with one number:
its owner's and its place's, or a canary's while it has no owner. The producer's numbers differ from those that the
reader computes for the same prompt. So a foreign byte is found wherever it is written.
"""

from __future__ import annotations

import hashlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engine.config import EngineConfig
from engine.core.messages import (
    AddRequest,
    Command,
    EngineRequest,
    HoldKV,
    LeaseCommand,
    LoadedEvent,
    RemoteKV,
    TransferEvent,
)
from engine.kv_layout import KVLayout
from engine.sampling.params import SamplingParams
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import Sampled, SchedulerOutput
from kv_transfer.nixl.connector import NixlConnector
from kv_transfer.transfer.connector import progress_of
from tests.kv_transfer.harness import FINGERPRINT
from tests.kv_transfer.nixl.prefill_process import PrefillProcess, ProcessTemplate
from tests.prefix_cache import forget_all

BLOCK_SIZE = 8
LAYOUT = KVLayout(num_layers=8, num_kv_heads=8, head_dim=64, block_size=BLOCK_SIZE, dtype="float32")
"""Pages of 256 KiB, so that a read takes long enough to be in the middle of."""
NUM_BLOCKS = 160
NUM_READ_BLOCKS = 64
MAX_QUARANTINED_FRACTION = 0.5
Pages = npt.NDArray[np.uint64]


def number_of(owner: str, index: int) -> int:
    """What a page is filled with."""
    return int.from_bytes(hashlib.sha256(f"{owner}/{index}".encode()).digest()[:8], "little")


def spec_of(name: str, num_blocks: int, **fields: object) -> EngineRequest:
    """A prompt of full blocks that no other name has."""
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    token_ids = [first, *range(num_blocks * BLOCK_SIZE - 1)]
    return EngineRequest(request_id=name, prompt_token_ids=token_ids, params=params, **fields)  # type: ignore[arg-type]


def request_of(spec: EngineRequest, arrival: int) -> Request:
    return Request.from_spec(spec, arrival=arrival, fingerprint=FINGERPRINT.hex())


class CanaryProducer(PrefillProcess):
    """The producer as the test sees it."""

    def __init__(self, template: ProcessTemplate, secret_file: str, ucx_tls: str) -> None:
        super().__init__(template, f"canary\n{secret_file}\n{ucx_tls}")

    def hold(self, name: str, num_blocks: int) -> None:
        """Returns once all of it can be read."""
        self.handle(AddRequest(spec_of(name, num_blocks, hold_kv=HoldKV(transfer_id=name, lease_s=60.0))))
        self.wait(lambda: any(event.num_tokens for event in self.transfers(name)))

    def release(self, name: str) -> None:
        self.handle(LeaseCommand(name, "release"))


class CanaryReader:
    """Scheduler, tables and connector of a decode core; what a step computes is the number of each page."""

    def __init__(self, secret_file: str, ucx_tls: str, load_timeout_s: float) -> None:
        kv_cache = torch.zeros((NUM_BLOCKS, *LAYOUT.page_shape))
        self.pages: Pages = kv_cache.view(NUM_BLOCKS, -1).view(torch.int64).numpy().view(np.uint64)
        self.connector = NixlConnector(
            wake=lambda: None,
            kv_secret_file=secret_file,
            ucx_tls=ucx_tls,
            load_timeout_s=load_timeout_s,
            max_quarantined_fraction=MAX_QUARANTINED_FRACTION,
        )
        self.connector.register_kv_cache(kv_cache, LAYOUT, FINGERPRINT)
        config = EngineConfig(model="", max_num_seqs=8, max_num_batched_tokens=4096, block_size=BLOCK_SIZE)
        max_model_len = NUM_BLOCKS * BLOCK_SIZE
        self.kv = KVCacheManager(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=8,
            enable_prefix_caching=True,
        )
        self.scheduler = Scheduler(config, self.kv, self.connector, max_model_len)
        self.loaded: dict[str, LoadedEvent] = {}
        self.max_pinned = 0
        self._num_added = 0
        self._canaries = np.zeros(NUM_BLOCKS, np.uint64)

    # Steps

    def add(self, name: str, num_blocks: int, *, is_remote: bool) -> None:
        """A request whose KV comes from a producer, or is computed here."""
        self._num_added += 1
        remote = RemoteKV(transfer_id=name, reservation_s=60.0) if is_remote else None
        request = request_of(spec_of(name, num_blocks, remote_kv=remote), self._num_added)
        self.scheduler.add_request(request, time.monotonic())
        if is_remote:
            self.scheduler.seed(name, [7])
        self.step()

    def receive(self, producer: PrefillProcess, name: str) -> None:
        """Pass on all events of a transfer: the read begins."""
        for event in producer.transfers(name):
            self.connector.handle(progress_of(event, event.transfer_id))
        self.step()

    def abort_all(self) -> None:
        for request_id in list(self.scheduler.requests):
            self.scheduler.abort(request_id)
        self.step()

    def step(self) -> None:
        """What EngineCore.step does. Where too many blocks are pinned for too long, they are being freed."""
        started = time.monotonic()
        output = self.connector.poll()
        self.connector.start_io()
        for result in output.loaded:
            self.scheduler.load_finished(result)
        for request_id in output.freed_request_ids:
            self.scheduler.held.free(request_id)
        scheduled = self.scheduler.schedule()
        self.connector.start_io()
        self._compute(scheduled)
        self.scheduler.update_from_output(
            scheduled, Sampled({share.request.request_id: [5] for share in scheduled.scheduled if share.samples})
        )
        self.connector.start_io()
        for event in self.scheduler.take_events():
            if isinstance(event, LoadedEvent):
                self.loaded[event.request_id] = event
        self.max_pinned = max(self.max_pinned, self.connector.num_quarantined_blocks)
        due_at = self.connector._rebuild_due_at()
        assert due_at is None or due_at > started
        assert self.pinned <= self.held

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            self.step()
            time.sleep(0.002)

    def _compute(self, scheduled: SchedulerOutput) -> None:
        for share in scheduled.scheduled:
            name, table = share.request.request_id, self.kv.block_ids(share.request.request_id)
            for index in range(share.start // BLOCK_SIZE, -(-(share.start + share.num_tokens) // BLOCK_SIZE)):
                assert table[index] not in self.held, "a step writes to a block that I/O may write to"
                self.pages[table[index]] = number_of(name, index)

    # Pages

    @property
    def pinned(self) -> set[int]:
        return self.connector.pinned_block_ids

    @property
    def held(self) -> set[int]:
        return {block.block_id for blocks in self.scheduler.held.values() for block in blocks}

    def set_canaries(self, round_name: str) -> None:
        """A number of its own in every page without an owner."""
        forget_all(self.kv.pool)
        for block in self.kv.pool.blocks:
            if block.ref_count == 0:
                self._canaries[block.block_id] = number_of(f"canary of {round_name}", block.block_id)
                self.pages[block.block_id] = self._canaries[block.block_id]

    def num_started(self, block_ids: Sequence[int]) -> int:
        """Pages whose first bytes have come."""
        return int(np.count_nonzero(self.pages[block_ids, 0] != self._canaries[block_ids]))

    def num_complete(self, block_ids: Sequence[int]) -> int:
        """Pages whose last bytes have come too."""
        return int(np.count_nonzero(self.pages[block_ids, -1] != self._canaries[block_ids]))

    def check(self) -> int:
        """Every byte of every page is its owner's, but where a read that was given up may write. Returns how many
        pages were looked at."""
        expected, is_known = self._canaries.copy(), np.ones(NUM_BLOCKS, np.bool_)
        for request in self.scheduler.requests.values():
            for index, block_id in enumerate(self.kv.block_ids(request.request_id)):
                if index * BLOCK_SIZE < request.num_external_tokens:
                    expected[block_id] = number_of(f"producer of {request.request_id}", index)
                elif index * BLOCK_SIZE < request.num_computed_tokens:
                    expected[block_id] = number_of(request.request_id, index)
        is_known[sorted(self.held)] = False
        is_foreign = (self.pages != expected[:, np.newaxis]).any(axis=1) & is_known
        assert not is_foreign.any(), f"foreign bytes in pages {np.flatnonzero(is_foreign).tolist()}"
        return int(is_known.sum())


def run_producer(secret_file: str, ucx_tls: str) -> None:
    """Lend one transfer after another until standard input ends."""
    kv_cache = torch.zeros((2 * NUM_READ_BLOCKS, *LAYOUT.page_shape))
    pages: Pages = kv_cache.view(len(kv_cache), -1).view(torch.int64).numpy().view(np.uint64)
    inbox: queue.Queue[str] = queue.Queue()
    connector = NixlConnector(wake=lambda: inbox.put(""), kv_secret_file=secret_file, ucx_tls=ucx_tls)
    connector.register_kv_cache(kv_cache, LAYOUT, FINGERPRINT)

    def listen() -> None:
        for line in sys.stdin:
            inbox.put(line.strip())
        os._exit(0)  # the test has gone

    threading.Thread(target=listen, daemon=True).start()
    decoder = msgspec.msgpack.Decoder(Command)
    num_held = 0
    while True:
        try:
            line = inbox.get(timeout=0.01)
        except queue.Empty:
            line = ""
        command = decoder.decode(bytes.fromhex(line)) if line else None
        if isinstance(command, AddRequest):
            # The blocks of the transfer before the last one: they are used again.
            request = request_of(command.request, num_held)
            num_tokens, first = request.num_initial_tokens, num_held % 2 * NUM_READ_BLOCKS
            table = list(range(first, first + num_tokens // BLOCK_SIZE))
            num_held += 1
            for index, block_id in enumerate(table):
                pages[block_id] = number_of(f"producer of {request.request_id}", index)
            connector.request_progressed(request, table, num_tokens)
            request.finish_reason = "hand_over"
            connector.request_finished(request, table)
        elif isinstance(command, LeaseCommand):
            connector.handle(command)
        connector.start_io()
        for event in connector.poll().events:
            assert isinstance(event, TransferEvent)
            print("event", msgspec.msgpack.encode(event).hex(), flush=True)
