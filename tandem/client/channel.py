"""From the address of one or several routers to a channel that follows the client's TLS files.

Of several routers, each request goes to one that is SERVING, in turn, and a request that is rejected with UNAVAILABLE
before any part of its answer has come is retried at another: gRPC's own round_robin, health checks and retries. So a
router may restart without an error at its clients, and no token can come twice. What has begun is continued by
tandem/client/resumption.py.

A fork leaves gRPC's threads behind, so a client belongs to the process that created it (`Owner`).

serving/channel.py has the asyncio counterpart of `ClientChannel`. TLS modules are imported late: a plaintext
client saves a tenth of a second.
"""

from __future__ import annotations

import ipaddress
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import grpc
import grpc.aio

from engine.errors import shown
from protos.tandem.v1 import generation_pb2_grpc
from serving.waits import Redial
from tandem.client.credentials import Credentials
from tandem.client.errors import TandemError, dns_parts
from tandem.client.registry import has_proxy, is_local, running_address

if TYPE_CHECKING:
    from serving.tls import TlsFiles, TlsMaterial

Options = tuple[tuple[str, int | str], ...]
ROUTER_SERVICE = "tandem.v1.GenerationService"
MAX_TIMEOUT_S = 1e8
"""Three years. Centuries, or an infinite time, overflow in gRPC, whose calls then end at once."""
MAX_RETRIES = 4
"""gRPC makes at most five attempts: with the backoff below some three seconds, in which the client finds a restarted
router again (half a second, and its health)."""
KEEPALIVE: Options = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""A frozen router, whose kernel still acknowledges, is noticed after 15 s. Without the third a ping may take 60 s, and
without the fourth the pings of a call that receives nothing are minutes apart."""
ADMIN_OPTIONS: Options = (*KEEPALIVE, ("grpc.use_local_subchannel_pool", 1))
"""Of a channel to a router's admin listener."""
_OPTIONS: Options = (
    *KEEPALIVE,
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.per_rpc_retry_buffer_size", 8 << 20),  # of 256 KiB: a longer request is sent to one router alone
    ("grpc.use_local_subchannel_pool", 1),  # two clients must not share a connection: its loss would hit both
    ("grpc.min_reconnect_backoff_ms", 5000),  # each attempt to connect has as long
    ("grpc.initial_reconnect_backoff_ms", 100),  # a router that restarts is found again at once
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),  # of 30 s: in a rollout the addresses change in less
)
MAX_HANDSHAKE_S = 5.0
"""That a call waits for a connection with newer TLS files, at the most: as long as an attempt to connect has."""
MIN_REDIAL_S = 1.0
"""Between two channels of one name, at the least."""
_FORK_REMEDY = (
    "start the process by spawn (multiprocessing.get_context('spawn')), or close every client well before the fork, "
    "and create a client in it"
)
_open = WeakSet[object]()
"""What holds the gRPC objects of open clients."""
_kept: list[object] = []
"""In a fork: the parent's clients and calls, since what gRPC frees it ends, in the parent's connection."""


@dataclass(frozen=True, slots=True)
class Target:
    """The arguments of a channel to one or several routers."""

    address: str
    """For messages: the caller's, or the local stack's."""
    target: str
    """For gRPC."""
    options: Options


def router_target(address: str | Sequence[str] | None, retries: int | None) -> Target:
    """The target of `address`: host:port, several IP addresses with ports (a list, or separated by commas), or
    dns:name:port for every address of a name; None for the local stack.

    `retries` limits the retries of a rejected request; None: 0 for a single address, else gRPC's maximum.
    Raises ValueError, which says what to write, and NotRunning.
    """
    if retries is not None and not 0 <= retries <= MAX_RETRIES:
        raise ValueError(f"retries: is {retries}; allowed: 0..{MAX_RETRIES}")
    given = address.split(",") if isinstance(address, str) else address
    addresses = [running_address()] if given is None else [one.strip() for one in given]
    if not addresses or not all(addresses):
        raise ValueError("address: is empty; give host:port of a router")
    for one in addresses:
        check_port("address", one)
    name = ",".join(addresses)
    if len(addresses) > 1:
        target, is_several = f"{_ip_scheme(addresses)}:{name}", True
    else:
        is_several = name.startswith("dns:")
        target = "dns://{}/{}".format(*dns_parts(name)) if is_several else name
    retries = (MAX_RETRIES if is_several else 0) if retries is None else retries
    config = ("grpc.service_config", json.dumps(_service_config(is_several, retries)))
    return Target(name, target, (*_OPTIONS, config))


