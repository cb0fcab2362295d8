"""The reader's side: pages come out of the store into the blocks that were reserved for a request.

    transfer  reserve ─▶ reserved ──progress──▶ loading ──all read and verified──▶ verified ─▶ KVLoadResult, once
    lookup    reserve ─▶ probing ──found──▶ loading       │ └─ a page is bad or missing, or the holder has failed
                            └─missing───────────────────▶ failed ─▶ KVLoadResult, once
    finished (abort) ─▶ aborted ───────────────────────────────── no read in flight ─▶ freed
    give_up, reads in flight ─▶ KVLoadResult(retained_id) ──────────────────┘

A transfer (remote_kv) waits for its holder's word on every page. A lookup has no holder: before a prompt is computed,
its full blocks are sought in the store, the first alone, since most often there is none. What precedes the first bad
page is used, the rest is computed by the engine. A result waits until no read is in flight, because the engine then
writes to the same blocks. An operation carries its `Load`, so what ends late never counts for another request, not
even one of the same name. Waiting for the holder's word ends with the attach stream (its silence is a failure) or with
the request's reservation, which the scheduler watches; waiting for the store ends with `load_timeout_s` after the last
word. A read that may never end is given up: its blocks stay with the connector, and the engine computes into others.

Pure: no I/O, no clock; used in the step loop alone. `Load.skip_from` is also read by I/O threads, which at worst see
it late.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv_connector import KVBlockOp, KVLoadResult
from engine.messages import KVProgress
from engine.request import Request
from kv_transfer.page_naming import PageName, PageNaming


@dataclass(slots=True, eq=False)
class Load:
    """One request whose KV is to come from elsewhere. `pages` and `block_ids` run parallel, the tail last."""

    request_id: str
    transfer_id: str
    num_tokens: int
    block_size: int
    num_full_blocks: int
    num_local_blocks: int
    pages: list[PageName]
    block_ids: tuple[int, ...]
    is_lookup: bool
    """Nobody has announced these pages, and that one is missing is no failure."""
    num_started: int
    """Pages before this index are local, or their reads were queued."""
    num_in_flight: int = 0
    """Reads that were queued and have not ended."""
    verified: set[int] = field(default_factory=set)
    complete: bool = False
    failure: str | None = None
    deadline: float = math.inf
    skip_from: int = sys.maxsize
    """Pages from this index on are not worth reading any more."""
    inspected: bool = False
    """A page was wrong, and its successors were looked at."""
    holds_blocks: bool = False
    """Aborted or given up, and its blocks wait for the reads in flight."""
    retained_id: str | None = None
    """Given up: what `take_freed` will name."""

    @property
    def is_over(self) -> bool:
        """There is nothing left to wait for."""
        all_read = self.complete and self.num_started == len(self.pages)
        return self.num_in_flight == 0 and (all_read or self.failure is not None)

    def result(self) -> KVLoadResult:
        """What was verified without a gap."""
        num_pages = self.num_local_blocks
        while num_pages in self.verified:
            num_pages += 1
        whole = num_pages == len(self.pages)
        num_verified_tokens = self.num_tokens if whole else num_pages * self.block_size
        return KVLoadResult(
            request_id=self.request_id,
            num_verified_tokens=num_verified_tokens,
            num_external_tokens=num_verified_tokens - self.num_local_blocks * self.block_size,
            num_recomputed_blocks=0 if self.is_lookup else len(self.pages) - num_pages,
            reason=None if whole else self.failure,
            retained_id=self.retained_id,
        )


@dataclass(frozen=True, slots=True)
class LoadOp(KVBlockOp):
    """One page to be read."""

    name: PageName
    owner: Load

    @property
    def is_cancelled(self) -> bool:
        """Not to be begun any more."""
        return self.block_index >= self.owner.skip_from


class Loader:
    """Owns the requests of this core that wait for KV from elsewhere."""

    def __init__(
        self, naming: PageNaming, *, load_timeout_s: float, looks_up: bool = False, follows: bool = True
    ) -> None:
        """`looks_up`: seek the prompts that nobody hands over. `follows` False: transfers are sought like those, for
        another connector has their holders' word."""
        self._naming = naming
        self._load_timeout_s = load_timeout_s
        self._looks_up = looks_up
        self._follows = follows
        self._loads: dict[str, Load] = {}
        self._ops: list[LoadOp] = []
        self._results: list[KVLoadResult] = []
        self._freed: list[str] = []
        self._num_given_up = 0

    # The scheduler's word

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Prompt tokens past `num_computed_tokens` that are to come, or are sought, elsewhere."""
        if request.loaded:
            return 0
        if self._is_lookup(request):
            num_tokens = self._num_sought_pages(request) * self._naming.block_size if self._looks_up else 0
        else:
            num_tokens = request.num_initial_tokens
        return max(0, num_tokens - num_computed_tokens)

    def reserve(self, request: Request, block_ids: Sequence[int], num_local_blocks: int, now: float) -> None:
        """The request has blocks for all that is to come; the first `num_local_blocks` are filled."""
        naming, is_lookup = self._naming, self._is_lookup(request)
        num_full = self._num_sought_pages(request) if is_lookup else naming.num_full_blocks(request)
        hashes = naming.block_hashes(request)
        pages = [naming.full_block(hashes, request.root_hash, index) for index in range(num_full)]
        num_tokens = num_full * naming.block_size
        transfer_id = "" if request.spec.remote_kv is None else request.spec.remote_kv.transfer_id
        if not is_lookup:
            num_tokens = request.num_initial_tokens
            if naming.num_tail_tokens(request):
                pages.append(naming.tail(request, hashes, transfer_id))
        load = self._loads[request.request_id] = Load(
            request_id=request.request_id,
            transfer_id=transfer_id,
            num_tokens=num_tokens,
            block_size=naming.block_size,
            num_full_blocks=num_full,
            num_local_blocks=num_local_blocks,
            pages=pages,
            block_ids=tuple(block_ids[: len(pages)]),
            is_lookup=is_lookup,
            num_started=num_local_blocks,
            complete=is_lookup,
        )
        if is_lookup:
            load.deadline = now + self._load_timeout_s
            self._queue_until(load, num_local_blocks + 1)

    def finished(self, request: Request) -> bool:
        """The request has ended. True: its blocks are in use until `take_freed` names it."""
        load = self._loads.pop(request.request_id, None)
        if load is None:
            return False
        self._drop_queued(load)
        load.skip_from = 0
        load.holds_blocks = load.num_in_flight > 0
        return load.holds_blocks

    # The holder's word

    def progress(self, command: KVProgress, now: float) -> None:
        """More can be read, or nothing more will come. Unknown and finished requests are ignored."""
        load = self._loads.get(command.request_id)
        if load is None or load.failure is not None or load.complete:
            return
        num_ready = min(command.num_ready_blocks, load.num_full_blocks)
        if command.num_tokens == load.num_tokens:
            load.complete = True
            num_ready = len(load.pages)
        elif command.num_tokens is not None:
            load.failure = f"{command.num_tokens} tokens were offered, {load.num_tokens} are needed"
            num_ready = 0
        elif command.failed is not None:
            load.failure = command.failed
        load.deadline = now + self._load_timeout_s
        self._queue_until(load, num_ready)
        self._settle(load)

    # The I/O's word

    def op_ended(self, op: LoadOp, failure: str | None) -> None:
        """A read has ended; `failure` says why its page does not count."""
        load = op.owner
        load.num_in_flight -= 1
        if failure is None:
            load.verified.add(op.block_index)
            if load.is_lookup and load.failure is None:
                self._queue_until(load, len(load.pages))
        else:
            self._fail(load, failure, op.block_index)
        if load.holds_blocks and load.num_in_flight == 0:
            load.holds_blocks = False
            self._freed.append(load.retained_id or load.request_id)
        self._settle(load)

    def expire(self, now: float) -> int:
        """Give up pages that the store has not delivered in time; returns for how many requests."""
        late = [load for load in self._loads.values() if load.num_in_flight and load.deadline <= now]
        for load in late:
            self.give_up(load, f"the store did not deliver within {self._load_timeout_s:g} s")
        return len(late)

    def give_up(self, load: Load, failure: str) -> None:
        """Wait no longer for reads of this load that have begun."""
        if self._loads.get(load.request_id) is not load:
            return  # aborted, or over
        self._fail(load, failure, 0)
        if not load.num_in_flight:
            self._settle(load)
            return
        del self._loads[load.request_id]
        self._num_given_up += 1
        load.retained_id = f"{load.request_id}/given-up/{self._num_given_up}"
        load.holds_blocks = True
        self._results.append(load.result())

    @property
    def next_deadline(self) -> float | None:
        """When `expire` may have something to do; None: never."""
        deadlines = [load.deadline for load in self._loads.values() if load.num_in_flight]
        return min(deadlines) if deadlines else None

    # Decisions for the connector to apply

    def take_ops(self) -> list[LoadOp]:
        """Reads to start now."""
        ops, self._ops = self._ops, []
        return ops

    def take_results(self) -> list[KVLoadResult]:
        """Requests whose KV is as complete as it will be."""
        results, self._results = self._results, []
        return results

    def take_freed(self) -> list[str]:
        """Aborted requests, and what given-up loads retained, once their last read has ended."""
        freed, self._freed = self._freed, []
        return freed

    def end_all(self) -> None:
        """This core ends: begin no more reads."""
        for load in self._loads.values():
            load.skip_from = 0

    # Inside

    def _is_lookup(self, request: Request) -> bool:
        return request.spec.remote_kv is None or not self._follows

    def _num_sought_pages(self, request: Request) -> int:
        """Full blocks worth seeking. Of a prompt that is computed here, one token must be left to compute."""
        num_tokens = request.num_initial_tokens - (request.spec.remote_kv is None)
        return num_tokens // self._naming.block_size

    def _queue_until(self, load: Load, end: int) -> None:
        for index in range(load.num_started, end):
            self._queue(load, index)
        load.num_started = max(load.num_started, end)

    def _queue(self, load: Load, index: int) -> None:
        load.num_in_flight += 1
        name = load.pages[index]
        self._ops.append(
            LoadOp(
                request_id=load.request_id,
                transfer_id=load.transfer_id,
                block_index=index,
                block_id=load.block_ids[index],
                num_tokens=name.spec.num_tokens,
                block_hash=None if name.spec.is_tail else name.spec.block_hash,
                parent_hash=name.spec.parent_hash,
                name=name,
                owner=load,
            )
        )

    def _fail(self, load: Load, failure: str, index: int) -> None:
        """Pages after a bad one are of no use: those not yet begun are skipped."""
        load.failure = load.failure or failure
        load.skip_from = min(load.skip_from, index)
        self._drop_queued(load)

    def _drop_queued(self, load: Load) -> None:
        kept = [op for op in self._ops if op.owner is not load]
        load.num_in_flight -= len(self._ops) - len(kept)
        self._ops = kept

    def _settle(self, load: Load) -> None:
        if load.is_over and self._loads.get(load.request_id) is load:
            del self._loads[load.request_id]
            self._results.append(load.result())
