"""The invariant of every block, over the whole of an engine core but its model: scheduler, tables, pool, leases and a
connector, whatever is added, handed over, loaded, released, aborted, late or lost, in whatever order.

Each block is in exactly one class, by precedence: quarantined, held, running, cached, free. And none that I/O may still
write to is free, found by its content, or in another request's table; none that I/O or a peer may still read is free
or written to.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.block_pool import KVBlock
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_cache_manager import KVCacheManager
from engine.messages import (
    EngineLoad,
    EngineRequest,
    HoldKV,
    KVProgress,
    LeaseCommand,
    RemoteKV,
    Seed,
    TokensEvent,
    TransferEvent,
)
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_output import SchedulerOutput
from kv_transfer.secret import ensure_secret
from tests.kv_transfer.harness import BLOCK_SIZE, FINGERPRINT
from tests.kv_transfer.scripted_io import (
    LOAD_TIMEOUT_S,
    MAX_QUARANTINE_S,
    ScriptedIO,
    ScriptedNixlConnector,
    ScriptedStoreConnector,
    blocks_lent,
)

NUM_BLOCKS = 24
LEASE_S, RESERVATION_S = 3.0, 30.0
LENGTHS, SALTS, TOKENS = st.integers(1, 30), st.integers(0, 2), st.integers(1, 9)
FAILURES = st.sampled_from([None, None, None, None, "page_digest", "missing", "store_timeout"])


class Core(RuleBasedStateMachine):
    """A core without a model. A subclass says over which connector."""

    def make_connector(self, secret_file: str) -> ScriptedIO:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._folder = tempfile.TemporaryDirectory()
        self.secret_file = str(Path(self._folder.name) / "secret")
        ensure_secret(Path(self.secret_file))
        self.connector = self.make_connector(self.secret_file)
        config = EngineConfig(model="", max_num_seqs=5, max_num_batched_tokens=16, block_size=BLOCK_SIZE)
        max_model_len = NUM_BLOCKS * BLOCK_SIZE
        self.kv = KVCacheManager(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=5,
            enable_prefix_caching=True,
        )
        self.scheduler = Scheduler(config, self.kv, self.connector, max_model_len)
        self.requests: dict[str, Request] = {}
        self.transfers: set[str] = set()
        """Offered here, and not ended as far as anybody was told."""
        self.lent: dict[str, list[int]] = {}
        """Blocks that a peer may read, by transfer."""
        self.ids = itertools.count()

    # What EngineCore.step does

    def step(self) -> None:
        output = self.connector.poll()
        for event in output.events:
            assert isinstance(event, TransferEvent)
            self.heard(event)
        self.start_io()
        for result in output.loaded:
            self.scheduler.load_finished(result)
        for request_id in output.freed_request_ids:
            self.scheduler.free_held(request_id)
        self.scheduler.expire(self.now)
        scheduled = self.scheduler.schedule()
        self.start_io()
        self.check()
        self.compute(scheduled)
        tokens = {share.request.request_id: 5 for share in scheduled.scheduled if share.samples}
        self.scheduler.update_from_output(scheduled, tokens)
        self.start_io()
        for event in self.scheduler.take_events():
            if isinstance(event, TokensEvent) and event.finish_reason is not None:
                self.requests.pop(event.request_id, None)

    def start_io(self) -> None:
        meta = self.connector.build_connector_meta()
        self.connector.start_load_kv(meta)
        self.connector.save_kv(meta)

    def compute(self, scheduled: SchedulerOutput) -> None:
        """A step writes to the blocks of the tokens that it computes, and to no others'."""
        written: Counter[int] = Counter()
        for share in scheduled.scheduled:
            table = self.kv.block_ids(share.request.request_id)
            last = -(-(share.start + share.num_tokens) // BLOCK_SIZE)
            blocks = set(table[share.start // BLOCK_SIZE : last])
            written.update(blocks)
            assert not blocks & self.connector.reads_in_flight, "KV changes while it is saved"
            for transfer_id, lent in self.lent.items():
                assert transfer_id == share.request.request_id or not blocks & set(lent), "lent KV is overwritten"
        assert all(count == 1 for count in written.values()), "two requests write to one block"
        assert not written.keys() & self.connector.writes_in_flight, "a step and I/O write to one block"

    def heard(self, event: TransferEvent) -> None:
        if event.ended is not None:
            self.transfers.discard(event.transfer_id)
            self.lent.pop(event.transfer_id, None)
            return
        self.transfers.add(event.transfer_id)
        if event.connector_metadata:
            self.lent[event.transfer_id] = blocks_lent(event.connector_metadata)

    # What may happen

    def add(self, num_tokens: int, salt: int, max_tokens: int, kind: str) -> None:
        request_id = f"r{next(self.ids)}"
        spec = EngineRequest(
            request_id=request_id,
            prompt_token_ids=[salt + 10, *range(num_tokens - 1)],
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            hold_kv=HoldKV(transfer_id=request_id, lease_s=LEASE_S) if kind == "hold" else None,
            remote_kv=RemoteKV(transfer_id=request_id, reservation_s=RESERVATION_S) if kind == "remote" else None,
        )
        request = Request.from_spec(spec, arrival=int(request_id[1:]), fingerprint=FINGERPRINT.hex())
        self.requests[request_id] = request
        self.scheduler.add_request(request, self.now)
        self.step()

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
            self.step()

    def waiting_for_kv(self) -> list[str]:
        return sorted(name for name, request in self.requests.items() if request.spec.remote_kv is not None)

    @precondition(lambda self: self.waiting_for_kv())
    @rule(data=st.data(), whole=st.booleans())
    def announce(self, data: Any, whole: bool) -> None:
        request = self.requests[data.draw(st.sampled_from(self.waiting_for_kv()))]
        num_full = request.num_initial_tokens // BLOCK_SIZE
        num_ready = num_full if whole else data.draw(st.integers(0, num_full))
        self.connector.announce(request, num_ready, whole=whole)
        self.step()

    @precondition(lambda self: self.waiting_for_kv())
    @rule(data=st.data(), word=st.sampled_from(["failed", "other tokens", "seed", "seed"]))
    def word_comes(self, data: Any, word: str) -> None:
        request_id = data.draw(st.sampled_from(self.waiting_for_kv()))
        if word == "seed":
            seed = Seed(request_id, [7])
            self.scheduler.seed(seed.request_id, seed.token_ids)
        elif word == "failed":
            self.connector.handle(KVProgress(request_id, 0, failed="the holder is gone"))
        else:
            self.connector.handle(KVProgress(request_id, 0, num_tokens=1000))
        self.step()

    @precondition(lambda self: self.waiting_for_kv())
    @rule(data=st.data())
    def all_goes_well(self, data: Any) -> None:
        """For one that waits for KV, and whatever else is in flight."""
        request = self.requests[data.draw(st.sampled_from(self.waiting_for_kv()))]
        self.connector.announce(request, request.num_initial_tokens // BLOCK_SIZE, whole=True)
        self.step()
        while self.connector.num_endable:
            self.connector.end(0, None)
        self.scheduler.seed(request.request_id, [7])
        self.step()

    @rule(data=st.data(), action=st.sampled_from(["attach", "renew", "release"]))
    def reader_says(self, data: Any, action: Any) -> None:
        """Also of transfers that are not offered yet, have ended, or never were."""
        known = sorted({f"r{number}" for number in range(10)} | self.transfers)
        self.connector.handle(LeaseCommand(data.draw(st.sampled_from(known)), action, lease_s=LEASE_S))
        self.step()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def releases(self, data: Any) -> None:
        self.connector.handle(LeaseCommand(data.draw(st.sampled_from(sorted(self.transfers))), "release"))
        self.step()

    @precondition(lambda self: self.connector.num_endable)
    @rule(data=st.data(), failures=st.lists(FAILURES, min_size=1, max_size=8))
    def io_ends(self, data: Any, failures: list[str | None]) -> None:
        for failure in failures:
            if self.connector.num_endable:
                self.connector.end(data.draw(st.integers(0, self.connector.num_endable - 1)), failure)
        self.step()

    @precondition(lambda self: self.connector.rebuild_asked)
    @rule()
    def rebuilt(self) -> None:
        self.connector.rebuild()
        self.step()
        assert not self.connector.quarantined

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[request_id]
        self.scheduler.abort(request_id)
        self.check_owners()  # what is held becomes quarantined with the next poll, which is the step's first act
        self.step()

    @rule(seconds=st.sampled_from([0.5, LEASE_S, LOAD_TIMEOUT_S, MAX_QUARANTINE_S, RESERVATION_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    # What always holds

    @property
    def load(self) -> EngineLoad:
        """The product's own account."""
        stand_in = SimpleNamespace(
            scheduler=self.scheduler,
            _connector=self.connector,
            _pace=SimpleNamespace(predicted_s=0.0),
            _num_steps=0,
            _num_expired_leases=0,
        )
        account: EngineLoad = EngineCore.load.fget(stand_in)  # type: ignore[attr-defined]
        return account

    @invariant()
    def check(self) -> None:
        self.check_owners()
        self.check_account()

    def held(self) -> set[int]:
        return {block.block_id for some in self.scheduler.held.values() for block in some}

    def check_account(self) -> None:
        """Each block is in one class, and the account tells how many are in each."""
        blocks, held, quarantined = self.kv.pool.blocks, self.held(), self.connector.quarantined
        assert quarantined <= held

        def class_of(block: KVBlock) -> str:
            if block.block_id in held:
                return "quarantined" if block.block_id in quarantined else "held"
            if block.ref_count:
                return "running"
            return "free" if block.block_hash is None else "cached"

        load = self.load
        account = {
            "quarantined": load.quarantined_blocks,
            "held": load.held_blocks,
            "running": load.running_blocks,
            "cached": load.cached_blocks,
            "free": load.free_blocks,
        }
        assert sum(account.values()) == NUM_BLOCKS
        assert Counter(account) == Counter(map(class_of, blocks))

    def check_owners(self) -> None:
        blocks, free_list = self.kv.pool.blocks, self.free_list()
        tables = {name: self.kv.block_ids(name) for name in self.scheduler.requests}
        held = [[block.block_id for block in some] for some in self.scheduler.held.values()]
        # STEP references are those of tables and of what is held, and what has none is in the free list, once
        references = Counter(itertools.chain(*tables.values(), *held))
        assert all(block.ref_count == references[block.block_id] for block in blocks)
        assert sorted(free_list) == [block.block_id for block in blocks if block.ref_count == 0]
        # STEP what I/O may write to has one owner, who does not run on it and does not show it to others
        writes, reads = self.connector.writes_in_flight, self.connector.reads_in_flight
        for block_id in writes:
            assert references[block_id] == 1, f"block {block_id} is written to by I/O and is free or shared"
            assert blocks[block_id].block_hash is None, "it can be found before it is verified"
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            assert not writes & set(tables[request.request_id]), f"{request.request_id} runs on what I/O writes to"
        # STEP what I/O or a peer may read is kept
        lent = {block_id for some in self.lent.values() for block_id in some}
        assert not (reads | lent) & set(free_list)
        assert not (reads | lent) & writes

    def free_list(self) -> list[int]:
        """By walking it."""
        found, block = [], self.kv.pool._free._head.next
        while block is not None and block is not self.kv.pool._free._tail:
            found.append(block.block_id)
            block = block.next
        return found

    def teardown(self) -> None:
        """Everything ends, and nothing is left."""
        for request_id in list(self.requests):
            self.scheduler.abort(request_id)
        self.step()
        for transfer_id in sorted(self.transfers):
            self.connector.handle(LeaseCommand(transfer_id, "release"))
        while self.connector.num_endable:
            self.connector.end(0, "store_timeout")
        if self.connector.rebuild_asked:
            self.connector.rebuild()
        self.step()
        self.step()
        self.check()
        assert self.connector.num_transfers == 0
        assert not self.scheduler.held
        assert self.kv.pool.num_available == NUM_BLOCKS
        assert not self.lent
        self.connector.shutdown()
        self._folder.cleanup()


class OverStore(Core):
    def make_connector(self, secret_file: str) -> ScriptedIO:
        return ScriptedStoreConnector(NUM_BLOCKS, lambda: self.now, secret_file)


class OverNixl(Core):
    def make_connector(self, secret_file: str) -> ScriptedIO:
        return ScriptedNixlConnector(NUM_BLOCKS, lambda: self.now, secret_file)

_SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestOverStore, TestOverNixl = OverStore.TestCase, OverNixl.TestCase
TestOverStore.settings = TestOverNixl.settings = _SETTINGS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", [OverStore, OverNixl])
def test_block_classes_at_length(machine: type[Core]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=600, stateful_step_count=70, deadline=None))
