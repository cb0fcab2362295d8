"""One gRPC server: limits against abuse, health, reflection, and a drain that loses no call.

created ──start──▶ serving ──drain──▶ not ready ──drain_accept_s──▶ rejecting ──calls end or drain_grace_s──▶ stopped

A drain first sets readiness to NOT_SERVING but keeps accepting, because clients notice it only after a moment; then it
rejects requests with UNAVAILABLE "draining", waits for running ones, and stops last: grpcio's `stop` closes the port at
once. Calls that still run then, or when `stop` comes first, end with UNAVAILABLE and a retry hint.
An authorizer checks every call except health and reflection. A plaintext port of its own can serve health alone, with
its own quotas: kubelet has no certificate, and clients that exhaust the other port's connections or calls must not make
its probes fail. The object belongs to one event loop and one composition root.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from serving.channel import MAX_INT, MAX_METADATA_BYTES
from serving.errors import NotFound, Unavailable, printable
from serving.interceptor import Authorizer, CallInterceptor, CallLimits, Context
from serving.limits import CONTROL, AbuseLimits, CallPolicy, LargeMessages, OpenCalls
from serving.settings import MAX_TIME_S, Address, Section, format_address, parse_address, setting
from serving.tls import HANDSHAKE_TIMEOUT_S, TlsFiles, TlsMaterial
from serving.waits import Broadcast

_MAX_S = MAX_INT // 1000
"""Of times that gRPC gets in milliseconds."""


class ServerSettings(Section):
    """The gRPC port of this process and its limits."""

    host: str = setting("127.0.0.1", "Address to listen on; a pod listens on its own IP.", flag="--host")
    port: int = setting(0, "Port to listen on; 0 takes a free one.", flag="--port", ge=0, le=65535)
    advertise: str | None = setting(None, "host:port reported to peers; none: the address listened on.")
    max_message_bytes: int = setting(4 << 20, "Longest request message in bytes.", ge=1024, le=MAX_INT)
    max_calls: int = setting(4096, "Open calls in total.", ge=1)
    max_calls_per_peer: int = setting(128, "Open calls from one address.", ge=1)
    max_large_messages_per_peer: int = setting(
        1,
        "Messages of 256 KiB and more from one address (of each tenant there) that are parsed at a time, each followed"
        " by a pause of forty times its CPU time; 8 times as many wait. More behind a gateway, whose clients share its"
        " address.",
        ge=1,
    )
    max_bad_calls_per_s: float = setting(
        100.0,
        "Failed calls per second from one address, twice as many in a burst. Beyond it answers to invalid requests are"
        " delayed, and a connection that cancels calls before a request was sent is dropped.",
        gt=0,
    )
    max_streams_per_connection: int = setting(
        1024, "HTTP/2 streams on one connection; further calls wait.", ge=1, le=MAX_INT
    )
    max_connections: int = setting(
        16384, "Open connections, at most 3/4 of the open files; further ones are closed.", ge=1
    )
    max_idle_s: float = setting(300.0, "Seconds that a connection without a call is kept.", ge=1, le=_MAX_S)
    max_connection_age_s: float | None = setting(
        None,
        "Seconds after which a connection accepts no new call, so that clients behind a connection balancer reconnect"
        " and spread; none: never. Running calls continue.",
        gt=0,
        le=_MAX_S,
    )
    max_connection_age_grace_s: float | None = setting(
        None, "Seconds after which calls still running on such a connection are cut off; none: never.", gt=0, le=_MAX_S
    )
    max_deadline_s: float = setting(
        600.0, "Longest call in seconds, whatever the client's deadline.", gt=0, le=MAX_TIME_S
    )
    read_timeout_s: float = setting(10.0, "Seconds within which the message of a call must arrive.", gt=0)
    write_timeout_s: float = setting(10.0, "Seconds a message may wait for a client that does not read.", gt=0)
    drain_accept_s: float = setting(5.0, "Seconds that a drain still accepts requests, until peers notice.", ge=0)
    drain_grace_s: float = setting(30.0, "Seconds that a drain then waits for running requests.", ge=0)
    allow_plaintext: bool = setting(
        False,
        "Without TLS, let other instances and routers connect, and connect to them, on addresses outside private"
        " networks: for networks that are protected otherwise.",
    )
    reflection: bool = setting(True, "Serve gRPC reflection, for grpcurl and `buf curl`.")


class HealthSettings(Section):
    """A plaintext port for probes, beside the one for calls."""

    listen: Address | None = setting(
        None, "host:port that serves grpc.health.v1 alone, in plaintext, for kubelet's probes; none: not served."
    )


def server_options(settings: ServerSettings, *, reuse_port: bool = False) -> list[tuple[str, int]]:
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        ("grpc.so_reuseport", int(reuse_port)),  # else a second server on the port must fail to start
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Soft = hard: between the two, gRPC rejects at random.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", settings.max_streams_per_connection),
        # Otherwise each further ping of a client that pings too often queues a GOAWAY of 2 KiB, even if it never reads.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.max_connection_idle_ms", int(settings.max_idle_s * 1000)),
        ("grpc.max_allowed_incoming_connections", min(settings.max_connections, num_files * 3 // 4)),
        # Identity only: gRPC decompresses a message before it checks its size, so 4 KiB could become 4 GiB.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        *_milliseconds("grpc.max_connection_age_ms", settings.max_connection_age_s),
        *_milliseconds("grpc.max_connection_age_grace_ms", settings.max_connection_age_grace_s),
    ]


def _milliseconds(option: str, seconds: float | None) -> list[tuple[str, int]]:
    """One option, or none: gRPC's default is infinite."""
    return [] if seconds is None else [(option, max(1, int(seconds * 1000)))]


