"""The other routers of the same pools: how many there are, and what their requests show of the pools.

    discovered ──asked every interval_s──▶ answers ⇄ silent (no answer for three intervals, or none yet)
        ▲           └─ its answer has this router's id ──▶ self: not asked again, and not counted twice
        └── discovered again ◀── gone from the discovery: forgotten

A silent router counts as a router. Its queue is unknown, so that no pool shrinks until it answers or is gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from protos.tandem.v1 import signals_pb2, signals_pb2_grpc
from router.autoscaler.router_signals import RouterSignals
from router.autoscaler.settings import SignalSettings
from router.pools.discovery import ServiceDiscovery
from serving.settings import parse_address

_log = logging.getLogger(__name__)
_SILENT_INTERVALS = 3


@dataclass(slots=True, eq=False)
class _Peer:
    """One address of a router."""

    address: str
    channel: grpc.aio.Channel
    is_self: bool = False
    signals: RouterSignals | None = None
    """Of the last answer."""
    answered_s: float = -math.inf


class Peers:
    """One per router, on its event loop."""

    def __init__(
        self,
        router_id: str,
        discovery: ServiceDiscovery,
        dial: Callable[[str], grpc.aio.Channel],
        settings: SignalSettings,
    ) -> None:
        self._router_id = router_id
        self._discovery = discovery
        self._dial = dial
        self._settings = settings
        self._peers: dict[str, tuple[_Peer, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Follows and asks the other routers until it is cancelled."""
        try:
            async for addresses in self._discovery.addresses():
                await self._reconcile(addresses)
            await asyncio.Event().wait()
        finally:
            await self._reconcile(frozenset())

    @property
    def num_routers(self) -> int:
        """Routers of these pools, this one included. While an answer is missing, this one is taken for one of those
        that are discovered."""
        is_missing = all(peer.signals is not None and not peer.is_self for peer in self._known)
        return len(self._known) + is_missing

    @property
    def num_silent(self) -> int:
        oldest_s = time.monotonic() - _SILENT_INTERVALS * self._settings.interval_s
        return sum(peer.answered_s < oldest_s for peer in self._others)

    def signals(self) -> Sequence[RouterSignals]:
        """Of every other router that has answered, as of its last answer."""
        return [peer.signals for peer in self._others if peer.signals is not None]

    @property
    def hosts(self) -> Sequence[tuple[str, RouterSignals | None]]:
        """Host of each router that answers, and its signals; None: this router."""
        oldest_s = time.monotonic() - _SILENT_INTERVALS * self._settings.interval_s
        known = [(parse_address(peer.address)[0], peer) for peer in self._known]
        return [
            (host, None if peer.is_self else peer.signals)
            for host, peer in known
            if peer.is_self or peer.answered_s >= oldest_s
        ]

    @property
    def _known(self) -> Sequence[_Peer]:
        return [peer for peer, _ in self._peers.values()]

    @property
    def _others(self) -> Sequence[_Peer]:
        return [peer for peer in self._known if not peer.is_self]

    async def _reconcile(self, addresses: frozenset[str]) -> None:
        for address in addresses - self._peers.keys():
            peer = _Peer(address, self._dial(address))
            self._peers[address] = (peer, asyncio.create_task(self._ask(peer), name=f"signals of {address}"))
        for address in self._peers.keys() - addresses:
            peer, asking = self._peers.pop(address)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await peer.channel.close()

    async def _ask(self, peer: _Peer) -> None:
        """Asks one router, until it turns out to be this one."""
        stub = signals_pb2_grpc.SignalsServiceStub(peer.channel)
        interval_s, problem = self._settings.interval_s, ""
        while not peer.is_self:
            try:
                answer = await stub.GetSignals(signals_pb2.GetSignalsRequest(), timeout=interval_s)
            except grpc.aio.AioRpcError as error:
                if not problem:
                    _log.warning("the router at %s does not answer: %s", peer.address, error.details())
                problem = error.code().name
            else:
                peer.is_self = answer.router_id == self._router_id
                peer.signals, peer.answered_s, problem = RouterSignals.from_wire(answer), time.monotonic(), ""
            await asyncio.sleep(interval_s)
