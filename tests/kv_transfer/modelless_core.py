"""An engine core but for its model and its clock, with the account of every block checked against what is really there.

What a step computes is nothing; where it would write is checked.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.core.messages import EngineLoad, TokensEvent, TransferEvent
from engine.scheduling.kv_cache_manager import KVBlock, KVCacheManager
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import Sampled, SchedulerOutput
from tests.kv_transfer.harness import BLOCK_SIZE
from tests.kv_transfer.scripted_io import ScriptedIO, blocks_lent

NUM_BLOCKS = 24
_MAX_NUM_SEQS = 5


class _StandIn:
    """What EngineCore.load looks at where it accounts for blocks; of whatever else it has, it gets nothing."""

    step_time = SimpleNamespace(predicted_s=0.0)

    def __init__(self, scheduler: Scheduler, connector: ScriptedIO) -> None:
        self.scheduler = scheduler
        self._connector = connector

    def __getattr__(self, name: str) -> Any:
        return ()


class ModellessCore:
    """Owns scheduler, tables and a connector with scripted I/O. `clock` is the connector's, too."""

    def __init__(self, connector: ScriptedIO, clock: Callable[[], float]) -> None:
        self.connector = connector
        self._clock = clock
        config = EngineConfig(model="", max_num_seqs=_MAX_NUM_SEQS, max_num_batched_tokens=16, block_size=BLOCK_SIZE)
        max_model_len = NUM_BLOCKS * BLOCK_SIZE
        self.kv = KVCacheManager(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=_MAX_NUM_SEQS,
            enable_prefix_caching=True,
        )
        self.scheduler = Scheduler(config, self.kv, connector, max_model_len)
        self.requests: dict[str, Request] = {}
        """Those that have not ended."""
        self.transfers: set[str] = set()
        """Offered, without an event that they have ended."""
        self.lent: dict[str, list[int]] = {}
        """Blocks that a peer may read, by transfer."""

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.scheduler.add_request(request, self._clock())
        self.step()

    def abort(self, request_id: str) -> None:
        del self.requests[request_id]
        self.scheduler.abort(request_id)
        self.check()
        self.step()

    # What EngineCore.step does

    def step(self) -> None:
        output = self.connector.poll()
        for event in output.events:
            assert isinstance(event, TransferEvent)
            self._heard(event)
        self.connector.start_io()
        for result in output.loaded:
            self.scheduler.load_finished(result)
        for held_id, block_ids in output.needed.items():
            self.scheduler.held.narrow(held_id, block_ids)
        for request_id in output.freed_request_ids:
            self.scheduler.held.free(request_id)
        self.scheduler.expire(self._clock())
        scheduled = self.scheduler.schedule()
        self.connector.start_io()
        self.check()
        self._compute(scheduled)
        tokens = {share.request.request_id: [5] for share in scheduled.scheduled if share.samples}
        self.scheduler.update_from_output(scheduled, Sampled(tokens))
        self.connector.start_io()
        for event in self.scheduler.take_events():
            if isinstance(event, TokensEvent) and event.finish_reason is not None:
                self.requests.pop(event.request_id, None)

    def _compute(self, scheduled: SchedulerOutput) -> None:
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

    def _heard(self, event: TransferEvent) -> None:
        if event.ended is not None:
            self.transfers.discard(event.transfer_id)
            self.lent.pop(event.transfer_id, None)
            return
        self.transfers.add(event.transfer_id)
        if event.connector_metadata:
            self.lent[event.transfer_id] = blocks_lent(event.connector_metadata)

    # What always holds

    @property
    def load(self) -> EngineLoad:
        """The product's own account."""
        stand_in = _StandIn(self.scheduler, self.connector)
        account: EngineLoad = EngineCore.load.fget(stand_in)  # type: ignore[attr-defined]
        return account

    def check(self) -> None:
        self.check_owners()
        self.check_account()

    def _held(self) -> set[int]:
        return {block.block_id for some in self.scheduler.held.values() for block in some}

    def check_account(self) -> None:
        """Each block is in one class, and the account tells how many are in each."""
        blocks, held, quarantined = self.kv.pool.blocks, self._held(), self.connector.pinned
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
        blocks, free_list = self.kv.pool.blocks, self._free_list()
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

    def _free_list(self) -> list[int]:
        return [block.block_id for block in self.kv.pool._free]
