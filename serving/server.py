"""One gRPC server: options that hold under abuse, health, reflection, and a drain that loses nothing.

created ──start──▶ serving ──drain──▶ not ready ──drain_accept_s──▶ refusing ──calls end or drain_grace_s──▶ stopped

A drain first turns readiness to NOT_SERVING and goes on accepting, because clients need a moment to see it; then it
refuses requests with UNAVAILABLE "draining", waits for those that run, and stops last: grpcio's `stop` closes the port
at once. What still runs then, or when `stop` comes by itself, is answered UNAVAILABLE with a hint when to try again.
A gate, if there is one, looks at every call but those of health and reflection, which are open to whoever gets a
connection. Kubelet gets one without TLS: a port of its own that serves health and nothing else.
The object belongs to one event loop and one composition root.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2

from serving.addresses import joined
from serving.bad_callers import BadCallers
from serving.calls import CallGuard, CallLimits, Gate
from serving.health import Health
from serving.open_calls import CONTROL, CallPolicy, OpenCalls
from serving.server_settings import HealthSettings, ServerSettings, server_options
from serving.settings import host_and_port
from serving.tls import Pair, TlsFiles

_log = logging.getLogger(__name__)
_LOOK_S = 60.0
_CUT_OFF_S = 1.0
"""For calls that are cut off to let go of what they hold, and to be answered, before the port closes under them."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS of one port."""

    files: TlsFiles
    require_client_cert: bool
    """Whether a caller without a certificate of their ca_file is refused in the handshake."""

    def credentials(self) -> grpc.ServerCredentials:
        """gRPC's, which ask for changed files at every handshake; connections that stand go on."""
        told = self.files.current()

        def fetch() -> Any:  # None for "as before", which the stubs forget
            nonlocal told
            now = self.files.current()
            if now is told:
                return None
            told = now
            return _configuration(now)

        return grpc.dynamic_ssl_server_credentials(_configuration(told), fetch, self.require_client_cert)


