"""The two pools: who is in them, and a snapshot of each for the pickers.

A `Membership` says which addresses there are and may change its mind. The pool keeps one watched `Member` per address:

address is told of ──▶ watched ──gone from the membership──▶ leaving ──no call of ours is open there──▶ let go
                          ▲───────── told of again ────────────┘

Nothing new goes to a member that leaves, and it is watched to its end: an instance that drains vanishes from the DNS
long before its streams are over, and one that dies meanwhile must still be noticed. Two addresses of one process (an
IPv4 and an IPv6 one) are one instance: the first that is ready stands for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from router.config import PoolSettings
from router.picking.speeds import Speeds
from router.pools.expectation import Expectation
from router.pools.instances import InstanceInfo, InstanceKey, InstanceView
from router.pools.member import Member
from router.pools.membership import Membership

_log = logging.getLogger(__name__)

Dial = Callable[[str], grpc.aio.Channel]

_LINGER_S = 2.0
"""The connection of a member that has left outlives its last call by so much: a release may still be on its way."""


class Pool:
    """The instances of one role. Belongs to one event loop."""

    def __init__(
        self,
        expected: Expectation,
        membership: Membership,
        dial: Dial,
        settings: PoolSettings,
        on_change: Callable[[Member], None],
        speeds: Callable[[], Speeds] = Speeds,
    ) -> None:
        self._expected = expected
        self._speeds = speeds
        self._membership = membership
        self._dial = dial
        self._settings = settings
        self._on_change = on_change
        self._members: dict[str, tuple[Member, asyncio.Task[None]]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._farewells: set[asyncio.Task[None]] = set()
        self.followed = False
        """Whether the membership has told who there is."""

    @property
    def members(self) -> tuple[Member, ...]:
        """Everyone, ready or not, those that leave included."""
        return tuple(member for member, _ in self._members.values())

    def views(self) -> tuple[InstanceView, ...]:
        """A snapshot of everyone who has told who he is, each process once."""
        views: dict[str, InstanceView] = {}
        for member in self.members:
            view = member.view()
            if view is None:
                continue
            known = views.get(view.key.epoch)
            if known is None or (known.out is not None and view.out is None):
                views[view.key.epoch] = view
        return tuple(views.values())

    def num_ready(self) -> int:
        """Instances that may be picked."""
        return sum(view.out is None for view in self.views())

    def is_complete(self) -> bool:
        """Whether every instance that the membership tells of may be picked; an empty pool is complete."""
        standing_in = {view.key.epoch for view in self.views() if view.out is None}
        return self.followed and all(
            member.state in ("ready", "leaving") or (member.key is not None and member.key.epoch in standing_in)
            for member in self.members
        )

    def member(self, key: InstanceKey) -> Member | None:
        """The member behind a view, None if another process has taken its place."""
        member, _ = self._members.get(key.address, (None, None))
        return member if member is not None and member.key == key else None

    async def run(self) -> None:
        """Follows the membership; ends only by cancellation, and then every member is let go."""
        try:
            try:
                async for addresses in self._membership.addresses():
                    self._reconcile(addresses)
            except Exception:
                _log.critical("the addresses of the %s pool are no longer followed", self._expected.role, exc_info=True)
            await asyncio.Event().wait()
        finally:
            for farewell in self._farewells:
                farewell.cancel()
            await asyncio.gather(*self._farewells, return_exceptions=True)
            for address in list(self._members):
                await self._let_go(address)

    def _reconcile(self, addresses: frozenset[str]) -> None:
        self.followed = True
        for address in addresses - self._members.keys():
            member = Member(
                address, self._expected, self._dial(address), self._settings, self._on_change, self._speeds()
            )
            self._members[address] = (member, asyncio.create_task(member.watch(), name=f"watch {address}"))
        for address, (member, _) in self._members.items():
            leaving = self._leaving.get(address)
            if address in addresses and leaving is not None:
                self._leaving.pop(address).cancel()
                member.stay()
            elif address not in addresses and leaving is None:
                member.leave()
                farewell = asyncio.create_task(self._let_go_when_idle(address), name=f"leave {address}")
                self._leaving[address] = farewell
                self._farewells.add(farewell)
                farewell.add_done_callback(self._farewells.discard)

    async def _let_go_when_idle(self, address: str) -> None:
        member, _ = self._members[address]
        while not member.is_idle:
            await member.until_idle()
            await asyncio.sleep(_LINGER_S)
        del self._leaving[address]
        await self._let_go(address)

    async def _let_go(self, address: str) -> None:
        member, task = self._members.pop(address)
        task.cancel()
        try:
            await asyncio.gather(task, return_exceptions=True)
        finally:
            await member.channel.close()


class Pools:
    """Both pools, and the news that something in them has changed."""

    def __init__(
        self,
        prefill: Membership,
        decode: Membership,
        dial: Dial,
        settings: PoolSettings,
        *,
        tokenizer_digest: str = "",
        speeds: Callable[[], Speeds] = Speeds,
    ) -> None:
        digest = tokenizer_digest if settings.check_tokenizer else ""
        self.prefill = Pool(Expectation("prefill", digest), prefill, dial, settings, self._changed_at, speeds)
        self.decode = Pool(Expectation("decode", digest), decode, dial, settings, self._changed_at, speeds)
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._told: set[tuple[InstanceKey, InstanceKey]] = set()
        self._last_decode: tuple[InstanceInfo, ...] = ()

    async def start(self) -> None:
        """Begins to watch."""
        self._tasks = [asyncio.create_task(pool.run(), name="pool") for pool in (self.prefill, self.decode)]

    async def stop(self) -> None:
        """Lets every instance go."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def all_ready(self) -> bool:
        """Whether both pools are complete; an empty one is."""
        return self.prefill.is_complete() and self.decode.is_complete()

    def decode_infos(self) -> tuple[InstanceInfo, ...]:
        """The ready decode instances; when there is none, those that were ready last."""
        ready = tuple(view.info for view in self.decode.views() if view.out is None)
        self._last_decode = ready or self._last_decode
        return self._last_decode

    async def wait_for_news(self, timeout_s: float) -> None:
        """Returns when an instance has come, gone or changed its state, or after `timeout_s`."""
        news = self._news
        try:
            async with asyncio.timeout(timeout_s):
                await news.wait()
        except TimeoutError:
            pass

    def _changed_at(self, member: Member) -> None:
        self.decode_infos()
        self._tell_mismatches()
        self._news.set()
        self._news = asyncio.Event()  # whoever waits holds the old one

    def _tell_mismatches(self) -> None:
        for decode in self.decode.views():
            for prefill in self.prefill.views():
                pair = (prefill.key, decode.key)
                mismatch = decode.pairing_mismatch(prefill)
                if mismatch is None or pair in self._told:
                    continue
                self._told.add(pair)
                _log.warning(
                    "%s differs between decode %s (%s) and prefill %s (%s): they will not be paired",
                    mismatch.field,
                    decode.instance_id,
                    mismatch.ours,
                    prefill.instance_id,
                    mismatch.theirs,
                )
