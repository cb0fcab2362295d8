"""Service discovery: the addresses of a pool, from a list, the DNS, Services of Kubernetes, a local stack, or several.

    "host:port, [IPv6]:port, dns:name:port" ──parse_targets──▶ StaticDiscovery, DnsDiscovery ──▶ sets of addresses
    "kubernetes:service:port" ──────────────▶ EndpointSliceDiscovery (router/kubernetes) ──────▶
    "unix:/PATH" of a local stack ──────────▶ StackDiscovery ──────────────────────────────────▶

A discovery says which instances to watch; their health is for the watches. So a source that does not answer changes
nothing. An address that is gone gets no new calls, and what runs there ends by itself (pool.py).
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import grpc
import grpc.aio

from protos.tandem.v1 import stack_pb2, stack_pb2_grpc
from router.pools.instance_info import WIRE_ROLES, Role
from serving.settings import format_address
from serving.waits import end_tasks

_log = logging.getLogger(__name__)

_TARGET = re.compile(
    r"((?P<dns>dns:(///)?)|(?P<service>kubernetes:))?"
    r"(?P<host>\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[^\s\[\]:/]+):(?P<port>[0-9]{1,5})"
)
_JITTER = 0.2
_EMPTY_ANSWERS = 3
"""Empty answers in a row that count: a service whose instances are all unready briefly has no addresses."""
_NO_ADDRESSES = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
_RETRY_S, _MAX_RETRY_S = 1.0, 30.0
"""Until a discovery begins again that an exception has ended."""
_STACK_RETRY_S = 0.2
"""The stack's socket is local, and its clients are few: the workers of this router."""


class Target(NamedTuple):
    """One entry of a list of addresses."""

    host: str
    """Without brackets."""
    port: int
    is_name: bool
    """To be resolved repeatedly."""
    is_service: bool = False
    """The name of a Service in the router's cluster; the port is that of its pods."""

    @property
    def address(self) -> str:
        """host:port, as channels want it."""
        return format_address(self.host, self.port)


def parse_targets(text: str) -> tuple[Target, ...]:
    """The entries of a comma-separated list, each once. Raises ValueError, which says what to write instead."""
    return tuple(dict.fromkeys(_parse_target(part.strip()) for part in text.split(",") if part.strip()))


def _parse_target(text: str) -> Target:
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
    if "://" in text.removeprefix("dns:///"):
        return f"; without a scheme: {text.partition('://')[2].rstrip('/')}"
    if bare.count(":") > 1 and "[" not in bare:
        host, _, port = bare.rpartition(":")
        return f"; if it is IPv6, [{host}]:{port}"
    if ":" not in bare:
        return f"; the port is missing: {text}:50051, for example"
    return "; a port is 1 to 65535"


class ServiceDiscovery(Protocol):
    """A source of a pool's addresses."""

    def addresses(self) -> AsyncIterator[frozenset[str]]:
        """Every address of the pool, again whenever the set has changed."""


class DiscoveryLog:
    """Logs the changes of one source's addresses, and each of its problems once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._problem: str | None = None

    async def changes(self, found: AsyncIterator[frozenset[str]]) -> AsyncIterator[frozenset[str]]:
        """The first of the sets that are `found`, and each that differs from the one before."""
        last: frozenset[str] | None = None
        async for addresses in found:
            if addresses != last:
                last = addresses
                _log.info("%s: %s", self._source, ", ".join(sorted(addresses)) or "no instances")
                yield addresses

    def set_problem(self, problem: str | None) -> None:
        """What is wrong with the source now; None: nothing."""
        if problem is not None and problem != self._problem:
            _log.warning("%s: %s; its last known instances are kept", self._source, problem)
        self._problem = problem


async def follow(discovery: ServiceDiscovery, on_addresses: Callable[[frozenset[str]], None], what: str) -> None:
    """Calls `on_addresses` for each set, until the discovery ends. An exception of either is logged, with `what` they
    are, and the discovery begins again, after an ever longer pause."""
    retry_s = _RETRY_S
    while True:
        began_s = time.monotonic()
        try:
            async for addresses in discovery.addresses():
                on_addresses(addresses)
            return
        except Exception:
            if time.monotonic() - began_s > _MAX_RETRY_S:  # it has worked
                retry_s = _RETRY_S
            _log.exception("%s are no longer followed; the next attempt is in %g s", what, retry_s)
        await asyncio.sleep(retry_s)
        retry_s = min(2 * retry_s, _MAX_RETRY_S)


class StaticDiscovery:
    """A list that never changes."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = frozenset(addresses)

    async def addresses(self) -> AsyncIterator[frozenset[str]]:
        yield self._addresses


Resolve = Callable[[str, int], Awaitable[frozenset[str]]]
"""The addresses of (host, port). Raises OSError, UnicodeError or, without a thread to ask on, RuntimeError where there
is no answer."""


