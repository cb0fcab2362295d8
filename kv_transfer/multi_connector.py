"""Several connectors as one: the first hands over, the others are prefix stores that instances share.

    save    a block computed ─▶ every connector that saves
    load    the first connector ──what it lacked──▶ the second ──…──▶ KVLoadResult, once ─▶ the rest is computed

For example NIXL for the hand-over and Redis for prefixes: decode reads from the prefill instance's memory and, if that
instance has died, from Redis; a prefill instance finds in Redis what another one has computed. Leases, attach streams
and events belong to the first connector. After reads were given up that may still write, no other connector may write
to the same blocks, and the search ends.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config import KVConnectorConfig
from engine.core.messages import KVProgress, KVTotals, LeaseCommand
from engine.errors import EngineError
from engine.kv_connector import (
    KVConnector,
    KVConnectorOutput,
    KVLoadResult,
    KVMemory,
    WrongArguments,
    make_connector,
    self_test,
)
from engine.kv_layout import PageLayout
from engine.scheduling.request import Request


@dataclass(slots=True, eq=False)
class _Search:
    """One request whose blocks are being looked up, at the connector with this index."""

    request: Request
    block_ids: Sequence[int]
    index: int
    num_external_tokens: int = 0
    num_recomputed_blocks: int | None = None
    """Of the first connector's result, minus what was found since."""
    reason: str | None = None


