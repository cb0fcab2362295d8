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
    ScriptedNixlConnector,
    ScriptedStoreConnector,
)

LEASE_S, RESERVATION_S = 3.0, 30.0
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

    def add(self, num_tokens: int, salt: int, max_tokens: int, kind: str) -> None:
        number = next(self.ids)
        request_id = f"r{number}"
        spec = EngineRequest(
            request_id=request_id,
            prompt_token_ids=[salt + 10, *range(num_tokens - 1)],
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            hold_kv=HoldKV(transfer_id=request_id, lease_s=LEASE_S) if kind == "hold" else None,
            remote_kv=RemoteKV(transfer_id=request_id, reservation_s=RESERVATION_S) if kind == "remote" else None,
        )
        self.core.add(Request.from_spec(spec, arrival=number, fingerprint=FINGERPRINT.hex()))

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


_SETTINGS = settings(max_examples=50, stateful_step_count=50)
TestOverStore, TestOverNixl = OverStore.TestCase, OverNixl.TestCase
TestOverStore.settings = TestOverNixl.settings = _SETTINGS


@pytest.mark.parametrize("machine", [OverStore, OverNixl])
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", [OverStore, OverNixl])
def test_block_classes_at_length(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=500, stateful_step_count=70))