async def resolve(host: str, port: int) -> frozenset[str]:
    """All A and AAAA addresses, by the system's resolver on a thread."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(format_address(str(address[0]), port) for *_, address in found)


class DnsDiscovery:
    """One name, resolved about every `interval_s`, with jitter so that many routers do not ask at once."""

    def __init__(self, host: str, port: int, interval_s: float, resolve: Resolve = resolve) -> None:
        self._host = host
        self._port = port
        self._interval_s = interval_s
        self._resolve = resolve
        self._num_empty = 0
        self._log = DiscoveryLog(host)

    def addresses(self) -> AsyncIterator[frozenset[str]]:
        return self._log.changes(self._answers())

    async def _answers(self) -> AsyncIterator[frozenset[str]]:
        while True:
            if (answer := await self._accepted_answer()) is not None:
                yield answer
            await asyncio.sleep(self._interval_s * random.uniform(1 - _JITTER, 1 + _JITTER))

    async def _accepted_answer(self) -> frozenset[str] | None:
        """The answer; None while there is none, or an empty one has not come often enough."""
        try:
            answer = await self._resolve(self._host, self._port)
        except (OSError, UnicodeError, RuntimeError) as error:
            if not (isinstance(error, socket.gaierror) and error.errno in _NO_ADDRESSES):
                self._log.set_problem(f"cannot be resolved: {error}")
                return None
            answer = frozenset()
        self._num_empty = 0 if answer else self._num_empty + 1
        self._log.set_problem(None if answer else "has no addresses")
        return None if 0 < self._num_empty < _EMPTY_ANSWERS else answer


class StackDiscovery:
    """One pool of a local stack, over a channel to the stack's socket, which the caller closes.

    An instance that is removed vanishes from here at once, before it drains.
    """

    def __init__(self, channel: grpc.aio.Channel, role: Role) -> None:
        self._stub = stack_pb2_grpc.StackServiceStub(channel)
        self._role = role
        self._log = DiscoveryLog(f"{role} pool of the local stack")

    def addresses(self) -> AsyncIterator[frozenset[str]]:
        return self._log.changes(self._found())

    async def _found(self) -> AsyncIterator[frozenset[str]]:
        while True:
            call = self._stub.WatchStack(stack_pb2.WatchStackRequest())
            try:
                async for answer in call:
                    self._log.set_problem(None)
                    for pool in answer.pools:
                        if pool.role == WIRE_ROLES[self._role]:
                            yield frozenset(pool.addresses)
                self._log.set_problem("ended the stream")
            except grpc.aio.AioRpcError as error:
                self._log.set_problem(f"does not answer: {error.code().name}")
            finally:
                call.cancel()
            await asyncio.sleep(_STACK_RETRY_S)


class CombinedDiscovery:
    """The union of several discoveries, each of which is followed by itself. Yields nothing before the first of them
    has."""

    def __init__(self, parts: Sequence[ServiceDiscovery]) -> None:
        self._parts = tuple(parts)
        self._found: dict[int, frozenset[str]] = {}
        """By part. It outlives an iteration that an exception has ended: the next one must not begin with fewer."""

    async def addresses(self) -> AsyncIterator[frozenset[str]]:
        changed: asyncio.Queue[None] = asyncio.Queue()

        def note(index: int, addresses: frozenset[str]) -> None:
            self._found[index] = addresses
            changed.put_nowait(None)

        following = [
            asyncio.create_task(follow(part, partial(note, index), "some addresses of a pool"))
            for index, part in enumerate(self._parts)
        ]
        try:
            while True:
                await changed.get()
                yield frozenset().union(*self._found.values())
        finally:
            await end_tasks(*following)


DiscoverService = Callable[[str, int], ServiceDiscovery]
"""The pods behind a Service of Kubernetes, at a port of theirs."""


def discovery_of(
    text: str, interval_s: float, resolve: Resolve = resolve, discover_service: DiscoverService | None = None
) -> ServiceDiscovery:
    """For a list of targets. Raises ValueError where `parse_targets` does, and for Services outside of a cluster."""
    targets = parse_targets(text)
    fixed = [target.address for target in targets if not (target.is_name or target.is_service)]
    parts: list[ServiceDiscovery] = [StaticDiscovery(fixed)] if fixed or not targets else []
    for target in targets:
        if target.is_name:
            parts.append(DnsDiscovery(target.host, target.port, interval_s, resolve))
        elif target.is_service:
            if discover_service is None:
                raise ValueError(f"kubernetes:{target.address} is supported only by a router that runs in a pod")
            parts.append(discover_service(target.host, target.port))
    return parts[0] if len(parts) == 1 else CombinedDiscovery(parts)
