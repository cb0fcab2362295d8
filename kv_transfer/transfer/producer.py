"""The prefill side: a request's blocks become pages in the store while later chunks are still being computed.

    request_progressed ─▶ SaveOp per block ─▶ I/O thread ─▶ op_ended ─▶ TransferEvent(num_ready_blocks), no gaps
    request_finished("hand_over") ─▶ SaveOp of the tail ─▶ all saves ended ─▶ TransferEvent(num_tokens)
    any other end | a save failed or is late | release | expiry ─▶ TransferEvent(ended); queued saves are dropped

Blocks of a finished request stay with the connector until the last save that touches them has ended; `take_output` then
names the request. After that the lease guards only the tail's page, which is deleted when the lease ends. Full pages
stay in the store, where other requests find them. Where readers read the blocks themselves there is no store and
"saved" means "ready to be read": kv_transfer/nixl/transfers.py overrides what differs (`_offer_event`,
`_progress_event`, `_is_in_use`, `_end`).

Pure: no I/O, no clock; used in the step loop alone. I/O threads read `ProducedTransfer.cancelled` too; at worst they
see it late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.messages import LeaseCommand, TransferEvent
from engine.kv_connector import KVConnectorOutput
from engine.scheduling.request import Request
from kv_transfer.page.format import PageKey, PageName, PageNaming, PageOp
from kv_transfer.transfer.lease import LeaseTable


@dataclass(slots=True, eq=False)
class ProducedTransfer:
    """One request whose KV this core saves, from the first block to the end of its lease and of its I/O."""

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
    def held_id(self) -> str:
        """The id under which its blocks are held, if they are."""
        return self.request_id

    @property
    def has_cancelled(self) -> bool:
        """Saves of it that have not begun are not to be begun any more."""
        return self.cancelled

    @property
    def is_complete(self) -> bool:
        return self.num_ready_pages == self.num_pages


@dataclass(frozen=True, slots=True)
class SaveOp(PageOp):
    name: PageName
    owner: ProducedTransfer

    @property
    def is_cancelled(self) -> bool:
        """Not to be begun any more."""
        return self.owner.cancelled


class Producer:
    """Owns the transfers that this core produces, and their leases."""

    def __init__(self, naming: PageNaming, leases: LeaseTable) -> None:
        self._naming = naming
        self._leases = leases
        self._by_request: dict[str, ProducedTransfer] = {}  # unfinished requests
        self._by_transfer: dict[str, ProducedTransfer] = {}  # leases that have not ended
        self._ops: list[SaveOp] = []
        self._output = KVConnectorOutput()
        self.deletes: list[PageKey] = []
        """Pages that will not be read any more."""

    # Called by the scheduler side

    def request_progressed(
        self, request: Request, block_ids: Sequence[int], num_computed_tokens: int, now: float
    ) -> None:
        """KV of the first `num_computed_tokens` tokens is computed: save the blocks that have become full."""
        transfer = self._by_request.get(request.request_id) or self._begin(request, block_ids, now)
        if not transfer.cancelled:
            self._leases.progress(transfer.transfer_id, 0, now=now)
            self._save_full_blocks(transfer, request, block_ids, num_computed_tokens)

    def request_finished(self, request: Request, block_ids: Sequence[int], now: float) -> bool:
        """The request has ended. True: its blocks are in use until `take_output` names it."""
        if request.spec.hold_kv is None:
            return False
        transfer = self._by_request.get(request.request_id) or self._begin(request, block_ids, now)
        del self._by_request[request.request_id]
        if transfer.cancelled:
            pass  # the lease has ended, or belongs to another request
        elif request.finish_reason != "hand_over":
            self._leases.fail(transfer.transfer_id, f"the request ended: {request.finish_reason}", now=now)
        else:
            self._save_full_blocks(transfer, request, block_ids, request.num_initial_tokens)
            self._save_tail(transfer, request, block_ids)
            self._announce(transfer, now)
        self._apply_ended()
        transfer.holds_blocks = self._is_in_use(transfer)
        return transfer.holds_blocks

    def handle_command(self, command: LeaseCommand, now: float) -> None:
        match command.action:
            case "attach":
                self._leases.attach(command.transfer_id, lease_s=command.lease_s, now=now)
            case "renew":
                self._leases.renew(command.transfer_id, lease_s=command.lease_s, now=now)
            case "release":
                self._leases.release(command.transfer_id, now=now)
        self._apply_ended()

    # Called by the worker side

    def op_ended(self, op: SaveOp, failure: str | None, now: float) -> None:
        """A save has ended; `failure` says why it did not succeed."""
        transfer = op.owner
        transfer.num_in_flight -= 1
        if transfer.cancelled:
            self._delete_tail(transfer)
        elif failure is not None:
            self._leases.fail(transfer.transfer_id, failure, now=now)
            self._apply_ended()
        else:
            transfer.saved.add(op.block_index)
            self._announce(transfer, now)
        self._free_if_idle(transfer)

    def give_up(self, transfer: ProducedTransfer, failure: str, now: float) -> None:
        """Save nothing more of it: the store does not end what it has begun."""
        self._leases.fail(transfer.transfer_id, failure, now=now)
        self._apply_ended()

    def expire(self, now: float) -> None:
        self._leases.expire(now)
        self._apply_ended()

    # Decisions for the connector to apply

    def take_ops(self) -> list[SaveOp]:
        ops, self._ops = self._ops, []
        return ops

    def take_output(self) -> KVConnectorOutput:
        """Events for the transfer server, finished requests whose blocks are no longer in use, and how many leases have
        expired, all since the last call."""
        output, self._output = self._output, KVConnectorOutput()
        return output

    def take_deletes(self) -> list[PageKey]:
        deletes, self.deletes = self.deletes, []
        return deletes

    def cancel_all(self, now: float) -> None:
        """The core shuts down, which ends every lease."""
        for transfer_id in list(self._by_transfer):
            self._leases.fail(transfer_id, "the instance ends", now=now)
        self._apply_ended()

    # Inside

    def _begin(self, request: Request, block_ids: Sequence[int], now: float) -> ProducedTransfer:
        assert request.spec.hold_kv is not None
        hold, num_full = request.spec.hold_kv, self._naming.num_full_blocks(request)
        has_tail = self._naming.num_tail_tokens(request) > 0
        transfer = ProducedTransfer(
            request_id=request.request_id,
            transfer_id=hold.transfer_id,
            num_pages=num_full + has_tail,
            num_full_blocks=num_full,
            num_tokens=request.num_initial_tokens,
        )
        self._by_request[request.request_id] = transfer
        if self._leases.offer(hold.transfer_id, lease_s=hold.lease_s, now=now):
            self._by_transfer[hold.transfer_id] = transfer
            self._output.events.append(self._offer_event(transfer, block_ids))
        else:
            transfer.cancelled = True
            self._apply_ended()
        return transfer

    def _save_full_blocks(
        self, transfer: ProducedTransfer, request: Request, block_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        num_tokens = min(num_computed_tokens, request.num_initial_tokens)
        num_full = num_tokens // self._naming.block_size
        if num_full <= transfer.num_queued_blocks:
            return
        hashes = self._naming.block_hashes(request)
        for index in range(transfer.num_queued_blocks, num_full):
            name = self._naming.full_block(hashes, request.root_hash, index)
            self._queue(transfer, index, block_ids[index], name)
        transfer.num_queued_blocks = num_full

    def _save_tail(self, transfer: ProducedTransfer, request: Request, block_ids: Sequence[int]) -> None:
        if transfer.num_pages == transfer.num_full_blocks:
            return
        name = self._naming.tail(request, self._naming.block_hashes(request), transfer.transfer_id)
        transfer.tail_key = name.key
        self._queue(transfer, transfer.num_full_blocks, block_ids[transfer.num_full_blocks], name)

    def _announce(self, transfer: ProducedTransfer, now: float) -> None:
        """Report how many pages are saved without a gap, if that has changed; and the end, once the request has ended
        too."""
        before = transfer.num_ready_pages
        while transfer.num_ready_pages in transfer.saved:
            transfer.saved.remove(transfer.num_ready_pages)
            transfer.num_ready_pages += 1
        num_ready = min(transfer.num_ready_pages, transfer.num_full_blocks)
        is_end = transfer.is_complete and transfer.request_id not in self._by_request
        if is_end or transfer.num_ready_pages > before:
            self._leases.progress(transfer.transfer_id, num_ready, is_complete=is_end, now=now)
            self._output.events.append(self._progress_event(transfer, before, num_ready, is_end=is_end))

    def _offer_event(self, transfer: ProducedTransfer, block_ids: Sequence[int]) -> TransferEvent:
        """The first event of a transfer, whose pages will be in these blocks."""
        del block_ids
        return TransferEvent(transfer.transfer_id, 0)

    def _progress_event(self, transfer: ProducedTransfer, first: int, num_ready: int, *, is_end: bool) -> TransferEvent:
        """Pages from index `first` on are new, the first `num_ready` full ones can be read; at the end, all can."""
        del first
        num_tokens = transfer.num_tokens if is_end else None
        return TransferEvent(transfer.transfer_id, num_ready, num_tokens=num_tokens)

    def _apply_ended(self) -> None:
        for ended in self._leases.take_ended():
            self._output.num_expired_leases += ended.ended == "expired"
            self._output.events.append(ended)
            self._end(ended.transfer_id)

    def _end(self, transfer_id: str) -> None:
        transfer = self._by_transfer.pop(transfer_id, None)
        if transfer is None:
            return
        transfer.cancelled = True
        self._drop_queued(transfer)
        self._delete_tail(transfer)
        self._free_if_idle(transfer)

    def _delete_tail(self, transfer: ProducedTransfer) -> None:
        """Remove the tail's page once no save can bring it back."""
        if transfer.tail_key is not None and transfer.num_in_flight == 0:
            self.deletes.append(transfer.tail_key)
            transfer.tail_key = None

    def _queue(self, transfer: ProducedTransfer, index: int, block_id: int, name: PageName) -> None:
        transfer.num_in_flight += 1
        self._ops.append(SaveOp(index, block_id, name, transfer))

    def _drop_queued(self, transfer: ProducedTransfer) -> None:
        kept = [op for op in self._ops if op.owner is not transfer]
        transfer.num_in_flight -= len(self._ops) - len(kept)
        self._ops = kept

    def _is_in_use(self, transfer: ProducedTransfer) -> bool:
        """Whether a finished request's blocks have to stay."""
        return transfer.num_in_flight > 0

    def _free_if_idle(self, transfer: ProducedTransfer) -> None:
        if transfer.holds_blocks and not self._is_in_use(transfer):
            transfer.holds_blocks = False
            self._output.freed_request_ids.append(transfer.request_id)


