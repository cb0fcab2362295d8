"""The HTTP port: uvicorn on the router's event loop, with a limit on every wait for a client.

    accepted ─TLS handshake─▶ waiting for headers ─complete─▶ a request ─answered─▶ kept alive ─▶ …
       │          └─ 5 s ─▶ closed   └─read_timeout_s─▶ closed   └─ too little is read in write_timeout_s ─▶ closed
       └─ more than max_connections, handshakes included ─▶ closed at once

uvicorn waits for ever for headers that do not come and for a client that does not read, and for a minute for a TLS
handshake, of which it does not know; such connections are closed here. It has no signal handlers and no thread: the
composition root starts and stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import socket
import ssl
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import h11
import msgspec
import uvicorn
from fastapi import status
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from router.api.openai.exchange import REQUEST_ID_HEADER, HttpError, body_of
from serving.auth import comparable_names
from serving.logging import Repeats, valid_request_id
from serving.settings import Address, Section, SettingsError, format_address, parse_address, setting
from serving.tls import HANDSHAKE_TIMEOUT_S, TlsFiles, TlsMaterial
from serving.waits import end_tasks

_STOP_S = 1
_MIN_READ_BYTES = 16 << 10
"""A client that takes so much within write_timeout_s, or all that is left, is slow and not deaf."""
_BOTH_LENGTHS = {b"content-length", b"transfer-encoding"}
"""A proxy that goes by the other one takes a part of the body for the next request, maybe another client's."""
_NUM_SMALL_CHUNKS, _SMALL_CHUNK_BYTES = 1024, 64
"""In one body. h11 takes 20 µs for each, and for all that have come before anything else runs: seconds for a MiB."""
_TOO_MANY_CHUNKS = (
    f"the body has more than {_NUM_SMALL_CHUNKS} chunks, of fewer than {_SMALL_CHUNK_BYTES} bytes on average"
)
_RETRY_S = 1.0
_ACCEPT_AGAIN_S = 0.1  # when there is no free descriptor
_log = logging.getLogger(__name__)
_repeats = Repeats()


class HttpSettings(Section):
    """The port of OpenAI's HTTP API; docs/openai.md lists the endpoints."""

    listen: Address | None = setting(
        None, "host:port of OpenAI's HTTP API, port 0 takes a free one; none: not served.", flag="--http-listen"
    )
    page: bool | Literal["auto"] = setting(
        False,
        "Serve the live page at / and its data at /live (docs/live_page.md): true; false; auto: unless that would need "
        "operators' tokens that are not given.",
    )
    max_body_bytes: int = setting(4 << 20, "Longest body of a request in bytes.", ge=1024)
    max_header_bytes: int = setting(16 << 10, "Longest headers of a request in bytes.", ge=1024)
    max_connections: int = setting(
        1024, "Open connections, TLS handshakes included; further ones are closed at once.", ge=1
    )
    read_timeout_s: float = setting(10.0, "Seconds to receive a request's headers, and then its body.", gt=0)
    keep_alive_s: int = setting(75, "Seconds that a connection without a request is kept.", ge=0)
    allowed_origins: tuple[str, ...] = setting(
        (), "Origins of web pages whose scripts may call (CORS), as in [https://chat.example]; ['*']: all; empty: none."
    )


