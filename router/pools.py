"""The two pools: who is in them, and a snapshot of each for the pickers.

A `Membership` says which addresses there are and may change its mind (a fixed list now; DNS and Kubernetes are
others). The pool keeps one watched `Member` per address.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import grpc
import grpc.aio

from router.config import PoolSettings
from router.instances import InstanceInfo, InstanceKey, InstanceView
from router.member import Expectation, Member

_log = logging.getLogger(__name__)

Dial = Callable[[str], grpc.aio.Channel]


class Membership(Protocol):
    """Where a pool's addresses come from."""

    def addresses(self) -> AsyncIterator[frozenset[str]]:
        """Every address of the pool, again whenever the set has changed."""


class StaticMembership:
    """A list that never changes."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = frozenset(addresses)

    async def addresses(self) -> AsyncIterator[frozenset[str]]:
        yield self._addresses


class Pool:
    """The instances of one role. Belongs to one event loop."""

    def __init__(
        self,
        expected: Expectation,
        membership: Membership,
        dial: Dial,
        settings: PoolSettings,
        on_change: Callable[[Member], None],
    ) -> None:
        self._expected = expected
        self._membership = membership
        self._dial = dial
        self._settings = settings
        self._on_change = on_change
        self._members: dict[str, tuple[Member, asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self.followed = False
        """Whether the membership has told who there is."""

    @property
    def members(self) -> tuple[Member, ...]:
        """Everyone, ready or not."""
        return tuple(member for member, _ in self._members.values())

    def views(self) -> tuple[InstanceView, ...]:
        """A snapshot of everyone who has told who he is."""
        return tuple(view for member in self.members if (view := member.view()) is not None)

    def num_ready(self) -> int:
        """Instances that may be picked."""
        return sum(view.out is None for view in self.views())

    def member(self, key: InstanceKey) -> Member | None:
        """The member behind a view, None if another process has taken its place."""
        member, _ = self._members.get(key.address, (None, None))
        return member if member is not None and member.key == key else None

    async def run(self) -> None:
        """Follows the membership; ends only by cancellation, and then every member is let go."""
        try:
            async for addresses in self._membership.addresses():
                self._reconcile(addresses)
            await asyncio.Event().wait()
        finally:
            for address in list(self._members):
                await self._let_go(address)

    def _reconcile(self, addresses: frozenset[str]) -> None:
        self.followed = True
        for address in addresses - self._members.keys():
            member = Member(address, self._expected, self._dial(address), self._settings, self._on_change)
            self._members[address] = (member, asyncio.create_task(member.watch(), name=f"watch {address}"))
        for address in self._members.keys() - addresses:
            leaving = asyncio.create_task(self._let_go(address))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def _let_go(self, address: str) -> None:
        member, task = self._members.pop(address)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
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
    ) -> None:
        digest = tokenizer_digest if settings.check_tokenizer else ""
        self.prefill = Pool(Expectation("prefill", digest), prefill, dial, settings, self._changed_at)
        self.decode = Pool(Expectation("decode", digest), decode, dial, settings, self._changed_at)
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
        return all(pool.followed and pool.num_ready() == len(pool.members) for pool in (self.prefill, self.decode))

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
