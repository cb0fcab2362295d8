"""The two pools: which instances they have, and a snapshot of each for the pickers.

A `ServiceDiscovery` yields the addresses of a pool. The pool keeps one watched `UpstreamInstance` per address:

address discovered ──▶ watched ──gone from the discovery──▶ leaving ──no call is open here, no drain runs──▶ removed
                          ▲────────── discovered again ─────────┘

An instance that leaves gets no new calls and is watched to its end: one that drains vanishes from the DNS long before
its streams are over, those of other routers included, and one that dies meanwhile must still be noticed. Once its
process has ended it counts no more. Its connection stays open until the streams end whose prompts it computed, for a
late release. Two addresses of one process (IPv4 and IPv6) are one instance: the first that is ready represents it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from router.pools.discovery import ServiceDiscovery, follow
from router.pools.instance import STATES, ExpectedInstance, UpstreamInstance
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, Role
from router.pools.settings import PoolSettings
from router.pools.throughput import ThroughputEstimator
from serving.waits import Broadcast, end_tasks

_log = logging.getLogger(__name__)

Dial = Callable[[str], grpc.aio.Channel]
_Kind = tuple[Identity, str]

_LINGER_S = 5.0
"""How long the connection of a leaving instance outlives its last call: a release may still be on its way, or the
report that it drains."""


@dataclass(slots=True, eq=False)
class Pool:
    """The instances of one role. Belongs to one event loop."""

    expected: ExpectedInstance
    discovery: ServiceDiscovery
    dial: Dial
    settings: PoolSettings
    on_change: Callable[[], None]
    throughput: Callable[[], ThroughputEstimator]
    is_discovered: bool = False
    """Whether the discovery has yielded addresses."""
    _instances: dict[str, tuple[UpstreamInstance, asyncio.Task[None]]] = field(default_factory=dict)
    _leaving: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _removals: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def instances(self) -> tuple[UpstreamInstance, ...]:
        """All of them, ready or not, those that are leaving included until their processes have ended."""
        return tuple(instance for instance, _ in self._instances.values() if not instance.has_left)

    @property
    def processes(self) -> tuple[UpstreamInstance, ...]:
        """As `instances`, each process once: by the address at which it can do most. An address that has never answered
        counts as a process."""
        found: dict[str, UpstreamInstance] = {}
        for instance in self.instances:
            process = instance.info.epoch if instance.info is not None else instance.address
            known = found.get(process)
            if known is None or STATES.index(instance.state) < STATES.index(known.state):
                found[process] = instance
        return tuple(found.values())

    def views(self) -> tuple[InstanceView, ...]:
        """A snapshot of every process that has reported."""
        return tuple(view for instance in self.processes if (view := instance.view()) is not None)

    def num_ready(self) -> int:
        """Instances that may be picked; ejected ones too, as the last."""
        return sum(view.out is None for view in self.views())

    def is_complete(self) -> bool:
        """Whether every discovered instance may be picked; an empty pool is complete."""
        return self.is_discovered and all(one.state in ("ready", "leaving") for one in self.processes)

    def instance(self, key: InstanceKey) -> UpstreamInstance | None:
        """The instance behind a view; None if another process answers at its address."""
        instance, _ = self._instances.get(key.address, (None, None))
        return instance if instance is not None and instance.key == key else None

    async def follow(self) -> None:
        """Follows the discovery until it is cancelled; then every instance is removed."""
        try:
            await follow(self.discovery, self._reconcile, f"the addresses of the {self.expected.role} pool")
            await asyncio.Event().wait()
        finally:
            await end_tasks(*self._removals)
            for address in list(self._instances):
                await self._remove(address)

    def _reconcile(self, addresses: frozenset[str]) -> None:
        self.is_discovered = True
        for address in addresses - self._instances.keys():
            instance = UpstreamInstance(
                address, self.expected, self.dial(address), self.settings, self.on_change, self.throughput()
            )
            self._instances[address] = (instance, asyncio.create_task(instance.watch(), name=f"watch {address}"))
        for address, (instance, _) in self._instances.items():
            leaving = self._leaving.get(address)
            if address in addresses and leaving is not None:
                self._leaving.pop(address).cancel()
                instance.set_leaving(False)
            elif address not in addresses and leaving is None:
                instance.set_leaving(True)
                removal = asyncio.create_task(self._remove_when_idle(address), name=f"remove {address}")
                self._leaving[address] = removal
                self._removals.add(removal)
                removal.add_done_callback(self._removals.discard)

    async def _remove_when_idle(self, address: str) -> None:
        instance, _ = self._instances[address]
        is_needed = True
        while is_needed:
            await instance.calls.wait_until_empty()
            await instance.wait_lost(_LINGER_S)
            is_needed = instance.is_draining or not instance.calls.is_empty
        del self._leaving[address]
        await self._remove(address)

    async def _remove(self, address: str) -> None:
        instance, task = self._instances.pop(address)
        try:
            await end_tasks(task)
        finally:
            await instance.channel.close()


class Pools:
    """Both pools, and the notification that something in them has changed."""

    def __init__(
        self,
        prefill: ServiceDiscovery,
        decode: ServiceDiscovery,
        dial: Dial,
        settings: PoolSettings,
        *,
        tokenizer_digest: str = "",
        throughput: Callable[[], ThroughputEstimator] = ThroughputEstimator,
    ) -> None:
        digest = tokenizer_digest if settings.check_tokenizer else ""
        self.prefill = Pool(ExpectedInstance("prefill", digest), prefill, dial, settings, self._on_change, throughput)
        self.decode = Pool(ExpectedInstance("decode", digest), decode, dial, settings, self._on_change, throughput)
        self.by_role: dict[Role, Pool] = {"prefill": self.prefill, "decode": self.decode}
        self._changed = Broadcast()
        self._tasks: list[asyncio.Task[None]] = []
        self._reported_mismatches: set[tuple[_Kind, _Kind]] = set()
        self._last_decode_infos: tuple[InstanceInfo, ...] = ()
        self._last_prefill_infos: tuple[InstanceInfo, ...] = ()

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(pool.follow(), name="pool") for pool in self.by_role.values()]

    async def stop(self) -> None:
        await end_tasks(*self._tasks)

    def all_ready(self) -> bool:
        """Whether both pools are complete; an empty one is."""
        return self.prefill.is_complete() and self.decode.is_complete()

    def instance(self, key: InstanceKey) -> UpstreamInstance | None:
        """The instance of either pool behind a view; None if another process answers at its address."""
        return self.prefill.instance(key) or self.decode.instance(key)

    def decode_infos(self) -> tuple[InstanceInfo, ...]:
        """Of the ready decode instances; while there is none, of those that were ready last."""
        ready = tuple(view.info for view in self.decode.views() if view.out is None)
        self._last_decode_infos = ready or self._last_decode_infos
        return self._last_decode_infos

    def prefill_infos(self) -> tuple[InstanceInfo, ...]:
        """Of the ready prefill instances that pair with a ready decode instance; while there is none, of those that
        were ready last."""
        pairings = {info.pairing for info in self.decode_infos()}
        infos = (view.info for view in self.prefill.views() if view.out is None)
        self._last_prefill_infos = tuple(info for info in infos if info.pairing in pairings) or self._last_prefill_infos
        return self._last_prefill_infos

    def identity(self, fingerprint: str) -> Identity | None:
        """The identity with this fingerprint; None if no instance that has reported, ready or not, has it."""
        views = (*self.decode.views(), *self.prefill.views())
        identities = (view.info.identity for view in views)
        return next((identity for identity in identities if identity.fingerprint == fingerprint), None)

    def lora_adapters(self) -> frozenset[str]:
        """Those of all decode instances, ready or not, and while there is none, of those that were ready last."""
        infos = (*self._last_decode_infos, *(instance.info for instance in self.decode.instances))
        return frozenset[str]().union(*{info.lora_adapters for info in infos if info is not None})

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns when an instance has changed its state, or after `timeout_s`. One whose address leaves has; a new
        address alone is no change."""
        await self._changed.wait(timeout_s)

    def _on_change(self) -> None:
        self.decode_infos()
        self.prefill_infos()
        self._log_mismatches()
        self._changed.notify()

    def _log_mismatches(self) -> None:
        """Warns once of each two kinds of instances that cannot be paired, by one instance of each."""
        reported, self._reported_mismatches = self._reported_mismatches, set()
        for decode_kind, decode in _by_kind(self.decode.views()).items():
            for prefill_kind, prefill in _by_kind(self.prefill.views()).items():
                kinds = (prefill_kind, decode_kind)
                if (mismatch := decode.pairing_mismatch(prefill)) is None:
                    continue
                self._reported_mismatches.add(kinds)
                if kinds in reported:
                    continue
                _log.warning(
                    "%s differs between decode %s (%s) and prefill %s (%s): they will not be paired",
                    mismatch.field,
                    decode.instance_id,
                    mismatch.ours,
                    prefill.instance_id,
                    mismatch.theirs,
                )


def _by_kind(views: Iterable[InstanceView]) -> dict[_Kind, InstanceView]:
    """An instance of each kind: of each identity and connector."""
    return {(view.info.identity, view.info.kv_connector): view for view in views}