MAX_WAITING = 256
"""Pages whose saves have not ended: beyond, a store that is slower than prefill would keep prefill's blocks."""


class PrefixProducer(Producer):
    """Saves full blocks of requests that another connector hands over, for later requests with the same prompt.

        request_progressed ─▶ SaveOp per block ─▶ I/O thread ─▶ op_ended
        a save failed, or is late | the request was aborted ─▶ the rest of the request is not saved
        too many wait ─▶ what is left waits for the next chunk; after the last one it is not saved

    No lease, no tail, no event: what is not saved is computed again.
    """

    def __init__(self, naming: PageNaming, leases: LeaseTable, *, max_waiting: int = MAX_WAITING) -> None:
        super().__init__(naming, leases)
        self._max_waiting = max_waiting
        self._num_waiting = 0

    def request_progressed(
        self, request: Request, block_ids: Sequence[int], num_computed_tokens: int, now: float
    ) -> None:
        del now
        naming = self._naming
        transfer = self._by_request.get(request.request_id)
        if transfer is None:
            num_full = naming.num_full_blocks(request)
            transfer = ProducedTransfer(request.request_id, "", num_full, num_full, num_full * naming.block_size)
            self._by_request[request.request_id] = transfer
        num_full = min(num_computed_tokens // naming.block_size, transfer.num_full_blocks)
        hashes = naming.block_hashes(request) if num_full > transfer.num_queued_blocks else []
        for index in range(transfer.num_queued_blocks, num_full):
            if transfer.cancelled or self._num_waiting >= self._max_waiting:
                return  # what is left is queued with a later chunk, if there is room by then
            self._queue(transfer, index, block_ids[index], naming.full_block(hashes, request.root_hash, index))
            transfer.num_queued_blocks = index + 1
            self._num_waiting += 1

    def request_finished(self, request: Request, block_ids: Sequence[int], now: float) -> bool:
        if request.spec.hold_kv is not None and request.finish_reason == "hand_over":
            self.request_progressed(request, block_ids, request.num_initial_tokens, now)
        transfer = self._by_request.pop(request.request_id, None)
        if transfer is None:
            return False
        if request.finish_reason != "hand_over":
            transfer.cancelled = True
        transfer.holds_blocks = self._is_in_use(transfer)
        return transfer.holds_blocks

    def op_ended(self, op: SaveOp, failure: str | None, now: float) -> None:
        del now
        op.owner.num_in_flight -= 1
        self._num_waiting -= 1
        if failure is not None:
            op.owner.cancelled = True
        self._free_if_idle(op.owner)

    def give_up(self, transfer: ProducedTransfer, failure: str, now: float) -> None:
        del failure, now
        transfer.cancelled = True
