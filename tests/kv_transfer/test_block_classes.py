"""The invariant of every block, over the whole of an engine core but its model: scheduler, tables, pool, leases and a
connector, whatever is added, handed over, loaded, released, aborted, late or lost, in whatever order.

Each block is in exactly one class, by precedence: quarantined, held, running, cached, free. And none that I/O may still
write to is free, found by its content, or in another request's table; none that I/O or a peer may still read is free
or written to.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.core.messages import EngineRequest, HoldKV, KVProgress, LeaseCommand, RemoteKV, Seed
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request
from kv_transfer.secret import ensure_secret
from tests.kv_transfer.harness import BLOCK_SIZE, FINGERPRINT
from tests.kv_transfer.modelless_core import NUM_BLOCKS, ModellessCore
from tests.kv_transfer.scripted_io import (
    LOAD_TIMEOUT_S,
    MAX_QUARANTINE_S,
    ScriptedIO,
    ScriptedList,
    ScriptedNixlConnector,
    ScriptedStoreConnector,
)

LEASE_S, RESERVATION_S = 3.0, 30.0
NUM_THREADS = 2
LENGTHS, SALTS, TOKENS = st.integers(1, 30), st.integers(0, 2), st.integers(1, 9)
FAILURES = st.sampled_from([None, None, None, None, "page_digest", "missing", "store_timeout"])


class Machine(RuleBasedStateMachine):
    """A core under any order of events. A subclass says over which connector."""

    def make_connector(self, secret_file: str) -> ScriptedIO:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ids = itertools.count()
        with tempfile.TemporaryDirectory() as folder:
            secret_file = Path(folder) / "secret"
            ensure_secret(secret_file)
            self.connector = self.make_connector(str(secret_file))
        self.core = ModellessCore(self.connector, lambda: self.now)

    @invariant()
    def every_block_is_in_one_class_and_no_io_touches_anothers(self) -> None:
        self.core.check()

    def add(self, num_tokens: int, salt: int, max_tokens: int, kind: str) -> Request:
        number = next(self.ids)
        request_id = f"r{number}"
        spec = EngineRequest(
            request_id=request_id,
            prompt_token_ids=[salt + 10, *range(num_tokens - 1)],
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            hold_kv=HoldKV(transfer_id=request_id, lease_s=LEASE_S) if kind == "hold" else None,
            remote_kv=RemoteKV(transfer_id=request_id, reservation_s=RESERVATION_S) if kind == "remote" else None,
        )
        request = Request.from_spec(spec, arrival=number, fingerprint=FINGERPRINT.hex())
        request.arrived_s = self.now
        self.core.add(request)
        return request

    @rule(num_tokens=LENGTHS, salt=SALTS, max_tokens=TOKENS)
    def add_plain(self, num_tokens: int, salt: int, max_tokens: int) -> None:
        self.add(num_tokens, salt, max_tokens, "plain")

    @rule(num_tokens=LENGTHS, salt=SALTS)
    def add_hold(self, num_tokens: int, salt: int) -> None:
        self.add(num_tokens, salt, 4, "hold")

    @rule(num_tokens=LENGTHS, salt=SALTS, max_tokens=TOKENS)
    def add_remote(self, num_tokens: int, salt: int, max_tokens: int) -> None:
        self.add(num_tokens, salt, max_tokens, "remote")

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core.step()

    def waiting_for_kv(self) -> list[str]:
        return sorted(name for name, request in self.core.requests.items() if request.spec.remote_kv is not None)

    @precondition(lambda self: self.waiting_for_kv())
    @rule(data=st.data(), whole=st.booleans())
    def announce(self, data: Any, whole: bool) -> None:
        request = self.core.requests[data.draw(st.sampled_from(self.waiting_for_kv()))]
        num_full = request.num_initial_tokens // BLOCK_SIZE
        num_ready = num_full if whole else data.draw(st.integers(0, num_full))
        self.connector.announce(request, num_ready, whole=whole)
        self.core.step()

    @precondition(lambda self: self.waiting_for_kv())
    @rule(data=st.data(), message=st.sampled_from(["failed", "other tokens", "seed", "seed"]))
    def message_arrives(self, data: Any, message: str) -> None:
        request_id = data.draw(st.sampled_from(self.waiting_for_kv()))
        if message == "seed":
            seed = Seed(request_id, [7])
            self.core.scheduler.seed(seed.request_id, seed.token_ids)
        elif message == "failed":
            self.connector.handle(KVProgress(request_id, 0, failed="the producer is gone"))
        else:
            self.connector.handle(KVProgress(request_id, 0, num_tokens=1000))
        self.core.step()

    @precondition(lambda self: self.waiting_for_kv())
    @rule(data=st.data())
    def all_goes_well(self, data: Any) -> None:
        """For one that waits for KV, and whatever else is in flight."""
        request = self.core.requests[data.draw(st.sampled_from(self.waiting_for_kv()))]
        self.connector.announce(request, request.num_initial_tokens // BLOCK_SIZE, whole=True)
        self.core.step()
        while self.connector.num_endable:
            self.connector.end(0, None)
        self.core.scheduler.seed(request.request_id, [7])
        self.core.step()

    @rule(data=st.data(), action=st.sampled_from(["attach", "renew", "release"]))
    def reader_says(self, data: Any, action: Any) -> None:
        """Also of transfers that are not offered yet, have ended, or never were."""
        known = sorted({f"r{number}" for number in range(10)} | self.core.transfers)
        self.connector.handle(LeaseCommand(data.draw(st.sampled_from(known)), action, lease_s=LEASE_S))
        self.core.step()

    @precondition(lambda self: self.core.transfers)
    @rule(data=st.data())
    def releases(self, data: Any) -> None:
        self.connector.handle(LeaseCommand(data.draw(st.sampled_from(sorted(self.core.transfers))), "release"))
        self.core.step()

    @precondition(lambda self: self.connector.num_endable)
    @rule(data=st.data(), failures=st.lists(FAILURES, min_size=1, max_size=8))
    def io_ends(self, data: Any, failures: list[str | None]) -> None:
        for failure in failures:
            if self.connector.num_endable:
                self.connector.end(data.draw(st.integers(0, self.connector.num_endable - 1)), failure)
        self.core.step()

    @precondition(lambda self: self.connector.rebuild_requested)
    @rule()
    def rebuilt(self) -> None:
        self.connector.rebuild()
        self.core.step()
        assert not self.connector.pinned

    @precondition(lambda self: self.core.requests)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        self.core.abort(data.draw(st.sampled_from(sorted(self.core.requests))))

    @rule(seconds=st.sampled_from([0.5, LEASE_S, LOAD_TIMEOUT_S, MAX_QUARANTINE_S, RESERVATION_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.core.step()

    def teardown(self) -> None:
        """Everything ends, and nothing is left."""
        for request_id in list(self.core.requests):
            self.core.scheduler.abort(request_id)
        self.core.step()
        for transfer_id in sorted(self.core.transfers):
            self.connector.handle(LeaseCommand(transfer_id, "release"))
        while self.connector.num_endable:
            self.connector.end(0, "store_timeout")
        if self.connector.rebuild_requested:
            self.connector.rebuild()
        self.core.step()
        self.core.step()
        self.core.check()
        assert self.connector.num_transfers == 0
        assert not self.core.scheduler.held
        assert self.core.kv.pool.num_available == NUM_BLOCKS
        assert not self.core.lent
        self.connector.shutdown()


class OverStore(Machine):
    def make_connector(self, secret_file: str) -> ScriptedIO:
        return ScriptedStoreConnector(NUM_BLOCKS, lambda: self.now, secret_file)


class OverNixl(Machine):
    def make_connector(self, secret_file: str) -> ScriptedIO:
        return ScriptedNixlConnector(NUM_BLOCKS, lambda: self.now, secret_file)


class OverBusyStore(Machine):
    """What its two threads have not begun can be cancelled."""

    connector: ScriptedStoreConnector

    def make_connector(self, secret_file: str) -> ScriptedIO:
        return ScriptedStoreConnector(NUM_BLOCKS, lambda: self.now, secret_file, max_begun=NUM_THREADS)


class OverList(Machine):
    connector: ScriptedList

    def make_connector(self, secret_file: str) -> ScriptedIO:
        return ScriptedList(NUM_BLOCKS, lambda: self.now, secret_file, max_begun=NUM_THREADS)


_SETTINGS = settings(max_examples=25, stateful_step_count=50)
_MACHINES = [OverStore, OverBusyStore, OverNixl, OverList]
TestOverStore, TestOverBusyStore, TestOverNixl, TestOverList = (machine.TestCase for machine in _MACHINES)
TestOverStore.settings = TestOverBusyStore.settings = TestOverNixl.settings = TestOverList.settings = _SETTINGS


@pytest.mark.parametrize("machine", _MACHINES)
def test_what_goes_well_is_loaded_and_nothing_is_computed_again(machine: type[Machine]) -> None:
    """Else the machines would search the ways to fail alone."""
    running = machine()
    running.add_remote(num_tokens=9, salt=0, max_tokens=1)
    request = running.core.requests["r0"]
    running.connector.announce(request, 2, whole=True)
    running.core.step()
    while running.connector.num_endable:
        running.connector.end(0, None)
    running.core.step()
    assert (request.num_external_tokens, request.num_recomputed_tokens) == (9, 0)
    running.teardown()


def test_what_was_given_up_since_the_last_poll_counts_as_pinned() -> None:
    """The reservation runs out, between a poll and the next, while pages are read."""
    machine = OverNixl()
    machine.add_remote(num_tokens=5, salt=0, max_tokens=1)
    machine.time_passes(RESERVATION_S - 3.0)
    machine.connector.announce(machine.core.requests["r0"], 1, whole=True)
    machine.core.step()
    assert len(machine.connector.writes_in_flight) == 2
    machine.time_passes(3.0)
    assert machine.core.load.quarantined_blocks == 2
    machine.teardown()


# A store that hangs


def hang(machine: Machine, *, num_timeouts: int = 4) -> None:
    """Nothing ends."""
    for _ in range(num_timeouts):
        machine.time_passes(LOAD_TIMEOUT_S)
        machine.steps(4)
        machine.core.check()


def check_others_go_on(machine: Machine, *kinds: str) -> None:
    """Only what the threads hang in is kept, requests of these kinds are computed, and then the store works again."""
    assert machine.core.load.held_blocks == NUM_THREADS
    behind = [machine.add(BLOCK_SIZE // 2, salt, 2, kind) for salt, kind in enumerate(kinds)]  # nothing to look up
    machine.steps(3)
    assert [request.finish_reason for request in behind] == [
        "hand_over" if kind == "hold" else "length" for kind in kinds
    ]
    machine.teardown()


def test_a_prompt_of_more_than_half_of_the_memory_is_computed_beside_a_store_that_hangs() -> None:
    machine = OverBusyStore()
    requests = [machine.add(num_blocks * BLOCK_SIZE, num_blocks, 2, "plain") for num_blocks in (3, 13)]
    assert len(machine.connector.in_flight) == NUM_THREADS
    hang(machine)
    assert [request.finish_reason for request in requests] == ["length", "length"]
    check_others_go_on(machine, "plain", "plain", "hold")


def test_hand_overs_above_their_share_go_on_beside_a_store_that_hangs() -> None:
    machine = OverBusyStore()
    for salt in range(2):
        request = machine.add(7 * BLOCK_SIZE, salt, 2, "hold")
        hang(machine)
        assert request.finish_reason == "hand_over"
    assert len(machine.connector.writes_in_flight) == len(machine.connector.reads_in_flight) == 1
    check_others_go_on(machine, "hold", "hold", "plain")


def waiting_stream(machine: Machine) -> Request:
    """A stream whose KV, more than half of the memory, is announced and does not come."""
    request = machine.add(13 * BLOCK_SIZE, 0, 2, "remote")
    machine.connector.announce(request, 13, whole=True)
    machine.core.scheduler.seed(request.request_id, [7])
    machine.steps(1)
    return request


def test_a_stream_of_more_than_half_of_the_memory_goes_on_beside_a_store_that_hangs() -> None:
    machine = OverBusyStore()
    request = waiting_stream(machine)
    hang(machine)
    assert request.finish_reason == "length"
    check_others_go_on(machine, "plain", "plain")


def test_a_stream_that_does_not_fit_beside_abandoned_reads_ends_in_time_and_stops_no_other() -> None:
    machine = OverStore()  # all of its reads have begun
    request = waiting_stream(machine)
    hang(machine, num_timeouts=1)
    assert machine.core.load.held_blocks == 13
    assert request.request_id in machine.core.requests
    behind = machine.add(BLOCK_SIZE // 2, 1, 2, "plain")
    machine.steps(3)
    assert behind.finish_reason == "length"
    machine.time_passes(RESERVATION_S)
    assert request.finish_reason == "error", "it can go on at another instance"
    machine.teardown()


def test_a_prompt_that_does_not_fit_beside_abandoned_reads_waits_for_them_and_stops_no_other() -> None:
    machine = OverBusyStore()
    request = machine.add((NUM_BLOCKS - 1) * BLOCK_SIZE, 0, 2, "remote")
    machine.connector.announce(request, NUM_BLOCKS - 1, whole=True)
    machine.steps(1)
    machine.core.abort(request.request_id)
    assert machine.core.load.held_blocks == NUM_THREADS, "what had not begun is cancelled"
    request = machine.add((NUM_BLOCKS - 1) * BLOCK_SIZE, 1, 2, "plain")
    behind = machine.add(BLOCK_SIZE // 2, 2, 2, "plain")
    machine.steps(3)
    assert (request.num_computed_tokens, behind.finish_reason) == (0, "length")
    while machine.connector.num_endable:
        machine.connector.end(0, "missing")
        machine.steps(1)
    machine.steps(NUM_BLOCKS)
    assert request.finish_reason == "length"
    machine.teardown()


def test_saves_that_hang_in_the_second_store_of_a_list_stop_no_hand_over() -> None:
    machine = OverList()
    nixl, store = machine.connector.nixl, machine.connector.store
    request = machine.add(7 * BLOCK_SIZE, 0, 2, "hold")
    assert len(store.in_flight) == 1, "it looks the prompt up"
    store.end(0, "missing")
    machine.steps(2)
    while nixl.num_endable:
        nixl.end(0, None)
    machine.steps(1)
    assert (request.finish_reason, len(store.reads_in_flight)) == ("hand_over", NUM_THREADS)
    machine.connector.handle(LeaseCommand(request.request_id, "attach", lease_s=10 * LOAD_TIMEOUT_S))
    hang(machine, num_timeouts=2)
    assert machine.core.load.held_blocks == 7, "its reader may still read them all"
    machine.connector.handle(LeaseCommand(request.request_id, "release"))
    machine.steps(1)
    check_others_go_on(machine, "hold", "hold", "plain")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", _MACHINES)
def test_block_classes_at_length(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=500, stateful_step_count=70))
