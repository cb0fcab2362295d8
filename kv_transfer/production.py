"""The prefill side: a request's blocks become pages in the store while later chunks are still being computed.

    request_progressed ─▶ SaveOp per block ─▶ I/O thread ─▶ op_ended ─▶ TransferEvent(num_ready_blocks), no gaps
    request_finished("hand_over") ─▶ SaveOp of the tail ─▶ the last one ended ─▶ TransferEvent(num_tokens)
    any other end | a save failed | release | expiry ─▶ TransferEvent(ended); what is not begun is dropped

Blocks of a finished request stay with the connector until the last save that touches them has ended, then `freed`
names the request. The lease then guards only the tail's page, which is deleted when the lease ends. Full pages stay:
they are everybody's. Where readers read the blocks themselves there is no store and "saved" means "fit to be read":
nixl_production overrides what differs (`_offer_event`, `_progress_event`, `_is_in_use`, `_end`).

Pure: no I/O, no clock; used in the step loop alone. `Production.cancelled` is also read by I/O threads, which at
worst see it late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv_connector import KVBlockOp
from engine.messages import LeaseCommand, TransferEvent
from engine.request import Request
from kv_transfer.leases import EndedLease, LeaseTable
from kv_transfer.page_naming import PageName, PageNaming
from kv_transfer.store import PageKey


@dataclass(slots=True, eq=False)
class Production:
    """One transfer that this core produces, from the first block to the end of its lease and of its I/O."""

    request_id: str
    transfer_id: str
    num_pages: int
    """Full blocks, and the tail if there is one."""
    num_full_blocks: int
    num_tokens: int
    num_queued_blocks: int = 0
    num_in_flight: int = 0
    """Saves that were queued and have not ended."""
    num_ready_pages: int = 0
    saved: set[int] = field(default_factory=set)
    """Indices of pages that were saved before one that precedes them."""
    tail_key: PageKey | None = None
    cancelled: bool = False
    """The transfer has ended: nothing more is to be saved."""
    holds_blocks: bool = False
    """The request has finished and its blocks are still in use."""

    @property
    def is_complete(self) -> bool:
        """Every page is in the store."""
        return self.num_ready_pages == self.num_pages


@dataclass(frozen=True, slots=True)
class SaveOp(KVBlockOp):
    """One page to be written."""

    name: PageName
    owner: Production

    @property
    def is_cancelled(self) -> bool:
        """Not to be begun any more."""
        return self.owner.cancelled


class Producer:
    """Owns the transfers that this core produces, and their leases."""

    def __init__(self, naming: PageNaming, leases: LeaseTable) -> None:
        self._naming = naming
        self._leases = leases
        self._by_request: dict[str, Production] = {}  # unfinished requests
        self._by_transfer: dict[str, Production] = {}  # leases that have not ended
        self._ops: list[SaveOp] = []
        self._events: list[TransferEvent] = []
        self._freed: list[str] = []
        self._deletes: list[PageKey] = []
        self._num_expired = 0

    # The scheduler's word

    def progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int, now: float) -> None:
        """KV of the first `num_computed_tokens` tokens is there: save the blocks that have become full."""
        production = self._by_request.get(request.request_id) or self._begin(request, block_ids, now)
        if not production.cancelled:
            self._leases.progress(production.transfer_id, 0, now=now)
            self._save_full_blocks(production, request, block_ids, num_computed_tokens)

    def finished(self, request: Request, block_ids: Sequence[int], now: float) -> bool:
        """The request has ended. True: its blocks are in use until `take_freed` names it."""
        if request.spec.hold_kv is None:
            return False
        production = self._by_request.get(request.request_id) or self._begin(request, block_ids, now)
        del self._by_request[request.request_id]
        if production.cancelled:
            pass  # its transfer has ended, or was never its own
        elif request.finish_reason != "hand_over":
            self._leases.fail(production.transfer_id, f"the request ended: {request.finish_reason}", now=now)
        else:
            self._save_full_blocks(production, request, block_ids, request.num_initial_tokens)
            self._save_tail(production, request, block_ids)
            self._announce(production, now)
        self._apply_ended()
        production.holds_blocks = self._is_in_use(production)
        return production.holds_blocks

    def command(self, command: LeaseCommand, now: float) -> None:
        """A reader's word."""
        match command.action:
            case "attach":
                self._leases.attach(command.transfer_id, lease_s=command.lease_s, now=now)
            case "renew":
                self._leases.renew(command.transfer_id, lease_s=command.lease_s, now=now)
            case "release":
                self._leases.release(command.transfer_id, now=now)
        self._apply_ended()

    # The I/O's word

    def op_ended(self, op: SaveOp, failure: str | None, now: float) -> None:
        """A save has ended; `failure` says why it did not succeed."""
        production = op.owner
        production.num_in_flight -= 1
        if production.cancelled:
            self._delete_tail(production)
        elif failure is not None:
            self._leases.fail(production.transfer_id, failure, now=now)
            self._apply_ended()
        else:
            production.saved.add(op.block_index)
            self._announce(production, now)
        self._free_if_idle(production)

    def expire(self, now: float) -> None:
        """End leases that are past their deadline."""
        self._leases.expire(now)
        self._apply_ended()

    # Decisions for the connector to apply

    def take_ops(self) -> list[SaveOp]:
        """Saves to start now."""
        ops, self._ops = self._ops, []
        return ops

    def take_events(self) -> list[TransferEvent]:
        """What the front is to hear."""
        events, self._events = self._events, []
        return events

    def take_freed(self) -> list[str]:
        """Finished requests whose blocks are in use no more."""
        freed, self._freed = self._freed, []
        return freed

    def take_deletes(self) -> list[PageKey]:
        """Pages that nobody will read any more."""
        deletes, self._deletes = self._deletes, []
        return deletes

    @property
    def has_deletes(self) -> bool:
        return bool(self._deletes)

    def take_num_expired(self) -> int:
        """Leases that have expired since the last call."""
        num_expired, self._num_expired = self._num_expired, 0
        return num_expired

    def end_all(self, now: float) -> None:
        """This core ends, and every transfer with it."""
        for transfer_id in list(self._by_transfer):
            self._leases.fail(transfer_id, "the instance ends", now=now)
        self._apply_ended()

    # Inside

    def _begin(self, request: Request, block_ids: Sequence[int], now: float) -> Production:
        assert request.spec.hold_kv is not None
        hold, num_full = request.spec.hold_kv, self._naming.num_full_blocks(request)
        has_tail = self._naming.num_tail_tokens(request) > 0
        production = Production(
            request_id=request.request_id,
            transfer_id=hold.transfer_id,
            num_pages=num_full + has_tail,
            num_full_blocks=num_full,
            num_tokens=request.num_initial_tokens,
        )
        self._by_request[request.request_id] = production
        if self._leases.offer(hold.transfer_id, lease_s=hold.lease_s, now=now):
            self._by_transfer[hold.transfer_id] = production
            self._events.append(self._offer_event(production, block_ids))
        else:
            production.cancelled = True
            self._apply_ended()
        return production

    def _save_full_blocks(
        self, production: Production, request: Request, block_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        num_tokens = min(num_computed_tokens, request.num_initial_tokens)
        num_full = num_tokens // self._naming.block_size
        if num_full <= production.num_queued_blocks:
            return
        hashes = self._naming.block_hashes(request)
        for index in range(production.num_queued_blocks, num_full):
            name = self._naming.full_block(hashes, request.root_hash, index)
            self._queue(production, index, block_ids[index], name)
        production.num_queued_blocks = num_full

    def _save_tail(self, production: Production, request: Request, block_ids: Sequence[int]) -> None:
        if production.num_pages == production.num_full_blocks:
            return
        name = self._naming.tail(request, self._naming.block_hashes(request), production.transfer_id)
        production.tail_key = name.key
        self._queue(production, production.num_full_blocks, block_ids[production.num_full_blocks], name)

    def _queue(self, production: Production, index: int, block_id: int, name: PageName) -> None:
        production.num_in_flight += 1
        self._ops.append(
            SaveOp(
                request_id=production.request_id,
                transfer_id=production.transfer_id,
                block_index=index,
                block_id=block_id,
                num_tokens=name.spec.num_tokens,
                block_hash=None if name.spec.is_tail else name.spec.block_hash,
                parent_hash=name.spec.parent_hash,
                name=name,
                owner=production,
            )
        )

    def _announce(self, production: Production, now: float) -> None:
        """Tell how far the pages are saved without a gap, if that has changed; and the end, once the request has
        ended too.
        """
        before = production.num_ready_pages
        while production.num_ready_pages in production.saved:
            production.saved.remove(production.num_ready_pages)
            production.num_ready_pages += 1
        num_ready = min(production.num_ready_pages, production.num_full_blocks)
        transfer_id = production.transfer_id
        if production.is_complete and production.request_id not in self._by_request:
            self._leases.progress(transfer_id, num_ready, now=now)
            self._leases.complete(transfer_id, production.num_tokens, now=now)
            self._events.append(self._progress_event(production, before, num_ready, is_end=True))
        elif production.num_ready_pages > before:
            self._leases.progress(transfer_id, num_ready, now=now)
            self._events.append(self._progress_event(production, before, num_ready, is_end=False))

    def _offer_event(self, production: Production, block_ids: Sequence[int]) -> TransferEvent:
        """The first word of a transfer, whose pages are to be in these blocks."""
        del block_ids
        return TransferEvent(production.transfer_id, 0)

    def _progress_event(self, production: Production, first: int, num_ready: int, *, is_end: bool) -> TransferEvent:
        """Pages from index `first` on are new, the first `num_ready` full ones can be read; at the end, all can."""
        del first
        num_tokens = production.num_tokens if is_end else None
        return TransferEvent(production.transfer_id, num_ready, num_tokens=num_tokens)

    def _is_in_use(self, production: Production) -> bool:
        """Whether a finished request's blocks have to stay."""
        return production.num_in_flight > 0

    def _apply_ended(self) -> None:
        for ended in self._leases.take_ended():
            self._num_expired += ended.ended == "expired"
            self._events.append(
                TransferEvent(ended.transfer_id, ended.num_ready_blocks, ended=ended.ended, reason=ended.reason)
            )
            self._end(ended)

    def _end(self, ended: EndedLease) -> None:
        production = self._by_transfer.pop(ended.transfer_id, None)
        if production is None:
            return
        production.cancelled = True
        kept = [op for op in self._ops if op.owner is not production]
        production.num_in_flight -= len(self._ops) - len(kept)
        self._ops = kept
        self._delete_tail(production)
        self._free_if_idle(production)

    def _delete_tail(self, production: Production) -> None:
        """Remove the tail's page once no save can bring it back."""
        if production.tail_key is not None and production.num_in_flight == 0:
            self._deletes.append(production.tail_key)
            production.tail_key = None

    def _free_if_idle(self, production: Production) -> None:
        if production.holds_blocks and not self._is_in_use(production):
            production.holds_blocks = False
            self._freed.append(production.request_id)