class Server:
    """Hosts servicers behind one port. Make it on the running event loop, register, then start."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        tls: ServerTls | None = None,
        gate: Gate | None = None,
        probes: HealthSettings | None = None,
    ) -> None:
        """`tls` None listens in plaintext; `gate` None lets everybody call."""
        self._settings = settings
        self._tls = tls
        self._probes = probes.listen if probes is not None else None
        self._server = grpc.aio.server(options=server_options(settings))
        self._probe_server: grpc.aio.Server | None = None
        self._probe_port: int | None = None
        self._looking: asyncio.Task[None] | None = None
        self._port: int | None = None
        self._names: list[str] = []
        self._num_cut_off: int | None = None
        self.health = Health()
        self.calls = OpenCalls(max_per_peer=settings.max_calls_per_peer, max_in_all=settings.max_calls)
        limits = CallLimits(settings.max_deadline_s, settings.read_timeout_s, settings.write_timeout_s)
        self.bad_callers = BadCallers(per_s=settings.max_bad_calls_per_s)
        self._guard = CallGuard(limits, self.calls, self.bad_callers, gate)
        self._open_guard = CallGuard(limits, self.calls, self.bad_callers)

    async def register(
        self,
        service: ServiceDescriptor,
        servicer: object,
        policies: Mapping[str, CallPolicy] | None = None,
        *,
        ready: bool = True,
    ) -> None:
        """Serves `service` by `servicer`, whose methods are coroutines or, if they stream, async generators.

        `policies` names the rpcs that are not ordinary requests. `ready` False keeps the service's health NOT_SERVING
        until `health.set_serving(service.full_name, True)`, say when the model is loaded.
        """
        self._server.add_generic_rpc_handlers((self._guard.handlers(service, servicer, policies or {}),))
        self._names.append(service.full_name)
        await self.health.set_serving(service.full_name, ready)

    async def start(self) -> int:
        """Listens; returns the port. Raises OSError when an address is taken or not ours."""
        self._server.add_generic_rpc_handlers((self._health_handlers(),))
        if self._settings.reflection:
            described = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
            names = [*self._names, Health.service.full_name, described.full_name]
            servicer = reflection.aio.ReflectionServicer(names)
            policies = {"ServerReflectionInfo": CONTROL}
            self._server.add_generic_rpc_handlers((self._open_guard.handlers(described, servicer, policies),))
        credentials = self._tls.credentials() if self._tls is not None else None
        self._port = _listen(self._server, joined(self._settings.host, self._settings.port), credentials)
        if self._probes is not None:
            self._probe_server = grpc.aio.server(options=server_options(self._settings))
            self._probe_server.add_generic_rpc_handlers((self._health_handlers(),))
            self._probe_port = _listen(self._probe_server, joined(*host_and_port(self._probes)), None)
            await self._probe_server.start()
        await self._server.start()
        if self._tls is not None:
            self._looking = asyncio.create_task(_look_now_and_then(self._tls.files), name="look at TLS files")
        how = "plaintext" if self._tls is None else "mTLS" if self._tls.require_client_cert else "TLS"
        _log.info("listening on %s, known as %s, %s", joined(self._settings.host, self._port), self.address, how)
        return self._port

    def _health_handlers(self) -> grpc.GenericRpcHandler:
        return self._open_guard.handlers(Health.service, self.health, dict.fromkeys(("Check", "Watch"), CONTROL))

    @property
    def port(self) -> int:
        """The port that is listened on; only after `start`."""
        if self._port is None:
            raise RuntimeError("the server has not started")
        return self._port

    @property
    def probe_port(self) -> int | None:
        """The plaintext port of the health service alone; None: there is none, or not yet."""
        return self._probe_port

    @property
    def address(self) -> str:
        """host:port that peers are told."""
        return self._settings.advertise or joined(self._settings.host, self.port)

    @property
    def draining(self) -> bool:
        """Whether requests are refused now because of a drain."""
        return self.calls.draining

    async def drain(self) -> bool:
        """Ends the server without losing a call; False if some still ran after the grace and were cut off."""
        _log.info("draining: not ready, accepting for %g s more", self._settings.drain_accept_s)
        await self.health.begin_draining()
        await asyncio.sleep(self._settings.drain_accept_s)
        self.calls.begin_draining()
        _log.info("draining: refusing, %d calls to finish", self.calls.num_awaited)
        try:
            async with asyncio.timeout(self._settings.drain_grace_s):
                await self.calls.wait_idle()
        except TimeoutError:
            _log.warning("grace is over: %d calls are cut off", self.calls.num_awaited)
            return False
        else:
            _log.info("drained")
            return True
        finally:
            await self.stop()

    async def stop(self) -> bool:
        """Ends every call and closes the port, now; False if that cut a call off. Idempotent."""
        self.calls.begin_draining()
        if self._num_cut_off is None:
            self._num_cut_off = self.calls.num_awaited
            self.calls.cut_off()
            try:
                async with asyncio.timeout(_CUT_OFF_S):
                    await self.calls.wait_idle()
            except TimeoutError:
                _log.warning("%d calls did not end by themselves", self.calls.num_awaited)
        if self._looking is not None:
            self._looking.cancel()
        self.bad_callers.close()
        await self._server.stop(grace=None)
        if self._probe_server is not None:
            await self._probe_server.stop(grace=None)
        return self._num_cut_off == 0

    async def wait_closed(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait_for_termination()


async def _look_now_and_then(files: TlsFiles) -> None:
    """Whoever is called by nobody for days is still to say that his certificate ends."""
    while True:
        await asyncio.sleep(_LOOK_S)
        files.current()


def _listen(server: grpc.aio.Server, wanted: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(wanted)
        return server.add_secure_port(wanted, credentials)
    except RuntimeError:
        raise OSError(f"cannot listen on {wanted}: the port is taken or the address is not this host's") from None


def _configuration(pair: Pair) -> grpc.ServerCertificateConfiguration:
    assert pair.key is not None, "a server has a certificate: TlsSettings sees to it"
    assert pair.chain is not None
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], root_certificates=pair.ca)
