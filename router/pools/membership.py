"""Where a pool's addresses come from: a list, names that the DNS resolves, Services of Kubernetes, or several of them.

    "host:port, [IPv6]:port, dns:name:port" ──targets──▶ StaticMembership, DnsMembership ──▶ sets of addresses
    "kubernetes:service:port" ────────────────────────▶ EndpointsMembership (router/kubernetes) ──▶

A name is resolved again every `interval_s`, to all its A and AAAA addresses. The DNS says who is to be asked, never who
is well: that is for the members' watches. So an answer that cannot be had changes nothing, and one that says that
nobody is there is believed when it comes several times in a row. An address that has gone from the answer gets nothing
new, but what runs there ends by itself (pools.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

_log = logging.getLogger(__name__)

_TARGET = re.compile(
    r"((?P<dns>dns:(///)?)|(?P<service>kubernetes:))?"
    r"(?P<host>\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[^\s\[\]:/]+):(?P<port>[0-9]{1,5})"
)
_JITTER = 0.2
_EMPTY_ANSWERS = 3
"""A service whose instances are all unready for a moment has no addresses for that moment."""
_NOBODY = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class Target(NamedTuple):
    """One entry of a list of addresses."""

    host: str
    """Without brackets."""
    port: int
    is_name: bool
    """To be resolved, and again and again."""
    is_service: bool = False
    """The name of a Service of the router's cluster; the port is that of its pods."""

    @property
    def address(self) -> str:
        """host:port, as channels want it."""
        return address_of(self.host, self.port)


def address_of(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def targets(listed: str) -> tuple[Target, ...]:
    """The entries of a comma-separated list, each once. Raises ValueError, which says what to write instead."""
    return tuple(dict.fromkeys(_target(part.strip()) for part in listed.split(",") if part.strip()))


def _target(text: str) -> Target:
    matched = _TARGET.fullmatch(text)
    if matched is None or not 0 < int(matched["port"]) < 65536:
        raise ValueError(
            f"{text!r} is no address: write host:port, [IPv6]:port, dns:name:port or kubernetes:service:port"
            f"{_hint(text)}"
        )
    is_name, is_service = matched["dns"] is not None, matched["service"] is not None
    return Target(matched["host"].strip("[]"), int(matched["port"]), is_name, is_service)


def _hint(text: str) -> str:
    bare = text.removeprefix("dns:").removeprefix("///").removeprefix("kubernetes:")
    if "://" in text:
        return f"; without a scheme: {text.partition('://')[2].rstrip('/')}"
    if bare.count(":") > 1 and "[" not in bare:
        host, _, port = bare.rpartition(":")
        return f"; if it is IPv6, [{host}]:{port}"
    if ":" not in bare:
        return f"; the port is missing: {text}:50051, for example"
    return "; a port is 1 to 65535"


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


Resolve = Callable[[str, int], Awaitable[frozenset[str]]]
"""The addresses of (host, port). Raises OSError or UnicodeError where there is no answer."""


async def resolve(host: str, port: int) -> frozenset[str]:
    """By the system's resolver, on a thread; IPv4 and IPv6."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(address_of(str(address[0]), port) for *_, address in found)


class DnsMembership:
    """One name. Says nothing until it has been resolved for the first time, then again whenever the answer differs."""

    def __init__(self, host: str, port: int, interval_s: float, resolve: Resolve = resolve) -> None:
        """`interval_s`: seconds between two questions, more or less, so that many routers do not ask at once."""
        self._host = host
        self._port = port
        self._interval_s = interval_s
        self._resolve = resolve
        self._known: frozenset[str] | None = None
        self._num_empty = 0
        self._problem: str | None = None

    async def addresses(self) -> AsyncIterator[frozenset[str]]:
        while True:
            answer = await self._ask()
            if answer is not None and answer != self._known:
                self._known = answer
                told = ", ".join(sorted(answer)) or "nobody"
                _log.info("%s is now %s", self._host, told)
                yield answer
            await asyncio.sleep(self._interval_s * random.uniform(1 - _JITTER, 1 + _JITTER))

    async def _ask(self) -> frozenset[str] | None:
        """What is to be believed now; None: what was known before."""
        try:
            answer = await self._resolve(self._host, self._port)
        except (OSError, UnicodeError) as error:
            nobody = isinstance(error, socket.gaierror) and error.errno in _NOBODY
            if not nobody:
                self._tell(f"cannot be resolved: {error}")
                return None
            answer = frozenset()
        self._num_empty = 0 if answer else self._num_empty + 1
        self._tell(None if answer else "has no addresses")
        return None if 0 < self._num_empty < _EMPTY_ANSWERS else answer

    def _tell(self, problem: str | None) -> None:
        """Once per problem, not per question."""
        if problem is not None and problem != self._problem:
            _log.warning("%s %s; its last known instances are kept for now", self._host, problem)
        self._problem = problem


class JoinedMembership:
    """The union of several. Says nothing before the first of them has."""

    def __init__(self, parts: Sequence[Membership]) -> None:
        self._parts = tuple(parts)

    async def addresses(self) -> AsyncIterator[frozenset[str]]:
        told: dict[int, frozenset[str]] = {}
        news: asyncio.Queue[None] = asyncio.Queue()

        async def follow(index: int, part: Membership) -> None:
            async for addresses in part.addresses():
                told[index] = addresses
                news.put_nowait(None)

        following = [asyncio.create_task(follow(index, part)) for index, part in enumerate(self._parts)]
        for task in following:
            task.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while True:
                await news.get()
                for task in following:
                    if task.done():
                        task.result()  # raises what went wrong with it
                if told:
                    yield frozenset().union(*told.values())
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)


def names_services(listed: str) -> bool:
    """Whether Kubernetes is to be asked. Raises ValueError where `targets` does."""
    return any(target.is_service for target in targets(listed))


Follow = Callable[[str, int], Membership]
"""The pods behind a Service of Kubernetes, at a port of theirs."""


def membership_of(
    listed: str, interval_s: float, resolve: Resolve = resolve, follow: Follow | None = None
) -> Membership:
    """What `listed` says. Raises ValueError where `targets` does, and for Services where nobody can follow them."""
    all_targets = targets(listed)
    fixed = [target.address for target in all_targets if not (target.is_name or target.is_service)]
    parts: list[Membership] = [StaticMembership(fixed)] if fixed or not all_targets else []
    for target in all_targets:
        if target.is_name:
            parts.append(DnsMembership(target.host, target.port, interval_s, resolve))
        elif target.is_service:
            if follow is None:
                raise ValueError(f"kubernetes:{target.address} can be followed by a router in a pod alone")
            parts.append(follow(target.host, target.port))
    return parts[0] if len(parts) == 1 else JoinedMembership(parts)
