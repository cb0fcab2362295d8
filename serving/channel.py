"""Client channels between the services and from clients to the router, and the addresses that they connect to.

A TLS channel follows its files: running calls keep their connection, new calls use the new certificate. In the same way
a channel to a name follows its addresses.

    connected ──the files change, or no peer serves──▶ connected, a successor connects ──it is ready──▶ replaced
                                                       the old one ──its last call ends──▶ closed

gRPC's channel credentials are fixed for the life of a channel (docs/security.md lists what was tried), so each state of
the files gets a channel. The old connection serves until its successor is ready: no call waits for a handshake, and
files that the peer rejects break no working connection. While the old one is not connected, calls try the successor
until it has failed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partialmethod
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from serving.settings import Section, setting
from serving.tls import TlsFiles, TlsMaterial
from serving.waits import Redial

MAX_METADATA_BYTES = 8192
MAX_INT = 2**31 - 1
"""Of gRPC's options, which are C ints."""


class ChannelSettings(Section):
    """Connections from this process to other instances."""

    keepalive_ms: int = setting(1000, "Milliseconds between pings to a silent peer.", ge=500, le=MAX_INT)
    ping_timeout_ms: int = setting(
        1000, "Milliseconds after which an unanswered ping ends a connection.", ge=100, le=MAX_INT
    )
    max_backoff_ms: int = setting(500, "Longest wait in milliseconds between attempts to connect.", ge=100, le=MAX_INT)
    max_message_bytes: int = setting(
        4 << 20, "Longest message in bytes that is accepted from a peer.", ge=1024, le=MAX_INT
    )


def channel_options(settings: ChannelSettings) -> list[tuple[str, str | int]]:
    """Measured with a peer stopped by SIGSTOP: keepalive of 1 s alone detects nothing in 40 s; with `ping_timeout_ms`
    1000 the call fails within 2 s."""
    return [
        ("grpc.keepalive_time_ms", settings.keepalive_ms),
        ("grpc.keepalive_timeout_ms", settings.ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", settings.ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.min_reconnect_backoff_ms", 2000),  # each attempt has as long; the next one may follow at once
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", settings.max_backoff_ms),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.enable_retries", 0),  # only the router may send a request twice
        ("grpc.enable_http_proxy", 0),  # an instance is never behind the environment's web proxy
    ]


def open_channel(
    address: str,
    settings: ChannelSettings | None = None,
    *,
    tls: TlsFiles | None = None,
    peer_name: str | None = None,
    options: Sequence[tuple[str, str | int]] | None = None,
    redial_s: float | None = None,
) -> grpc.aio.Channel:
    """A channel to `address` (host:port or any gRPC target); it connects at the first call. Close it when done.

    `tls` None is plaintext; with TLS the peer must present a certificate of the files' CA, and is presented theirs.
    `peer_name` is the name that the peer's certificate must carry; None: the address's host. `options` take the place
    of `settings`. `redial_s` is how often, at most, a channel that reaches no peer is replaced by one that resolves the
    name of `address` again, in an outage ever less often; None: never.
    """
    chosen = [*(channel_options(settings or ChannelSettings()) if options is None else options)]
    if tls is not None and peer_name is not None:
        chosen.append(("grpc.ssl_target_name_override", peer_name))

    def dial(material: TlsMaterial | None) -> grpc.aio.Channel:
        if material is None:
            return grpc.aio.insecure_channel(address, options=chosen)
        return grpc.aio.secure_channel(address, channel_credentials(material), options=chosen)

    return dial(None) if tls is None and redial_s is None else ReloadingChannel(tls, dial, redial_s)


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.ca, material.key, material.chain)