class MultiConnector:
    """Implements engine.kv_connector.KVConnector over others. `connectors`: class_path and options of each."""

    def __init__(self, *, wake: Callable[[], None], connectors: Sequence[Mapping[str, Any]]) -> None:
        self._connectors: list[KVConnector] = []
        try:
            for index, config in enumerate(connectors):
                self._connectors.append(_make(index, config, wake))
        except BaseException:
            with contextlib.suppress(Exception):
                self.shutdown()
            raise
        self._first = self._connectors[0]
        self.name = ",".join(connector.name for connector in self._connectors)
        self.needs_all_blocks = self._first.needs_all_blocks
        self._block_size = 0
        self._searches: dict[str, _Search] = {}
        self._held: Counter[str] = Counter()  # request_id or retained id → connectors that still need its blocks
        self._needed: dict[str, dict[int, frozenset[int]]] = {}
        """By the same ids, of the connectors that need no longer all of its blocks: those that they need."""

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return max(connector.get_num_new_matched_tokens(request, num_computed_tokens) for connector in self._connectors)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_local_blocks: int) -> None:
        search = self._searches[request.request_id] = _Search(request, block_ids, index=-1)
        started = self._search_next(search, num_local_blocks * self._block_size)
        assert started, "a connector has matched tokens"

    def request_progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        for connector in self._connectors:
            connector.request_progressed(request, block_ids, num_computed_tokens)

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        self._searches.pop(request.request_id, None)
        num_users = sum(connector.request_finished(request, block_ids) for connector in self._connectors)
        if num_users:
            self._held[request.request_id] = num_users
        return num_users > 0

    def handle(self, command: KVProgress | LeaseCommand) -> None:
        self._first.handle(command)

    @property
    def num_transfers(self) -> int:
        return self._first.num_transfers

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(connector.num_quarantined_blocks for connector in self._connectors)

    @property
    def totals(self) -> list[KVTotals]:
        return [totals for connector in self._connectors for totals in connector.totals]

    # Worker side

    def register_kv_cache(self, kv_cache: KVMemory, layout: PageLayout, fingerprint: bytes) -> None:
        self._block_size = layout.block_size
        for connector in self._connectors:
            connector.register_kv_cache(kv_cache, layout, fingerprint)

    def self_test(self) -> str | None:
        problems = [problem for connector in self._connectors if (problem := self_test(connector)) is not None]
        return "; ".join(problems) or None

    def start_io(self) -> None:
        for connector in self._connectors:
            connector.start_io()

    def poll(self) -> KVConnectorOutput:
        output = KVConnectorOutput()
        for index, connector in enumerate(self._connectors):
            polled = connector.poll()
            output.events += polled.events
            output.num_expired_leases += polled.num_expired_leases
            for result in polled.loaded:
                if (final := self._result(index, result)) is not None:
                    output.loaded.append(final)
            for request_id in polled.freed_request_ids:
                self._free(index, request_id, output.freed_request_ids)
            for request_id, block_ids in polled.needed.items():
                self._needed.setdefault(self._known(index, request_id), {})[index] = block_ids
        output.needed = {
            known: frozenset().union(*needed.values())
            for known, needed in self._needed.items()
            if len(needed) == self._held[known]
        }
        return output

    def next_deadline_s(self) -> float | None:
        deadlines = (connector.next_deadline_s() for connector in self._connectors)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def shutdown(self) -> None:
        problems: list[Exception] = []
        for connector in self._connectors:
            try:
                connector.shutdown()
            except Exception as error:  # the others have threads and connections to end too
                problems.append(error)
        if problems:
            raise problems[0]

    # Inside

    def _search_next(self, search: _Search, num_tokens: int) -> bool:
        """Start at the next connector that may have tokens past the first `num_tokens`. False: there is none."""
        for index in range(search.index + 1, len(self._connectors)):
            connector = self._connectors[index]
            if connector.get_num_new_matched_tokens(search.request, num_tokens) > 0:
                search.index = index
                num_blocks = num_tokens // self._block_size
                connector.update_state_after_alloc(search.request, search.block_ids, num_blocks)
                return True
        return False

    def _result(self, index: int, result: KVLoadResult) -> KVLoadResult | None:
        """The engine's result after one connector's result; None: the search goes on."""
        search = self._searches.get(result.request_id)
        if search is None:
            return None  # the request has ended since
        search.num_external_tokens += result.num_external_tokens
        if search.num_recomputed_blocks is None:
            search.num_recomputed_blocks = result.num_recomputed_blocks
        else:
            num_found = result.num_external_tokens // self._block_size
            search.num_recomputed_blocks = max(0, search.num_recomputed_blocks - num_found)
        search.reason = search.reason or result.reason
        is_whole = result.num_verified_tokens >= search.request.num_initial_tokens
        may_continue = not is_whole and result.retained_id is None
        if may_continue and self._search_next(search, result.num_verified_tokens):
            return None
        del self._searches[result.request_id]
        retained_id = None if result.retained_id is None else _retained(index, result.retained_id)
        if retained_id is not None:
            self._held[retained_id] = 1
        return replace(
            result,
            num_external_tokens=search.num_external_tokens,
            num_recomputed_blocks=search.num_recomputed_blocks,
            reason=search.reason if search.num_recomputed_blocks else None,
            retained_id=retained_id,
        )

    def _free(self, index: int, request_id: str, freed: list[str]) -> None:
        """One connector no longer needs these blocks; the last one frees them."""
        known = self._known(index, request_id)
        self._held[known] -= 1
        self._needed.get(known, {}).pop(index, None)
        if not self._held[known]:
            del self._held[known]
            self._needed.pop(known, None)
            freed.append(known)

    def _known(self, index: int, request_id: str) -> str:
        """What the engine calls it: a request's id, or what a connector has retained."""
        return request_id if request_id in self._held else _retained(index, request_id)


def _retained(index: int, retained_id: str) -> str:
    return f"{index}/{retained_id}"


def _make(index: int, config: Mapping[str, Any], wake: Callable[[], None]) -> KVConnector:
    class_path, options = config["class_path"], dict(config["options"])
    if index:
        options["prefix_only"] = True
    try:
        return make_connector(KVConnectorConfig(class_path=class_path, options=options), wake)
    except WrongArguments as error:
        if index:
            raise EngineError(f"{class_path} cannot follow the first connector ({error})") from error
        raise