def check_port(name: str, address: str) -> None:
    """Raises ValueError for a port above 65535, of which gRPC would call the remainder by 65536."""
    port = address.rpartition(":")[2]
    if port.isdecimal() and (len(port) > 5 or int(port) > 65535):
        raise ValueError(f"{name}: {shown(address)} has no valid port; allowed: 1..65535")


def _ip_scheme(addresses: Sequence[str]) -> str:
    """ipv4 or ipv6. gRPC takes a list of IP addresses of one version, but only a single name."""
    versions = set()
    for address in addresses:
        host, colon, port = address.rpartition(":")
        try:
            versions.add(ipaddress.ip_address(host.strip("[]")).version)
        except ValueError:
            colon = ""
        if not (colon and port.isdecimal()):
            raise ValueError(
                f"address: several routers are given by their IP addresses with ports, which {address!r} is not; "
                "for a name with several addresses write dns:name:port, alone"
            )
    if len(versions) > 1:
        raise ValueError("address: IPv4 and IPv6 addresses do not go together in one list")
    return f"ipv{versions.pop()}"


def _service_config(is_several: bool, retries: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if is_several:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": ROUTER_SERVICE}
    if retries:
        policy = {
            "maxAttempts": retries + 1,
            "initialBackoff": "0.2s",
            "maxBackoff": "2s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        config["methodConfig"] = [{"name": [{"service": ROUTER_SERVICE}], "retryPolicy": policy}]
    return config


def open_async_channel(target: str, options: Options, credentials: Credentials) -> grpc.aio.Channel:
    """A channel for the running event loop that follows the TLS files. Raises ValueError."""
    options = _without_proxy(target, options)
    files = _tls_files(credentials)
    redial_s = MIN_REDIAL_S if _is_name(target) else None
    if files is None and redial_s is None:
        return grpc.aio.insecure_channel(target, options=options)
    from serving.channel import open_channel

    peer_name = _peer_name(target, credentials)
    return open_channel(target, tls=files, peer_name=peer_name, options=options, redial_s=redial_s)


def open_blocking_channel(
    target: str, options: Options, credentials: Credentials, material: TlsMaterial | None = None
) -> grpc.Channel:
    """A channel with the TLS files as they are now, or as they were in `material`. Raises ValueError."""
    options = _without_proxy(target, options)
    if material is None and (files := _tls_files(credentials)) is not None:
        material = files.current()
    if material is None:
        return grpc.insecure_channel(target, options=options)
    from serving.channel import channel_credentials

    if (peer_name := _peer_name(target, credentials)) is not None:
        options = (*options, ("grpc.ssl_target_name_override", peer_name))
    return grpc.secure_channel(target, channel_credentials(material), options=options)


def _peer_name(target: str, credentials: Credentials) -> str | None:
    """The name that a router's certificate must carry; None: the host of `target`. For a list of addresses gRPC takes
    the whole list for a name, so they need one. Raises ValueError."""
    scheme, _, listed = target.partition(":")
    is_list = scheme in ("ipv4", "ipv6") and "," in listed
    if credentials.ca_file is None or credentials.server_name is not None or not is_list:
        return credentials.server_name
    hosts = {address.rpartition(":")[0].strip("[]") for address in listed.split(",")}
    if len(hosts) > 1:
        raise ValueError(
            f"server_name: is missing; TLS to several hosts ({', '.join(sorted(hosts))}) needs the name that the "
            "certificate of each carries: give it as server_name (--server-name), or give dns:name:port as the address"
        )
    return hosts.pop()


def _without_proxy(target: str, options: Options) -> Options:
    """`options`, for a server on this machine without the proxy of the environment: it cannot reach this machine's."""
    return (*options, ("grpc.enable_http_proxy", 0)) if has_proxy() and is_local(target) else options


def _is_name(target: str) -> bool:
    """Whether a gRPC target stands for all addresses of a name, and so for others later."""
    return target.startswith("dns:")


def _state(channel: grpc.Channel, *, connect: bool = False) -> grpc.ChannelConnectivity | None:
    """grpcio has the state of a blocking channel only for subscribers, which cost a thread that polls, and inside."""
    number = getattr(getattr(channel, "_channel", None), "check_connectivity_state", lambda connect: None)(connect)
    return next((state for state in grpc.ChannelConnectivity if state.value[0] == number), None)


def _tls_files(credentials: Credentials) -> TlsFiles | None:
    """The client's TLS files; None for plaintext. Raises ValueError, which names the file."""
    if credentials.ca_file is None:
        return None
    from serving.tls import TlsFiles

    return TlsFiles(credentials.ca_file, credentials.cert_file, credentials.key_file)


def client_closed() -> TandemError:
    """Of a call that the client's `close` ended, or that comes later."""
    return TandemError("CANCELLED", "the client has been closed")


class Owner:
    """The process that created a client, while the client is open.

    After a fork gRPC's threads have ended in the child, while its locks stay as they are and its connections are
    shared: a call of the parent's client would wait forever, or write into the parent's connection. So a client
    belongs to the process that created it. Where one was open at the fork, the child's own clients would wait as well,
    unless gRPC has prepared for the fork (`GRPC_ENABLE_FORK_SUPPORT=1`). After a `close` gRPC's threads end within a
    fraction of a second.
    """

    def __init__(self, client: object) -> None:
        """`client` is what holds gRPC's objects. Raises TandemError where gRPC cannot work since a fork."""
        if _kept and not _is_prepared():
            raise TandemError(
                "FAILED_PRECONDITION",
                f"a client was open when this process was forked; gRPC does not allow it: {_FORK_REMEDY}",
            )
        self._pid = os.getpid()
        self._client = ref(client)
        _open.add(client)

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises TandemError in another process."""
        if not self.is_here:
            problem = f"the client belongs to process {self._pid}, of which this one is a fork"
            raise TandemError("FAILED_PRECONDITION", f"{problem}: {_FORK_REMEDY}")

    def closed(self) -> None:
        _open.discard(self._client())

    def keep(self, call: object) -> None:
        """In another process: a call that must not end there."""
        _kept.append(call)


def _is_prepared() -> bool:
    """As gRPC reads it."""
    return os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in ("1", "t", "true", "y", "yes")


os.register_at_fork(after_in_child=lambda: _kept.extend(_open))


@dataclass(slots=True, eq=False)
class Connection:
    """A channel with one state of the TLS files, and its number of calls."""

    channel: grpc.Channel
    stub: Any
    """Made with the channel, since gRPC crashes where one is made on a closed channel. Typed for asyncio's alone."""
    material: TlsMaterial | None
    num_calls: int = 0
    is_settled: threading.Event = field(default_factory=threading.Event)
    """Of a successor: its first attempt to connect has ended, or the client was closed."""
    has_failed: bool = False
    """Of a successor: its first attempt has failed."""

    def settle(self) -> None:
        """Connects; `is_settled` follows."""
        self.channel.subscribe(self._on_state, try_to_connect=True)

    def close(self) -> None:
        self.is_settled.set()
        self.channel.close()

    def _on_state(self, state: grpc.ChannelConnectivity) -> None:
        if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
            self.channel.unsubscribe(self._on_state)
            self.has_failed = state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
            self.is_settled.set()


def _is_lost(connection: Connection) -> bool:
    """It has failed, or its state is unknown. One that is idle connects."""
    return _state(connection.channel, connect=True) in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, None)


class ClientChannel:
    """A blocking channel that follows the TLS files, and where it is one of a name, its addresses. Thread-safe.

        connected ──the files change──▶ connected, a successor connects ──it is ready, or has to be tried──▶ replaced
            └──none of the routers that it knows serves──▶ replaced
        the old one ──its last call ends──▶ closed

    The calls that come after a change wait for the successor's first handshake. If that fails, the old connection
    serves on, and connects again where it has to, while the successor goes on trying. A successor that has not failed
    is used where the old connection has.

    gRPC asks for a name's addresses again when a connection ends. That of a router that drains lasts as long as its
    streams do, while the router does not take new calls.
    """

    def __init__(self, target: str, options: Options, credentials: Credentials) -> None:
        """Raises ValueError for an unusable file, and TandemError where a fork prevents it."""
        self.owner = Owner(self)
        self._dial = partial(open_blocking_channel, target, options, credentials)
        self._files = _tls_files(credentials)
        self._redial = Redial(MIN_REDIAL_S) if _is_name(target) else None
        self._lock = threading.RLock()
        """Reentrant: the garbage collector may end an abandoned call on a thread that holds it."""
        self.closed = threading.Event()
        self._current = self._connect(self._material())
        self._successor: Connection | None = None
        """With newer files."""
        self._retired: set[Connection] = set()
        """Older ones that have calls."""

    @contextmanager
    def connection(self, timeout_s: float = 0.0) -> Iterator[Connection]:
        """The connection for one call of at most `timeout_s`, which ends within the `with`. Raises `client_closed`,
        also for a call that gRPC rejects with ValueError since `close` came before its beginning; and TandemError in
        another process."""
        self.owner.check()  # before the lock, which a thread of the parent may have held at the fork
        if (successor := self._follow()) is not None:
            successor.is_settled.wait(min(timeout_s / 2, MAX_HANDSHAKE_S))
        connection = self._begin_call()
        try:
            yield connection
        except ValueError:
            if self.closed.is_set():
                raise client_closed() from None
            raise
        finally:
            if self.owner.is_here:
                self._end_call(connection)

    def close(self) -> None:
        """Cancels every call, those on older connections too. In another process it closes nothing."""
        if not self.owner.is_here:
            return
        self.owner.closed()
        with self._lock:
            self.closed.set()
            connections = [self._current, *self._retired, *([self._successor] if self._successor else [])]
        for connection in connections:
            connection.close()

    def _follow(self) -> Connection | None:
        """Follows the files and the name; returns the successor, if there is one."""
        with self._lock:
            self._check_open()
            if self._may_be_elsewhere():
                is_rejected = self._successor is not None and self._successor.has_failed
                self._replace_current(self._connect(self._current.material if is_rejected else self._material()))
            newest, material = self._successor or self._current, self._material()
            if material is not newest.material:
                if self._successor is not None:
                    self._successor.close()
                successor = self._connect(material)
                successor.settle()
                self._successor = successor
            return self._successor

    def _begin_call(self) -> Connection:
        with self._lock:
            self._check_open()
            if self._successor is not None and (
                _state(self._successor.channel, connect=True) is grpc.ChannelConnectivity.READY
                or (_is_lost(self._current) and not self._successor.has_failed)
            ):
                self._replace_current(self._successor)
            self._current.num_calls += 1
            return self._current

    def _replace_current(self, successor: Connection) -> None:
        if self._successor is not None and self._successor is not successor:
            self._successor.close()
        retired, self._current, self._successor = self._current, successor, None
        self._retired.add(retired)
        self._close_if_idle(retired)

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise client_closed()

    def _may_be_elsewhere(self) -> bool:
        if self._redial is None:
            return False
        state, states = _state(self._current.channel), grpc.ChannelConnectivity
        return self._redial.is_due(
            time.monotonic(), is_ready=state is states.READY, is_failed=state is states.TRANSIENT_FAILURE
        )

    def _material(self) -> TlsMaterial | None:
        return None if self._files is None else self._files.current()

    def _connect(self, material: TlsMaterial | None) -> Connection:
        channel = self._dial(material)
        return Connection(channel, generation_pb2_grpc.GenerationServiceStub(channel), material)  # type: ignore[arg-type]

    def _end_call(self, connection: Connection) -> None:
        with self._lock:
            connection.num_calls -= 1
            self._close_if_idle(connection)

    def _close_if_idle(self, connection: Connection) -> None:
        if connection.num_calls == 0 and connection in self._retired:
            self._retired.remove(connection)
            connection.close()
