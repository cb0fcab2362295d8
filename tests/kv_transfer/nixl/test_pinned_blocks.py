"""Pinned blocks, and with them the invariant of every block: whatever reads, ends, times out or is aborted, in whatever
order, no block is used while a read may write to it, and each is in exactly one class."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.config import EngineConfig
from engine.core.messages import EngineRequest, KVProgress, LoadedEvent, RemoteKV, Seed, TokensEvent
from engine.sampling.params import SamplingParams
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import Sampled
from kv_transfer.nixl.connector import NixlConnector
from kv_transfer.nixl.transfers import VERSION, LendingAgent, TransferMetadata, encode
from kv_transfer.transfer.connector import GIVEN_UP
from tests.kv_transfer.harness import BLOCK_SIZE, FINGERPRINT, LAYOUT
from tests.kv_transfer.scripted_io import FakeReader

NUM_BLOCKS = 24
TIMEOUT_S = 5.0
MAX_AGE_S = 20.0
RESERVATION_S = 1000.0


class FakeLendingAgent(LendingAgent):
    """Owns no agent."""

    def __init__(self) -> None:
        pass


class FakeNixlConnector(NixlConnector):
    """The connector over a reader whose reads the test ends."""

    def _make_lending_agent(self) -> LendingAgent:
        return FakeLendingAgent()

    def _make_reader(self) -> FakeReader:
        self.reader = FakeReader()
        return self.reader


def metadata_of(num_pages: int) -> bytes:
    """Of some producer."""
    epoch = bytes(range(16))
    metadata = TransferMetadata(
        version=VERSION,
        agent_name=f"lends-{epoch.hex()}",
        epoch=epoch,
        agent_metadata=b"metadata",
        memory_type="DRAM",
        device_id=0,
        pages_address=1 << 20,
        page_bytes=LAYOUT.bytes_per_block,
        num_blocks=1000,
        tags_address=1 << 16,
        num_tags=16,
        tag_index=3,
        tag=b"12345678",
        block_ids=list(range(num_pages)),
    )
    return encode(metadata, None)


class Reading(RuleBasedStateMachine):
    """A decode core without a model, and reads that may freeze."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.connector = FakeNixlConnector(
            wake=lambda: None,
            clock=lambda: self.now,
            digest=False,
            load_timeout_s=TIMEOUT_S,
            max_quarantined_fraction=0.3,
            max_quarantine_s=MAX_AGE_S,
            num_io_threads=1,
        )
        self.connector.register_kv_cache(torch.zeros((NUM_BLOCKS, *LAYOUT.page_shape)), LAYOUT, FINGERPRINT)
        self.connector._num_pages_per_read = 2
        config = EngineConfig(model="", max_num_seqs=4, max_num_batched_tokens=16, block_size=BLOCK_SIZE)
        kv = KVCacheManager(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=NUM_BLOCKS * BLOCK_SIZE,
            max_num_seqs=4,
            enable_prefix_caching=True,
        )
        self.scheduler = Scheduler(config, kv, self.connector, NUM_BLOCKS * BLOCK_SIZE)
        self.requests: dict[str, Request] = {}
        self.announced: dict[str, int] = {}
        self.ids = itertools.count()

    @property
    def reader(self) -> FakeReader:
        return self.connector.reader

    def step(self) -> None:
        """What EngineCore.step does."""
        output = self.connector.poll()
        for result in output.loaded:
            self.scheduler.load_finished(result)
        for request_id in output.freed_request_ids:
            self.scheduler.held.free(request_id)
        scheduled = self.scheduler.schedule()
        self.connector.start_io()
        self.check()
        tokens = {share.request.request_id: [5] for share in scheduled.scheduled if share.samples}
        self.scheduler.update_from_output(scheduled, Sampled(tokens))
        for event in self.scheduler.take_events():
            if isinstance(event, TokensEvent) and event.finish_reason is not None:
                self.requests.pop(event.request_id, None)
            elif isinstance(event, LoadedEvent):
                self.announced.pop(event.request_id, None)

    @rule(num_tokens=st.integers(1, 30), salt=st.integers(0, 2))
    def add(self, num_tokens: int, salt: int) -> None:
        request_id = f"r{next(self.ids)}"
        spec = EngineRequest(
            request_id=request_id,
            prompt_token_ids=[salt + 10, *range(num_tokens - 1)],
            params=SamplingParams(max_tokens=3, ignore_eos=True),
            remote_kv=RemoteKV(transfer_id=request_id, reservation_s=RESERVATION_S),
        )
        request = Request.from_spec(spec, arrival=len(request_id), fingerprint=FINGERPRINT.hex())
        self.requests[request_id] = request
        self.scheduler.add_request(request, self.now)
        self.step()

    def some(self, data: Any, of: Any) -> Any:
        return data.draw(st.sampled_from(sorted(of)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), whole=st.booleans())
    def announce(self, data: Any, whole: bool) -> None:
        request_id = self.some(data, self.requests)
        request = self.requests[request_id]
        num_full, num_tail = divmod(request.num_initial_tokens, BLOCK_SIZE)
        num_ready = num_full if whole else data.draw(st.integers(0, num_full))
        metadata = metadata_of(num_full + bool(num_tail))
        num_tokens = request.num_initial_tokens if whole else None
        self.connector.handle(KVProgress(request_id, num_ready, connector_metadata=metadata, num_tokens=num_tokens))
        self.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def seed(self, data: Any) -> None:
        seed = Seed(self.some(data, self.requests), [7])
        self.scheduler.seed(seed.request_id, seed.token_ids)
        self.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        request_id = self.some(data, self.requests)
        del self.requests[request_id]
        self.scheduler.abort(request_id)
        self.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def producer_fails(self, data: Any) -> None:
        self.connector.handle(KVProgress(self.some(data, self.requests), 0, failed="the producer is gone"))
        self.step()

    @precondition(lambda self: self.reader.reads)
    @rule(data=st.data(), failure=st.sampled_from([None, None, "nixl_remotedisconnect", "lease_ended"]))
    def read_ends(self, data: Any, failure: str | None) -> None:
        read = self.reader.reads.pop(data.draw(st.integers(0, len(self.reader.reads) - 1)))
        self.connector._end_read(read, failure, 0.0)
        self.step()

    @precondition(lambda self: self.reader.rebuild_requested)
    @rule()
    def rebuild(self) -> None:
        given_up = [read for read in self.reader.reads if read.owner.holds_blocks]
        self.reader.reads = [read for read in self.reader.reads if not read.owner.holds_blocks]
        self.reader.rebuild_requested = False
        for read in given_up:
            self.connector._end_read(read, GIVEN_UP, 0.0)
        self.connector._call_later(self.connector._rebuild_ended)
        self.step()
        assert self.connector.num_quarantined_blocks == 0

    @rule(seconds=st.sampled_from([0.1, TIMEOUT_S, MAX_AGE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    @invariant()
    def check(self) -> None:
        pool, kv = self.scheduler.kv.pool, self.scheduler.kv
        in_flight = {op.block_id for read in self.reader.reads for op in read.ops}
        assert all(pool.blocks[block_id].ref_count == 1 for block_id in in_flight), "a page that is read into is shared"
        assert all(pool.blocks[block_id].block_hash is None for block_id in in_flight), "and found by others"
        given_up = {op.block_id for read in self.reader.reads if read.owner.holds_blocks for op in read.ops}
        held = {block.block_id for blocks in self.scheduler.held.values() for block in blocks}
        tables = {request.request_id: set(kv.block_ids(request.request_id)) for request in self.scheduler.running}
        for request_id, table in tables.items():
            assert not table & in_flight, f"{request_id} runs on blocks that are read into"
        assert given_up <= held
        num_pinned = self.connector.num_quarantined_blocks
        assert self.connector.pinned_block_ids == given_up
        num_running = NUM_BLOCKS - pool.num_available - len(held)
        num_free = pool.num_available - pool.num_cached
        classes = (num_pinned, len(held) - num_pinned, num_running, pool.num_cached, num_free)
        assert min(classes) >= 0
        assert sum(classes) == NUM_BLOCKS

    def teardown(self) -> None:
        """Everything ends, and nothing is held."""
        for request_id in list(self.requests):
            self.scheduler.abort(request_id)
        for read in self.reader.reads:
            self.connector._end_read(read, "nixl_remotedisconnect", 0.0)
        self.reader.reads.clear()
        self.step()
        assert self.scheduler.kv.pool.num_available == NUM_BLOCKS
        assert self.connector.num_quarantined_blocks == 0
        self.connector.shutdown()


def reading_of(num_blocks: int, announced_at: float = 0.0) -> Reading:
    """One request, all of whose blocks are being read; it has a reservation of RESERVATION_S."""
    reading = Reading()
    reading.add(num_tokens=num_blocks * BLOCK_SIZE, salt=0)
    reading.now = announced_at
    [(request_id, request)] = reading.requests.items()
    metadata, num_tokens = metadata_of(num_blocks), request.num_initial_tokens
    reading.connector.handle(KVProgress(request_id, num_blocks, connector_metadata=metadata, num_tokens=num_tokens))
    reading.step()
    return reading


def test_an_abort_of_more_than_the_cap_rebuilds_nothing_if_its_reads_end() -> None:
    reading = reading_of(num_blocks=NUM_BLOCKS // 2)
    reading.scheduler.abort(*reading.requests)
    reading.step()
    assert reading.connector.num_quarantined_blocks == NUM_BLOCKS // 2
    assert not reading.reader.rebuild_requested
    while reading.reader.reads:
        reading.connector._end_read(reading.reader.reads.pop(), None, 0.0)
    reading.time_passes(seconds=TIMEOUT_S)
    assert not reading.reader.rebuild_requested
    reading.teardown()


def test_an_abort_of_more_than_the_cap_ends_in_a_rebuild_if_its_reads_do_not() -> None:
    reading = reading_of(num_blocks=NUM_BLOCKS // 2)
    reading.scheduler.abort(*reading.requests)
    reading.step()
    wait_s = reading.connector.next_deadline_s()
    assert wait_s is not None
    reading.time_passes(seconds=wait_s)
    assert reading.reader.rebuild_requested
    reading.teardown()


def test_reads_that_were_given_up_for_long_end_in_one_rebuild() -> None:
    reading = reading_of(num_blocks=3)
    reading.time_passes(seconds=TIMEOUT_S)
    assert reading.connector.num_quarantined_blocks == 3
    reading.time_passes(seconds=MAX_AGE_S / 2)
    assert not reading.reader.rebuild_requested
    assert reading.connector.next_deadline_s() == MAX_AGE_S / 2
    for _ in range(2):
        reading.time_passes(seconds=MAX_AGE_S / 2)
        assert reading.reader.rebuild_requested
    reading.rebuild()
    reading.time_passes(seconds=MAX_AGE_S)
    assert not reading.reader.rebuild_requested
    reading.teardown()


def test_each_block_of_a_late_load_is_counted() -> None:
    reading = reading_of(num_blocks=5)
    assert [len(read.ops) for read in reading.reader.reads] == [2, 2, 1]
    reading.connector._end_read(reading.reader.reads.pop(0), None, 0.0)
    reading.time_passes(seconds=TIMEOUT_S)
    reading.time_passes(seconds=TIMEOUT_S)
    assert reading.connector.counters.loaded.failures == {"timeout": 3}
    reading.teardown()


def test_a_load_may_take_as_long_as_its_reads_go_on() -> None:
    reading = reading_of(num_blocks=5)
    while reading.reader.reads:
        reading.time_passes(seconds=TIMEOUT_S - 1.0)
        assert reading.connector.num_quarantined_blocks == 0
        reading.connector._end_read(reading.reader.reads.pop(0), None, 0.0)
        reading.step()
        assert reading.connector.next_deadline_s() == (TIMEOUT_S if reading.reader.reads else None)
    assert not reading.connector.counters.loaded.failures
    reading.teardown()


@pytest.mark.parametrize(("announced_at", "wait_s"), [(0.0, TIMEOUT_S), (993.0, 3.5), (996.0, 2.0)])
def test_pages_that_are_announced_late_are_given_up_before_their_reservation_ends(
    announced_at: float, wait_s: float
) -> None:
    reading = reading_of(num_blocks=3, announced_at=announced_at)
    assert reading.connector.next_deadline_s() == pytest.approx(wait_s)
    reading.time_passes(seconds=wait_s + 0.001)
    assert reading.connector.num_quarantined_blocks == 3
    assert reading.connector.counters.loaded.failures == {"timeout": 3}
    reading.teardown()


def test_a_stuck_read_fails_its_load_at_once() -> None:
    reading = reading_of(num_blocks=5)
    [(request_id, request)] = reading.requests.items()
    reading.connector._read_stuck(reading.reader.reads[0], "nixl_backend")
    reading.step()
    assert request.loaded, f"{request_id} waits"
    assert reading.connector.num_quarantined_blocks == 5
    assert reading.connector.counters.loaded.failures == {"nixl_backend": 5}
    # STEP a second one of the same load counts no more
    reading.connector._read_stuck(reading.reader.reads[1], "nixl_backend")
    reading.step()
    assert reading.connector.counters.loaded.failures == {"nixl_backend": 5}
    # STEP each has failed once, and ends as given up
    for read in reading.reader.reads:
        reading.connector._end_read(read, GIVEN_UP, 0.0)
    reading.reader.reads.clear()
    reading.step()
    assert reading.connector.counters.reads is not None
    assert reading.connector.counters.reads.num_failed == 2
    reading.teardown()


TestReading = Reading.TestCase
TestReading.settings = settings(max_examples=15, stateful_step_count=40)


@pytest.mark.slow
def test_reading_at_length() -> None:
    run_state_machine_as_test(Reading, settings=settings(max_examples=300, stateful_step_count=60))
