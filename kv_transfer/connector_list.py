"""Several connectors as one: the first hands over, the further ones are prefix stores that instances share.

    save    a block computed ─▶ every connector that saves
    load    the first connector ──what it did not have──▶ the second ──…──▶ KVLoadResult, once ─▶ the rest is computed

For example NIXL for the hand-over and Redis for prefixes: decode reads from the prefill instance's memory, and what
that cannot give any more (it has died) from Redis; a prefill instance finds in Redis what another one has computed.
Leases, attach streams and events are the first one's alone. Where reads were given up that may still write, no other
connector may write to the same blocks, and the search ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from engine.kv_connector import KVConnector, KVConnectorMeta, KVConnectorOutput, KVLoadResult, make_connector, self_test
from engine.kv_layout import KVLayout
from engine.messages import KVProgress, LeaseCommand
from engine.request import Request

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ListMeta(KVConnectorMeta):
    """`parts` run parallel to the list."""

    parts: tuple[KVConnectorMeta, ...] = ()


@dataclass(slots=True, eq=False)
class _Chain:
    """One request whose blocks are being sought, at the connector with this index."""

    request: Request
    block_ids: Sequence[int]
    index: int
    num_external_tokens: int = 0
    num_recomputed_blocks: int | None = None
    """Of the first connector's result, less what was found since."""
    reason: str | None = None


class ConnectorList:
    """Implements engine.kv_connector.KVConnector over others. `connectors`: class_path and options of each."""

    def __init__(self, *, wake: Callable[[], None], connectors: Sequence[Mapping[str, Any]]) -> None:
        self._all = [_make(index, config, wake) for index, config in enumerate(connectors)]
        self._first = self._all[0]
        self.name = ",".join(connector.name for connector in self._all)
        self._block_size = 0
        self._chains: dict[str, _Chain] = {}
        self._held: Counter[str] = Counter()  # request_id or retained id → connectors that still need its blocks

    @property
    def connectors(self) -> Sequence[KVConnector]:
        """In their order."""
        return self._all

    # Scheduler half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return max(connector.get_num_new_matched_tokens(request, num_computed_tokens) for connector in self._all)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_local_blocks: int) -> None:
        chain = self._chains[request.request_id] = _Chain(request, block_ids, index=-1)
        started = self._seek_further(chain, num_local_blocks * self._block_size)
        assert started, "some connector has promised tokens"

    def request_progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        for connector in self._all:
            connector.request_progressed(request, block_ids, num_computed_tokens)

    def build_connector_meta(self) -> ListMeta:
        parts = tuple(connector.build_connector_meta() for connector in self._all)
        loads = [op for part in parts for op in part.loads]
        return ListMeta(saves=[op for part in parts for op in part.saves], loads=loads, parts=parts)

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        self._chains.pop(request.request_id, None)
        num_holders = sum(connector.request_finished(request, block_ids) for connector in self._all)
        if num_holders:
            self._held[request.request_id] = num_holders
        return num_holders > 0

    def handle(self, command: KVProgress | LeaseCommand) -> None:
        self._first.handle(command)

    @property
    def num_transfers(self) -> int:
        return self._first.num_transfers

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(connector.num_quarantined_blocks for connector in self._all)

    # Worker half

    def register_kv_cache(self, kv_cache: torch.Tensor, layout: KVLayout, fingerprint: bytes) -> None:
        self._block_size = layout.block_size
        for connector in self._all:
            connector.register_kv_cache(kv_cache, layout, fingerprint)

    def self_test(self) -> str | None:
        problems = [problem for connector in self._all if (problem := self_test(connector)) is not None]
        return "; ".join(problems) or None

    def start_load_kv(self, meta: KVConnectorMeta) -> None:
        assert isinstance(meta, ListMeta)
        for connector, part in zip(self._all, meta.parts, strict=True):
            if part.loads:
                connector.start_load_kv(part)

    def save_kv(self, meta: KVConnectorMeta) -> None:
        assert isinstance(meta, ListMeta)
        for connector, part in zip(self._all, meta.parts, strict=True):
            if part.saves:
                connector.save_kv(part)

    def poll(self) -> KVConnectorOutput:
        output = KVConnectorOutput()
        for index, connector in enumerate(self._all):
            polled = connector.poll()
            output.events += polled.events
            output.num_expired_leases += polled.num_expired_leases
            for result in polled.loaded:
                if (final := self._result(index, result)) is not None:
                    output.loaded.append(final)
            for request_id in polled.freed_request_ids:
                self._free(index, request_id, output.freed_request_ids)
        return output

    def next_deadline_s(self) -> float | None:
        deadlines = (connector.next_deadline_s() for connector in self._all)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def shutdown(self) -> None:
        problems: list[Exception] = []
        for connector in self._all:
            try:
                connector.shutdown()
            except Exception as error:  # the others have threads and connections to end, too
                problems.append(error)
        if problems:
            raise problems[0]

    # Inside

    def _seek_further(self, chain: _Chain, num_tokens: int) -> bool:
        """Ask the next connector that may have tokens past the first `num_tokens`. False: there is none."""
        for index in range(chain.index + 1, len(self._all)):
            connector = self._all[index]
            if connector.get_num_new_matched_tokens(chain.request, num_tokens) > 0:
                chain.index = index
                num_blocks = num_tokens // self._block_size
                connector.update_state_after_alloc(chain.request, chain.block_ids, num_blocks)
                return True
        return False

    def _result(self, index: int, result: KVLoadResult) -> KVLoadResult | None:
        """What the engine is told of one connector's result; None: nothing yet, another one is being asked."""
        chain = self._chains.get(result.request_id)
        if chain is None:
            return None  # the request has ended since
        chain.num_external_tokens += result.num_external_tokens
        if chain.num_recomputed_blocks is None:
            chain.num_recomputed_blocks = result.num_recomputed_blocks
        else:
            num_found = result.num_external_tokens // self._block_size
            chain.num_recomputed_blocks = max(0, chain.num_recomputed_blocks - num_found)
        chain.reason = chain.reason or result.reason
        is_whole = result.num_verified_tokens >= chain.request.num_initial_tokens
        may_go_on = not is_whole and result.retained_id is None
        if may_go_on and self._seek_further(chain, result.num_verified_tokens):
            return None
        del self._chains[result.request_id]
        retained_id = None if result.retained_id is None else _retained(index, result.retained_id)
        if retained_id is not None:
            self._held[retained_id] = 1
        return replace(
            result,
            num_external_tokens=chain.num_external_tokens,
            num_recomputed_blocks=chain.num_recomputed_blocks,
            reason=chain.reason if chain.num_recomputed_blocks else None,
            retained_id=retained_id,
        )

    def _free(self, index: int, request_id: str, freed: list[str]) -> None:
        """One connector needs these blocks no longer; the last one's word counts."""
        known = request_id if request_id in self._held else _retained(index, request_id)
        self._held[known] -= 1
        if not self._held[known]:
            del self._held[known]
            freed.append(known)


def _retained(index: int, retained_id: str) -> str:
    return f"{index}/{retained_id}"


def _make(index: int, config: Mapping[str, Any], wake: Callable[[], None]) -> KVConnector:
    class_path, options = config["class_path"], dict(config["options"])
    if index:
        options["prefix_only"] = True
    try:
        return make_connector(KVConnectorConfig(class_path=class_path, options=options), wake)
    except TypeError as error:
        if index:
            raise EngineError(f"{class_path} cannot be a further connector: it takes no prefix_only") from error
        raise
