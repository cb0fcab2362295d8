"""The decode side: pages are read into the blocks that were reserved for a request.

    transfer  reserve ─▶ reserved ──progress──▶ loading ──all read and verified──▶ verified ─▶ KVLoadResult, once
    lookup    reserve ─▶ probing ──found──▶ loading       │ └─ a page is bad or missing, or the producer has failed
                            └─missing───────────────────▶ failed ─▶ KVLoadResult, once
    request_finished (abort) ─▶ aborted ───────────────────────── no read in flight ─▶ freed
    give_up, reads in flight ─▶ KVLoadResult(retained_id) ──────────────────┘

A transfer (remote_kv) reads a page once its producer has announced it. A lookup has no producer: before a prompt is
computed, its full blocks are looked up in the store, the first one alone, since most often there is none. Pages before
the first bad one are used, the engine computes the rest. A result waits until no read is in flight, because the engine
then writes to the same blocks. An operation carries its `Load`, so one that ends late never counts for another request,
even one with the same id. Waiting for an announcement ends with the attach stream (its silence is a failure) or with
the request's reservation, which the scheduler watches; waiting for the store ends `load_timeout_s` after the last
announcement, that of a lookup after `reserve`, or at `Load.latest` if that is earlier. Each read that ends well puts
this off, up to `Load.latest`: until then a long load may take as long as its reads go on, and past it the rest is
computed, while there is time for it. Pages that are asked for shortly before `Load.latest` or after it may take half of
what is left of the request's time, so past `Load.latest`. A read that may never end is given up: its blocks stay with
the connector, and the engine computes into others. The store counts as hanging once it has kept a load silent for
`load_timeout_s`, whether its request still waits for it, was computed meanwhile, or was aborted, and has answered no
read meanwhile.

Pure: no I/O, no clock; used in the step loop alone. I/O threads read `Load.skip_from` too; at worst they see it late.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.messages import KVProgress
from engine.kv_connector import KVConnectorOutput, KVLoadResult
from engine.scheduling.request import Request
from kv_transfer.page.format import PageName, PageNames, PageNaming, PageOp

MISSING = "missing"
"""Failure of a read whose page the store does not have."""
DAMAGED = "page_"
"""Prefix of the failures of pages that failed a check."""
_MAX_LOOKUP_TIMEOUTS = 3
"""Time-outs that a lookup may take while its reads go on: its prompt could be computed instead. One where a reservation
began before: that of the decode instance, or its own at another connector."""
_MAX_PART = 0.9
"""Part of the time after which a request fails that its load may take, unless its pages are asked for late. What is
left of it is for the computation of the rest to begin."""


@dataclass(slots=True, eq=False)
class Load:
    """One request whose KV is loaded. `pages` and `block_ids` run parallel, the tail last."""

    request_id: str
    transfer_id: str
    num_tokens: int
    block_size: int
    num_full_blocks: int
    num_local_blocks: int
    pages: Sequence[PageName]
    block_ids: tuple[int, ...]
    is_lookup: bool
    """No producer announces these pages, and a missing one is no failure."""
    num_started: int
    """Pages before this index are local, or their reads were queued."""
    num_in_flight: int = 0
    """Reads that were queued and have not ended."""
    verified: set[int] = field(default_factory=set)
    complete: bool = False
    failure: str | None = None
    timeout_s: float = math.inf
    latest: float = math.inf
    """Until when reads that end well put the deadline off: what is left is for the rest of its prompt. Pages that are
    asked for late have longer (`read_deadline`)."""
    ends_at: float = math.inf
    """When the request fails if it is waited for until then."""
    asked_at: float = math.inf
    """When pages were last announced, or looked up."""
    moved_at: float = -math.inf
    """When a read has last ended well."""
    skip_from: int = sys.maxsize
    """Reads of pages from this index on are cancelled."""
    inspected: bool = False
    """A page was damaged, and its successors were checked."""
    holds_blocks: bool = False
    """Aborted or given up, and its blocks are in use until the reads in flight have ended."""
    retained_id: str | None = None
    """Given up: what `take_output` will name as freed."""
    is_judged: bool = False
    """Its silence has been counted against the store, or excused."""

    @property
    def held_id(self) -> str:
        """The id under which its blocks are held, if they are."""
        return self.retained_id or self.request_id

    @property
    def has_cancelled(self) -> bool:
        """Some of its reads are not to be begun any more."""
        return self.skip_from < len(self.pages)

    def read_deadline(self, asked_at: float) -> float:
        """When a read that begins at `asked_at` is late: at `latest`, or after half of what is left if that is more."""
        return min(asked_at + self.timeout_s, max(self.latest, (asked_at + self.ends_at) / 2))

    @property
    def moves_until(self) -> float:
        """Until when the last read that ended well has put the deadline off."""
        return min(self.moved_at + self.timeout_s, self.latest)

    @property
    def late_at(self) -> float:
        """When it is given up if no further read ends."""
        return max(self.read_deadline(self.asked_at), self.moves_until)

    @property
    def silent_since(self) -> float:
        """Since when the store has ended nothing of it."""
        return max(self.asked_at, self.moved_at)

    @property
    def silent_at(self) -> float:
        """When that has lasted for `timeout_s`, if no further read ends."""
        return self.silent_since + self.timeout_s

    def lateness(self, silence: str) -> str:
        """Why it was given up; `silence`: where none of its reads has ended well."""
        if self.verified:
            return f"only {len(self.verified)} of {len(self.pages) - self.num_local_blocks} pages came in time"
        if self.late_at < self.silent_at:
            return f"{silence} in time for the rest to be computed"
        return f"{silence} within {self.timeout_s:g} s"

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
class LoadOp(PageOp):
    owner: Load

    @property
    def name(self) -> PageName:
        return self.owner.pages[self.block_index]

    @property
    def is_cancelled(self) -> bool:
        """Not to be begun any more."""
        return self.block_index >= self.owner.skip_from


class Loader:
    """Owns the requests of this core that wait for KV from elsewhere."""

    def __init__(
        self, naming: PageNaming, *, load_timeout_s: float, lookup: bool = False, prefix_only: bool = False
    ) -> None:
        """`lookup`: look up prompts that are not handed over. `prefix_only`: look up transfers too, because another
        connector receives their announcements."""
        self._naming = naming
        self._load_timeout_s = load_timeout_s
        self._lookup = lookup
        self._prefix_only = prefix_only
        self._loads: dict[str, Load] = {}
        self._ops: list[LoadOp] = []
        self._output = KVConnectorOutput()
        self._abandoned: set[Load] = set()
        """Given up or aborted, with reads in flight."""
        self._num_given_up = 0
        self._answered_at = -math.inf
        """When the store has last answered a read, also without the page or with a damaged one."""

    # Called by the scheduler side

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Prompt tokens past `num_computed_tokens` that will be loaded or looked up."""
        if request.loaded:
            return 0
        if self._is_lookup(request):
            num_tokens = self._num_lookup_pages(request) * self._naming.block_size if self._lookup else 0
        else:
            num_tokens = request.num_initial_tokens
        return max(0, num_tokens - num_computed_tokens)

    def reserve(self, request: Request, block_ids: Sequence[int], num_local_blocks: int, now: float) -> None:
        """The request has blocks for its whole prompt; the first `num_local_blocks` are filled."""
        naming, is_lookup = self._naming, self._is_lookup(request)
        num_full = self._num_lookup_pages(request) if is_lookup else naming.num_full_blocks(request)
        hashes = naming.block_hashes(request)
        num_tokens, tail = num_full * naming.block_size, None
        transfer_id = "" if request.spec.remote_kv is None else request.spec.remote_kv.transfer_id
        if not is_lookup:
            num_tokens = request.num_initial_tokens
            if naming.num_tail_tokens(request):
                tail = naming.tail(request, hashes, transfer_id)
        pages = PageNames(naming, hashes, request.root_hash, num_full, tail)
        latest, ends_at = self._limits(request, now)
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
            timeout_s=self._load_timeout_s,
            latest=latest,
            ends_at=ends_at,
        )
        if is_lookup:
            load.asked_at = now
            self._queue_until(load, num_local_blocks + 1)

    def request_finished(self, request: Request) -> bool:
        """The request has ended. True: its blocks are in use until `take_output` names it."""
        load = self._loads.pop(request.request_id, None)
        if load is None:
            return False
        self._drop_queued(load)
        load.skip_from = 0
        if load.num_in_flight:
            self._abandon(load)
        return load.holds_blocks

    def handle_progress(self, command: KVProgress, now: float) -> None:
        """More pages can be read, or no more will come. Unknown and finished requests are ignored."""
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
        load.asked_at = now
        self._queue_until(load, num_ready)
        self._settle(load)

    # Called by the worker side

    def op_ended(self, op: LoadOp, failure: str | None, now: float) -> None:
        """A read has ended; `failure` says why its page is not valid."""
        load = op.owner
        load.num_in_flight -= 1
        if failure is None or failure == MISSING or failure.startswith(DAMAGED):
            self._answered_at = now
        if failure is None:
            load.verified.add(op.block_index)
            load.moved_at = now
            if load.is_lookup and load.failure is None and not load.holds_blocks:
                self._queue_until(load, len(load.pages))
        else:
            self._fail(load, failure, op.block_index)
        if load.holds_blocks and load.num_in_flight == 0:
            load.holds_blocks = False
            self._abandoned.discard(load)
            self._output.freed_request_ids.append(load.held_id)
        self._settle(load)

    def expire(self, now: float) -> int:
        """Give up reads that have not ended in time; returns for how many requests the store counts as hanging: it has
        kept one silent for the time-out, and has answered no read of others meanwhile."""
        for load in [load for load in self._loads.values() if load.num_in_flight and load.late_at <= now]:
            self.give_up(load, load.lateness("the store did not deliver"))
        # One thread may be stuck in a store that works: what waits since before the last answer is no sign of a hang.
        hangs = any(load.silent_at <= now and self._answered_at <= load.silent_since for load in self._abandoned)
        # Once it hangs, every further request that had to leave it counts at once: its reads only queue behind others.
        judged = [load for load in self._abandoned if not load.is_judged and (hangs or load.silent_at <= now)]
        for load in judged:
            load.is_judged = True
        return len(judged) if hangs else 0

    def give_up(self, load: Load, failure: str) -> None:
        """Stop waiting for reads of this load that have begun."""
        if self._loads.get(load.request_id) is not load:
            return  # aborted, or over
        self._fail(load, failure, 0)
        if not load.num_in_flight:
            self._settle(load)
            return
        del self._loads[load.request_id]
        self._num_given_up += 1
        load.retained_id = f"{load.request_id}/given-up/{self._num_given_up}"
        self._abandon(load)
        self._output.loaded.append(load.result())

    @property
    def next_deadline(self) -> float | None:
        """When `expire` may have something to do; None: never."""
        late_at = [load.late_at for load in self._loads.values() if load.num_in_flight]
        silent_at = [load.silent_at for load in self._abandoned if not load.is_judged]
        return min([*late_at, *silent_at], default=None)

    # Decisions for the connector to apply

    def take_ops(self) -> list[LoadOp]:
        ops, self._ops = self._ops, []
        return ops

    def take_output(self) -> KVConnectorOutput:
        """Requests whose KV is as complete as it will be; as freed, aborted requests, and what given-up loads retained,
        once their last read has ended."""
        output, self._output = self._output, KVConnectorOutput()
        return output

    def cancel_all(self) -> None:
        """The core shuts down: begin no more reads."""
        for load in self._loads.values():
            load.skip_from = 0

    # Inside

    def _is_lookup(self, request: Request) -> bool:
        return request.spec.remote_kv is None or self._prefix_only

    def _limits(self, request: Request, now: float) -> tuple[float, float]:
        """Until when a load may take, and when its request fails: at the end of its reservation, or of the time within
        which it must begin."""
        spec, total_s, ends_at = request.spec, 0.0, math.inf
        if spec.remote_kv is not None:
            total_s = spec.remote_kv.reservation_s
            ends_at = now + total_s if request.deadline is None else request.deadline
        elif spec.begin_s is not None and request.is_untouched:
            total_s = spec.begin_s
            ends_at = request.arrived_s + total_s
        latest = ends_at - (1 - _MAX_PART) * total_s
        if self._is_lookup(request):
            has_reservation = request.is_handed_over or spec.remote_kv is not None  # it began before the lookup
            latest = min(latest, now + (1 if has_reservation else _MAX_LOOKUP_TIMEOUTS) * self._load_timeout_s)
        return latest, ends_at

    def _num_lookup_pages(self, request: Request) -> int:
        """Full blocks to look up. Of a prompt that is computed here, one token must be left to compute."""
        num_tokens = request.num_initial_tokens - (request.spec.remote_kv is None)
        return num_tokens // self._naming.block_size

    def _queue_until(self, load: Load, end: int) -> None:
        for index in range(load.num_started, end):
            load.num_in_flight += 1
            self._ops.append(LoadOp(index, load.block_ids[index], load))
        load.num_started = max(load.num_started, end)

    def _fail(self, load: Load, failure: str, index: int) -> None:
        """Pages after a bad one cannot be used: reads of them that have not begun are skipped."""
        load.failure = load.failure or failure
        load.skip_from = min(load.skip_from, index)
        self._drop_queued(load)

    def _abandon(self, load: Load) -> None:
        """Its request waits no more for its reads in flight, which keep its blocks."""
        load.holds_blocks = True
        self._abandoned.add(load)

    def _drop_queued(self, load: Load) -> None:
        kept = [op for op in self._ops if op.owner is not load]
        load.num_in_flight -= len(self._ops) - len(kept)
        self._ops = kept

    def _settle(self, load: Load) -> None:
        if load.is_over and self._loads.get(load.request_id) is load:
            del self._loads[load.request_id]
            self._output.loaded.append(load.result())
