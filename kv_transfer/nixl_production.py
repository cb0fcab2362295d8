"""The prefill side where readers read the blocks themselves: nothing is saved, blocks are described and kept.

    request_progressed ─▶ SaveOp per block ─▶ digest on an I/O thread ─▶ op_ended ─▶ TransferEvent(digests), no gaps
    request_finished("hand_over") ─▶ digest of the tail ─▶ TransferEvent(num_tokens, tail_digest)
    the lease ends ─▶ the lease word is dropped ─▶ freed

A hand-over request has all of its blocks from the beginning, so the first event names them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.messages import TransferEvent
from kv_transfer.leases import EndedLease, LeaseTable
from kv_transfer.nixl_words import LeaseWords
from kv_transfer.page_naming import PageNaming
from kv_transfer.production import Producer, Production, SaveOp

Describe = Callable[[Sequence[int], int, bytes], bytes]
"""Connector metadata of a transfer: its block ids, its lease word's index, what the word says."""


class MemoryProducer(Producer):
    """Keeps a transfer's blocks until its lease ends."""

    def __init__(self, naming: PageNaming, leases: LeaseTable, words: LeaseWords, describe: Describe) -> None:
        super().__init__(naming, leases)
        self._words = words
        self._describe = describe
        self._word_of: dict[str, int] = {}  # by transfer_id, leases that have not ended
        self._digests: dict[Production, dict[int, bytes]] = {}

    def digested(self, op: SaveOp, digest: bytes) -> None:
        """The digest of a page, before its `op_ended`."""
        if not op.owner.cancelled:
            self._digests.setdefault(op.owner, {})[op.block_index] = digest

    def _offer_event(self, production: Production, block_ids: Sequence[int]) -> TransferEvent:
        if len(block_ids) < production.num_pages or (taken := self._words.take()) is None:
            return TransferEvent(production.transfer_id, 0)  # its reader finds no metadata, and computes
        index, word = taken
        self._word_of[production.transfer_id] = index
        metadata = self._describe(block_ids[: production.num_pages], index, word)
        return TransferEvent(production.transfer_id, 0, connector_metadata=metadata)

    def _progress_event(self, production: Production, first: int, num_ready: int, *, is_end: bool) -> TransferEvent:
        digests = self._digests.get(production, {})
        new = [digests.pop(index) for index in range(first, num_ready) if index in digests]
        return TransferEvent(
            production.transfer_id,
            num_ready,
            digests=new,
            num_tokens=production.num_tokens if is_end else None,
            tail_digest=digests.pop(production.num_full_blocks, b"") if is_end else b"",
        )

    def _is_in_use(self, production: Production) -> bool:
        return production.num_in_flight > 0 or not production.cancelled

    def _end(self, ended: EndedLease) -> None:
        index = self._word_of.pop(ended.transfer_id, None)
        if index is not None:
            self._words.drop(index)
        production = self._by_transfer.get(ended.transfer_id)
        if production is not None:
            self._digests.pop(production, None)
        super()._end(ended)