LIVENESS = ""
_log = logging.getLogger(__name__)
_PROBES = ServerSettings(max_connections=256, max_idle_s=10.0, max_calls=256, max_calls_per_peer=256)
"""Of the port for probes: a probe connects, asks once and leaves."""
_CHECK_TLS_S = 60.0
_END_S = 1.0  # for calls to end before the port closes, and then for their status to be sent


class Health:
    """grpc.health.v1: liveness of the process and readiness of its services. Belongs to one event loop.

    The empty name is liveness: the process and its event loop answer. The name of a registered service is its
    readiness: it becomes NOT_SERVING when a drain begins, so health-aware clients move elsewhere before any request is
    rejected. grpcio's own servicer does not fit: its shutdown ends liveness too, and it writes past the interceptor's
    limits.
    """

    service = health_pb2.DESCRIPTOR.services_by_name["Health"]

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {LIVENESS: True}
        self._draining = self._ended = False
        self._num_watchers = 0
        self._changed = Broadcast()
        self._watcher_left = Broadcast()

    def is_serving(self, name: str) -> bool:
        return self._serving.get(name, False)

    def set_serving(self, name: str, serving: bool) -> None:
        """Sets the readiness of a service; after a drain has begun only liveness can change."""
        if name != LIVENESS and self._draining:
            serving = False
        self._serving[name] = serving
        self._changed.notify()

    def begin_draining(self) -> None:
        """Makes every service, but not liveness, permanently NOT_SERVING."""
        self._draining = True
        for name in self._serving:
            if name != LIVENESS:
                self.set_serving(name, False)

    async def end(self, within_s: float) -> None:
        """Ends every Watch after its last state, with UNAVAILABLE. Returns when the watchers have been answered, and
        after `within_s` at the latest: a connection that closes earlier may take the last state with it."""
        self.begin_draining()
        self._ended = True
        self._changed.notify()
        with suppress(TimeoutError):  # a client that does not read
            async with asyncio.timeout(within_s):
                while self._num_watchers:
                    await self._watcher_left.wait()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._serving:
            raise NotFound(f"no service {printable(request.service, 64)}")
        return self._response(request.service)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        self._num_watchers += 1
        try:
            while True:
                response = self._response(request.service)
                if response != last:
                    last = response
                    yield response  # the state may change during the write
                elif self._ended:
                    raise Unavailable("the server stops")
                else:
                    await self._changed.wait()
        finally:
            self._num_watchers -= 1
            self._watcher_left.notify()

    def _response(self, name: str) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse
        if name not in self._serving:
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.SERVING if self._serving[name] else kinds.NOT_SERVING)