class _Connection:
    """A channel made from one state of the files, and its number of open calls."""

    def __init__(self, material: TlsMaterial | None, channel: grpc.aio.Channel) -> None:
        self._loop = asyncio.get_running_loop()
        self.material = material
        self.channel = channel
        self.num_calls = 0
        self.has_failed = False
        """Of a successor: an attempt to connect with this material has failed."""
        self.is_retired = False
        self._closing: asyncio.Task[None] | None = None

    def count_call(self, call: Any) -> None:
        self.num_calls += 1
        call.add_done_callback(self._on_done)

    def retire(self) -> None:
        self.is_retired = True
        self._close_if_idle()

    def _on_done(self, call: Any) -> None:
        """A forgotten call ends when it is garbage collected: on any thread, maybe after the loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.num_calls -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self.is_retired and self.num_calls == 0 and self._closing is None:
            self._closing = self._loop.create_task(self.channel.close())


class ReloadingChannel(grpc.aio.Channel):
    """Used like any channel, by stubs too. Belongs to the event loop that it was made on."""

    def __init__(
        self,
        files: TlsFiles | None,
        dial: Callable[[TlsMaterial | None], grpc.aio.Channel],
        redial_s: float | None = None,
    ) -> None:
        """`files` None is plaintext; `redial_s` as in `open_channel`."""
        self._files = files
        self._dial = dial
        self._redial = None if redial_s is None else Redial(redial_s)
        material = self._material()
        self._current = _Connection(material, dial(material))
        self._successor: _Connection | None = None
        self._old: set[_Connection] = set()
        self._promoting: asyncio.Task[None] | None = None
        self._is_closed = False

    def connection(self) -> _Connection:
        """The connection for a call that begins now."""
        material = self._material()
        newest = self._successor or self._current
        if not self._is_closed and (material is not newest.material or self._may_be_elsewhere(newest)):
            self._prepare_successor(material)
        is_ready = self._current.channel.get_state() is grpc.ChannelConnectivity.READY
        if (successor := self._successor) is None or is_ready:
            return self._current
        is_rejected = successor.has_failed and successor.material is not self._current.material
        return self._current if is_rejected else successor

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.connection().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.connection().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.connection().channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Ends every call, those on older connections too."""
        self._is_closed = True
        if self._promoting is not None:
            self._promoting.cancel()
        connections = [self._current, *self._old, *([self._successor] if self._successor else [])]
        await asyncio.gather(*(one.channel.close(grace) for one in connections))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _method(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        def begin(*call_args: Any, **call_kwargs: Any) -> Any:
            connection = self.connection()
            call = getattr(connection.channel, kind)(*args, **kwargs)(*call_args, **call_kwargs)
            connection.count_call(call)
            return call

        return begin

    unary_unary: Any = partialmethod(_method, "unary_unary")
    unary_stream: Any = partialmethod(_method, "unary_stream")
    stream_unary: Any = partialmethod(_method, "stream_unary")
    stream_stream: Any = partialmethod(_method, "stream_stream")

    def _material(self) -> TlsMaterial | None:
        return None if self._files is None else self._files.current()

    def _may_be_elsewhere(self, newest: _Connection) -> bool:
        """Whether to resolve the peer's name again: gRPC does so only when a connection ends, and that of a server
        which drains lasts as long as its streams do."""
        if self._redial is None:
            return False
        state, states = newest.channel.get_state(), grpc.ChannelConnectivity
        now_s = asyncio.get_running_loop().time()
        return self._redial.is_due(now_s, is_ready=state is states.READY, is_failed=state is states.TRANSIENT_FAILURE)

    def _prepare_successor(self, material: TlsMaterial | None) -> None:
        replaced, self._successor = self._successor, _Connection(material, self._dial(material))
        if self._promoting is not None:
            self._promoting.cancel()
        if replaced is not None:
            self._successor.has_failed = replaced.has_failed and replaced.material is material
            self._retire(replaced)
        self._promoting = asyncio.get_running_loop().create_task(self._promote(self._successor))

    async def _promote(self, successor: _Connection) -> None:
        while (state := successor.channel.get_state(True)) is not grpc.ChannelConnectivity.READY:
            successor.has_failed |= state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
            await successor.channel.wait_for_state_change(state)
        if self._successor is successor:
            self._retire(self._current)
            self._current, self._successor = successor, None

    def _retire(self, connection: _Connection) -> None:
        self._old = {one for one in (*self._old, connection) if one.num_calls}
        connection.retire()


# Networks where plaintext is allowed. Not among them: link-local addresses, one of which serves a cloud machine's
# credentials; and 0.0.0.0 and [::], which include public addresses.
_PRIVATE = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("127.0.0.0/8", "::1/128"),  # this machine
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),  # RFC 1918
        "100.64.0.0/10",  # RFC 6598: pods of several clouds
        "fc00::/7",  # RFC 4193
    )
)


def is_private(ip: str) -> bool:
    """Whether an IP address, without brackets, is one of a private network. Raises ValueError for anything else."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:8.8.8.8 reaches 8.8.8.8
    address = mapped or address
    return any(address in network for network in _PRIVATE if network.version == address.version)


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def listens_privately(host: str) -> bool:
    """Whether a server bound to `host`, an IP or a name, is reachable from private networks alone. Raises OSError."""
    if is_ip(host):
        return is_private(host)
    with _named_errors(host):
        return all(is_private(str(entry[4][0])) for entry in socket.getaddrinfo(host, None))


async def resolve(host: str) -> list[str]:
    """The addresses of a name, in the system's order. Raises OSError."""
    with _named_errors(host):
        entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def ip_target(ips: Sequence[str], port: int) -> str:
    """A gRPC target whose addresses are tried in turn, the next one a quarter of a second later. A target has one
    family: beside IPv6 addresses one of IPv4 is written as a mapped one, which gRPC connects to over IPv4."""
    if not any(":" in ip for ip in ips):
        return f"ipv4:{','.join(f'{ip}:{port}' for ip in ips)}"
    return f"ipv6:{','.join(f'[{ip}]:{port}' if ':' in ip else f'[::ffff:{ip}]:{port}' for ip in ips)}"


@contextmanager
def _named_errors(host: str) -> Iterator[None]:
    """OSErrors that name the host, also for what no name may be: an empty label, or one of more than 63 characters."""
    try:
        yield
    except socket.gaierror as error:
        raise OSError(f"{host} cannot be resolved: {error.strerror}") from None
    except UnicodeError:
        raise OSError(f"{host} is not a DNS name") from None
