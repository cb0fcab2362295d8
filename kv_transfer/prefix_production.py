"""Full blocks of requests that are handed over by another connector, saved for whoever has the same prompt later.

    request_progressed ─▶ SaveOp per block ─▶ I/O thread ─▶ op_ended
    a save failed | too many are waiting | the request was aborted ─▶ the rest of the request is not saved

No lease, no tail, no word to anybody: what is not saved is computed again. Blocks of a finished request stay with the
connector until the last save that touches them has ended.

Pure: no I/O, no clock; used in the step loop alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.messages import LeaseCommand, TransferEvent
from engine.request import Request
from kv_transfer.page_naming import PageNaming
from kv_transfer.production import Production, SaveOp
from kv_transfer.store import PageKey

_MAX_WAITING = 256
"""Pages whose saves have not ended: beyond, a store that is slower than prefill would keep prefill's blocks."""


class PrefixProducer:
    """A Producer (kv_transfer/production.py) without transfers."""

    has_deletes = False

    def __init__(self, naming: PageNaming, *, max_waiting: int = _MAX_WAITING) -> None:
        self._naming = naming
        self._max_waiting = max_waiting
        self._by_request: dict[str, Production] = {}  # unfinished requests
        self._ops: list[SaveOp] = []
        self._freed: list[str] = []
        self._num_waiting = 0

    def progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int, now: float) -> None:
        """KV of the first `num_computed_tokens` tokens is there: save the blocks that have become full."""
        del now
        naming = self._naming
        production = self._by_request.get(request.request_id)
        if production is None:
            num_full = naming.num_full_blocks(request)
            production = Production(request.request_id, "", num_full, num_full, num_full * naming.block_size)
            self._by_request[request.request_id] = production
        num_full = min(num_computed_tokens // naming.block_size, production.num_full_blocks)
        hashes = naming.block_hashes(request) if num_full > production.num_queued_blocks else []
        for index in range(production.num_queued_blocks, num_full):
            if self._num_waiting >= self._max_waiting:
                production.num_full_blocks = index  # no more of this request
            if production.cancelled or index >= production.num_full_blocks:
                return
            name = naming.full_block(hashes, request.root_hash, index)
            self._ops.append(
                SaveOp(
                    request_id=production.request_id,
                    transfer_id="",
                    block_index=index,
                    block_id=block_ids[index],
                    num_tokens=name.spec.num_tokens,
                    block_hash=name.spec.block_hash,
                    parent_hash=name.spec.parent_hash,
                    name=name,
                    owner=production,
                )
            )
            production.num_queued_blocks = index + 1
            production.num_in_flight += 1
            self._num_waiting += 1

    def finished(self, request: Request, block_ids: Sequence[int], now: float) -> bool:
        """The request has ended. True: its blocks are in use until `take_freed` names it."""
        if request.spec.hold_kv is not None and request.finish_reason == "hand_over":
            self.progressed(request, block_ids, request.num_initial_tokens, now)
        production = self._by_request.pop(request.request_id, None)
        if production is None:
            return False
        if request.finish_reason != "hand_over":
            production.cancelled = True
        production.holds_blocks = production.num_in_flight > 0
        return production.holds_blocks

    def op_ended(self, op: SaveOp, failure: str | None, now: float) -> None:
        """A save has ended; `failure` says why it did not succeed."""
        del now
        production = op.owner
        production.num_in_flight -= 1
        self._num_waiting -= 1
        if failure is not None:
            production.cancelled = True
        if production.holds_blocks and production.num_in_flight == 0:
            production.holds_blocks = False
            self._freed.append(production.request_id)

    def take_ops(self) -> list[SaveOp]:
        """Saves to start now."""
        ops, self._ops = self._ops, []
        return ops

    def take_freed(self) -> list[str]:
        """Finished requests whose blocks are in use no more."""
        freed, self._freed = self._freed, []
        return freed

    def end_all(self, now: float) -> None:
        """This core ends: begin no more saves."""
        del now
        for production in self._by_request.values():
            production.cancelled = True

    # What only transfers have

    def command(self, command: LeaseCommand, now: float) -> None:
        del command, now

    def expire(self, now: float) -> None:
        del now

    def take_events(self) -> list[TransferEvent]:
        return []

    def take_deletes(self) -> list[PageKey]:
        return []

    def take_num_expired(self) -> int:
        return 0