@dataclass(frozen=True, slots=True)
class ServerTls:
    files: TlsFiles
    require_client_cert: bool  # whether the handshake rejects callers without a certificate of ca_file

    def credentials(self) -> grpc.ServerCredentials:
        """gRPC's, which check for changed files at every handshake; open connections stay."""
        current = self.files.current()

        def fetch() -> Any:  # None for "unchanged", which the stubs forget
            nonlocal current
            if (latest := self.files.current()) is current:
                return None
            current = latest
            return _configuration(current)

        return grpc.dynamic_ssl_server_credentials(_configuration(current), fetch, self.require_client_cert)


class Server:
    """Serves servicers on one port. Make it on the running event loop, register, then start."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        tls: ServerTls | None = None,
        authorizer: Authorizer | None = None,
        probes: HealthSettings | None = None,
        reuse_port: bool = False,
    ) -> None:
        """`tls` None is plaintext; `authorizer` None admits every caller; `reuse_port`: other processes listen too."""
        self._settings = settings
        self._reuse_port = reuse_port
        self._tls = tls
        self._probes = probes.listen if probes is not None else None
        self._server = grpc.aio.server(options=server_options(settings, reuse_port=reuse_port))
        self._probe_server: grpc.aio.Server | None = None
        self.probe_port: int | None = None
        """The plaintext port of the health service alone; None: not served, or not started."""
        self._checking_tls: asyncio.Task[None] | None = None
        self._port: int | None = None
        self._names: list[str] = []
        self._num_cut_off: int | None = None
        self.health = Health()
        self.calls = OpenCalls(max_per_peer=settings.max_calls_per_peer, max_in_all=settings.max_calls)
        self._limits = CallLimits(settings.max_deadline_s, settings.read_timeout_s, settings.write_timeout_s)
        self.abuse_limits = AbuseLimits(per_s=settings.max_bad_calls_per_s)
        self.large = LargeMessages(settings.max_large_messages_per_peer)
        self._interceptor = CallInterceptor(self._limits, self.calls, self.abuse_limits, authorizer, self.large)
        self._open_interceptor = CallInterceptor(self._limits, self.calls, self.abuse_limits, None, self.large)

    async def register(
        self,
        service: ServiceDescriptor,
        servicer: object,
        policies: Mapping[str, CallPolicy] | None = None,
        *,
        ready: bool = True,
    ) -> None:
        """Serves `service` by `servicer`. `policies` names the rpcs that are not ordinary requests. `ready` False keeps
        the service's health NOT_SERVING until `health.set_serving(service.full_name, True)`."""
        self._server.add_generic_rpc_handlers((self._interceptor.handlers(service, servicer, policies or {}),))
        self._names.append(service.full_name)
        self.health.set_serving(service.full_name, ready)

    async def start(self) -> int:
        """Listens; returns the port. Raises OSError when an address is taken or not this host's."""
        self._server.add_generic_rpc_handlers((self._health_handlers(self._open_interceptor),))
        if self._settings.reflection:
            service = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
            names = [*self._names, Health.service.full_name, service.full_name]
            servicer, policies = reflection.aio.ReflectionServicer(names), {"ServerReflectionInfo": CONTROL}
            self._server.add_generic_rpc_handlers((self._open_interceptor.handlers(service, servicer, policies),))
        credentials = self._tls.credentials() if self._tls is not None else None
        self._port = _listen(self._server, format_address(self._settings.host, self._settings.port), credentials)
        if self._probes is not None:
            self._probe_server = grpc.aio.server(options=server_options(_PROBES, reuse_port=self._reuse_port))
            calls = OpenCalls(max_per_peer=_PROBES.max_calls_per_peer, max_in_all=_PROBES.max_calls)
            interceptor = CallInterceptor(self._limits, calls, self.abuse_limits)
            self._probe_server.add_generic_rpc_handlers((self._health_handlers(interceptor),))
            self.probe_port = _listen(self._probe_server, format_address(*parse_address(self._probes)), None)
            await self._probe_server.start()
        await self._server.start()
        if self._tls is not None:
            self._checking_tls = asyncio.create_task(_check_periodically(self._tls.files), name="check TLS files")
        how = "plaintext" if self._tls is None else "mTLS" if self._tls.require_client_cert else "TLS"
        advertised = f", reported as {self._settings.advertise}" if self._settings.advertise else ""
        _log.info("listening on %s%s, %s", format_address(self._settings.host, self._port), advertised, how)
        return self._port

    def _health_handlers(self, interceptor: CallInterceptor) -> grpc.GenericRpcHandler:
        return interceptor.handlers(Health.service, self.health, dict.fromkeys(("Check", "Watch"), CONTROL))

    @property
    def port(self) -> int:
        """The port listened on; only after `start`."""
        if self._port is None:
            raise RuntimeError("the server has not started")
        return self._port

    @property
    def address(self) -> str:
        return self._settings.advertise or format_address(self._settings.host, self.port)

    async def drain(self) -> bool:
        """Ends the server without losing a call; False if calls still ran after the grace period and were cut off."""
        try:
            _log.info("draining: not ready, accepting for %g s more", self._settings.drain_accept_s)
            self.health.begin_draining()
            await self._accept_for(self._settings.drain_accept_s)
            self.calls.begin_draining()
            _log.info("draining: refusing, %d calls to finish", self.calls.num_awaited)
            async with asyncio.timeout(self._settings.drain_grace_s):
                await self.calls.wait_idle()
        except TimeoutError:
            _log.warning("drain grace period is over: cutting off %d calls", self.calls.num_awaited)
            return False
        else:
            _log.info("drained")
            return True
        finally:
            await self.stop()

    async def _accept_for(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def end_calls(self, *, cut_off: bool = True) -> None:
        """Rejects new calls and waits a second for the running ones, cut off or not, to free their resources and send
        their status."""
        self.calls.begin_draining()
        if cut_off:
            self.calls.cut_off()
        try:
            async with asyncio.timeout(_END_S):
                await self.calls.wait_idle()
        except TimeoutError:
            _log.warning("%d calls did not end in time", self.calls.num_awaited)

    async def stop(self) -> bool:
        """Ends every call and closes the port, now; False if that cut a call off. Idempotent."""
        if self._num_cut_off is None:
            self._num_cut_off = self.calls.num_awaited
            await self.end_calls()
        if self._checking_tls is not None:
            self._checking_tls.cancel()
        self.abuse_limits.close()
        await self.health.end(_END_S)
        self.calls.cut_off_others()
        await self._server.stop(grace=_END_S)
        if self._probe_server is not None:
            await self._probe_server.stop(grace=None)
        return self._num_cut_off == 0


async def _check_periodically(files: TlsFiles) -> None:
    """Without calls too, the log must warn of an expiring certificate."""
    while True:
        await asyncio.sleep(_CHECK_TLS_S)
        files.current()


def _listen(server: grpc.aio.Server, wanted: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(wanted)
        return server.add_secure_port(wanted, credentials)
    except RuntimeError:
        raise OSError(f"cannot listen on {wanted}: the port is taken or the address is not this host's") from None


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    assert material.key is not None, "TlsSettings requires a server certificate"
    assert material.chain is not None
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], root_certificates=material.ca)