class HttpTls:
    """TLS from the files of the gRPC port, which each handshake checks for changes. Used on the event loop."""

    def __init__(
        self,
        files: TlsFiles,
        *,
        require_client_cert: bool,
        client_names: tuple[str, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`client_names`: one of them must be in a client's certificate; empty: any certificate of the CA. `clock` is
        in seconds.

        Raises SettingsError for files that OpenSSL rejects, OSError where no temporary file can be written.
        """
        self._files = files
        self._require = require_client_cert
        self._names = comparable_names(client_names if require_client_cert else ())
        self._material = files.current()
        self._context = self._new_context(self._material)
        self._rejected: TlsMaterial | None = None
        self._clock = clock
        self._retry_at_s = 0.0
        """When to try rejected files again."""

    def admits(self, certificate: Mapping[str, Any] | None) -> bool:
        """Whether a client with this certificate, as `ssl` describes it, may connect."""
        if not self._names:
            return True
        described = certificate or {}
        names = {value for _, value in described.get("subjectAltName", ())}  # of any kind, as gRPC's
        names |= {value for part in described.get("subject", ()) for kind, value in part if kind == "commonName"}
        return not self._names.isdisjoint(comparable_names(names))

    def context(self) -> ssl.SSLContext:
        """For a handshake that starts now: of the current files, or of the last ones that OpenSSL accepts.

        Changed files have a new context, whose keys decrypt no session ticket of an earlier one. With the old keys a
        client could resume a session whose CA has been removed: OpenSSL does not verify its certificate again.
        """
        material = self._files.current()
        is_due = material is not self._rejected or self._clock() >= self._retry_at_s
        if material is not self._material and is_due:
            try:
                self._context, self._material = self._new_context(material), material
            except Exception as error:  # of any type: no client could connect
                self._report(material, error)
        return self._context

    def _report(self, material: TlsMaterial, error: Exception) -> None:
        """Once for each change. It is tried again after a second, because the disk may have been full: not by each
        handshake, whose client is not authenticated yet."""
        self._retry_at_s = self._clock() + _RETRY_S
        if material is not self._rejected:
            self._rejected = material
            self._files.count_rejected()
            _log.warning("the HTTP port keeps the last usable TLS files: %s", error)

    def _new_context(self, material: TlsMaterial) -> ssl.SSLContext:
        """Raises SettingsError for what OpenSSL rejects, OSError without a temporary file."""
        assert material.chain is not None, "the settings require a server certificate"
        assert material.key is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Not CERT_OPTIONAL: browsers prompt their user for a certificate that is requested.
        context.verify_mode = ssl.CERT_REQUIRED if self._require else ssl.CERT_NONE
        with _checked("tls.ca_file: OpenSSL rejects a certificate"):
            context.load_verify_locations(cadata=material.ca.decode("ascii", "ignore"))  # others are in comments
        with tempfile.NamedTemporaryFile() as file:  # `ssl` reads these from files only; this one is 0600
            file.write(material.chain + b"\n" + material.key)
            file.flush()
            with _checked("tls.cert_file, key_file: OpenSSL rejects the certificate or its key"):
                context.load_cert_chain(file.name)
        return context


@contextlib.contextmanager
def _checked(problem: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise SettingsError(f"{problem}: {error.reason or error}") from None


def _is_new(record: logging.LogRecord) -> bool:
    """Of uvicorn's: each warning is about one connection, which any client can open."""
    return record.levelno != logging.WARNING or not _repeats.is_repeat(record.getMessage())


class _Config(uvicorn.Config):
    def __init__(self, app: ASGIApp, settings: HttpSettings, write_timeout_s: float, tls: HttpTls | None) -> None:
        super().__init__(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
            log_level="warning",
            timeout_keep_alive=settings.keep_alive_s,
            timeout_graceful_shutdown=_STOP_S,
            # Else a request after a long body begins in the trace of the one before it: python/cpython#140947.
            reset_contextvars=True,
        )
        logging.getLogger("uvicorn.error").addFilter(_is_new)  # once, however often it is added
        self.settings = settings
        self.write_timeout_s = write_timeout_s
        self.tls = tls
        self.load()


class _TooLong(h11.RemoteProtocolError):
    pass


class _Parser(h11.Connection):
    """h11 limits headers only while they are incomplete; these are limited however they arrive. It takes a request with
    two kinds of length, too, and a body in any number of chunks."""

    _num_chunks = _num_chunk_bytes = 0
    """Of the body that is read."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Raises h11.RemoteProtocolError."""
        is_head, num_bytes = self.their_state is h11.IDLE, len(self._receive_buffer)
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if is_head and error.error_status_hint == status.HTTP_431_REQUEST_HEADER_FIELDS_TOO_LARGE:
                raise self._too_long() from None
            raise
        if isinstance(event, h11.Request):
            if num_bytes - len(self._receive_buffer) > self._max_incomplete_event_size:
                raise self._too_long()
            if {name for name, _ in event.headers} >= _BOTH_LENGTHS:
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding exclude each other")
            self._num_chunks = self._num_chunk_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_chunk_bytes += len(event.data)
            if self._num_chunks > max(_NUM_SMALL_CHUNKS, self._num_chunk_bytes // _SMALL_CHUNK_BYTES):
                raise h11.RemoteProtocolError(_TOO_MANY_CHUNKS)
        return event

    def _too_long(self) -> _TooLong:
        most = self._max_incomplete_event_size
        return _TooLong(f"the request's headers are longer than {most} bytes (http.max_header_bytes)")


class _Connection(H11Protocol):
    config: _Config
    cycle: RequestResponseCycle | None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = _Parser(h11.SERVER, self.config.settings.max_header_bytes)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        layer = getattr(transport, "_ssl_protocol", None)  # asyncio has no public way to what is below TLS
        self._tcp: asyncio.Transport = transport if layer is None else layer._transport
        self._num_in_tls: Callable[[], int] = (lambda: 0) if layer is None else layer._get_write_buffer_size
        self._watch_client()
        self._is_stopping = False
        tls = self.config.tls
        is_admitted = tls is None or tls.admits(transport.get_extra_info("peercert"))
        if len(self.connections) > self.config.settings.max_connections or not is_admitted:
            transport.abort()
        else:
            self._start_timer("headers", self.config.settings.read_timeout_s)

    def _start_timer(self, name: str, seconds: float) -> None:
        """Aborts the connection unless the timer is stopped in time. Does nothing while it runs."""
        if name not in self._timers:
            self._timers[name] = asyncio.get_running_loop().call_later(seconds, self.transport.abort)

    def _stop_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED):
            return  # behind the connection's last request: h11 would raise
        self._stop_timer("idle")
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer("headers")
            self._keep_reading()
        elif self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            # The rest of a body that was not read. uvicorn keeps the connection without a limit then.
            self._stop_timer("headers")
            self._start_timer("idle", self.config.settings.keep_alive_s)
        else:
            self._start_timer("headers", self.config.settings.read_timeout_s)

    def _keep_reading(self) -> None:
        """uvicorn stops at the first byte behind a request, and would not see that its client disconnects."""
        is_whole = self.conn.their_state is not h11.SEND_BODY
        if is_whole and self.flow.read_paused and len(self.conn.trailing_data[0]) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Called while h11's error is handled. In uvicorn the answer is plain text, and a second one to a request that
        has been answered raises."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        error = sys.exception()
        said = str(error) if isinstance(error, _TooLong) else f"this is not valid HTTP/1.1: {error or msg}"
        problem = HttpError(status.HTTP_400_BAD_REQUEST, said)
        headers = {
            "content-type": "application/json",
            "connection": "close",
            REQUEST_ID_HEADER: valid_request_id(None),
        }
        response = h11.Response(status_code=problem.status_code, headers=list(headers.items()), reason="Bad Request")
        is_head = self.conn._request_method == b"HEAD"  # of a head that is complete: its answer has no body
        body = b"" if is_head else msgspec.json.encode(body_of(problem, {}))
        for event in (response, h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_client()

    def on_response_complete(self) -> None:
        self._watch_client()
        super().on_response_complete()
        if self._is_stopping:
            self._close_tcp()

    def shutdown(self) -> None:
        super().shutdown()
        self._is_stopping = True
        self._close_tcp()

    def _close_tcp(self) -> None:
        """Of a connection that is closing, behind what is sent: TLS would wait for its client's end of TLS, which a
        client that keeps connections for later does not send."""
        if self.transport.is_closing() and not self._num_in_tls():
            self._tcp.close()

    def _unsupported_upgrade_warning(self) -> None:
        """An offer of h2c or of a WebSocket is ignored, as HTTP allows. uvicorn warns and names packages to install."""

    def _watch_client(self) -> None:
        """Aborts the connection of a client that reads too little in write_timeout_s, or does not end TLS after it has
        read all. Begins anew, and wherever a response pauses or ends: then nothing is written until the next check."""
        self._stop_timer("write")
        num_before = self._num_unread()

        def check() -> None:
            num_left, is_closing = self._num_unread(), self.transport.is_closing()
            is_deaf = num_before - num_left < _MIN_READ_BYTES if num_left else is_closing and not num_before
            has_ended = self.cycle is None or self.cycle.response_complete
            if is_deaf and (has_ended or is_closing or self.flow.write_paused):
                self._tcp.abort()
            else:
                self._watch_client()

        self._timers["write"] = asyncio.get_running_loop().call_later(self.config.write_timeout_s, check)

    def _num_unread(self) -> int:
        """Bytes that the client has not received: in the buffers of TLS, asyncio and, where it says so, the kernel."""
        num_bytes = self._num_in_tls() + self._tcp.get_write_buffer_size()
        with contextlib.suppress(OSError, ValueError):  # another kernel, or a socket that is just closed
            in_kernel = fcntl.ioctl(self._tcp.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            num_bytes += int.from_bytes(in_kernel, sys.byteorder)
        return num_bytes

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop_timer(name)
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    config: _Config

    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.tls is None:
            await super().startup(sockets)
        else:  # asyncio's server would hand a connection over when its handshake is over, and count none before
            await super().startup(sockets=[])
            tls = self.config.tls
            self._accepting = [asyncio.create_task(self._accept(listener, tls)) for listener in sockets or ()]
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await end_tasks(*self._accepting, *self._handshakes)  # the listener is closed next
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket, tls: HttpTls) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                _log.warning("cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if len(self.server_state.connections) + len(self._handshakes) >= self.config.settings.max_connections:
                connection.close()
                continue
            task = asyncio.create_task(self._shake_hands(connection, tls.context()))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        """From here on the connection belongs to its protocol, or is closed."""
        timeout_s = min(HANDSHAKE_TIMEOUT_S, self.config.settings.read_timeout_s)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._new_connection,
                connection,
                ssl=context,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=math.inf,  # _watch_client ends it
            )
        except OSError as error:
            _log.debug("a TLS handshake failed: %s", error)

    def _new_connection(self) -> _Connection:
        return _Connection(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the composition root handles signals


class HttpServer:
    """Serves one ASGI application. Belongs to one event loop and one composition root."""

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        *,
        write_timeout_s: float,
        tls: HttpTls | None = None,
        reuse_port: bool = False,
    ) -> None:
        """`reuse_port`: other processes listen on the same port."""
        self._listen = settings.listen
        self._reuse_port = reuse_port
        self._scheme = "http" if tls is None else "https"
        self._server = _Server(_Config(app, settings, write_timeout_s, tls))
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port that is listened on; only after `start`."""
        assert self._socket is not None, "the HTTP server has not started"
        host, port = self._socket.getsockname()[:2]
        return format_address(host, port)

    async def start(self) -> None:
        """Listens. Raises OSError where the address is taken or not this host's."""
        assert self._listen is not None, "made only where the settings have an address"
        host, port = parse_address(self._listen)
        try:
            is_ipv6 = ":" in host  # then :: includes IPv4, as on the gRPC port
            self._socket = socket.create_server(
                (host, port),
                family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
                reuse_port=self._reuse_port,
                dualstack_ipv6=is_ipv6,
            )
        except OSError as error:
            raise OSError(f"cannot serve HTTP on {format_address(host, port)}: {error.strerror}") from error
        address = self.address
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")
        await self._server.listening.wait()
        _log.info("OpenAI's API at %s://%s/v1", self._scheme, address)

    async def stop(self) -> None:
        """Closes the port; responses in progress have a second to finish. Idempotent."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
