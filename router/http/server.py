"""The HTTP port: uvicorn on the router's own event loop, and an end to every wait for a client.

    accepted ─▶ waiting for headers ─complete─▶ a request ─answered─▶ kept alive ─▶ …
       │               └─read_timeout_s─▶ ended      └─ a write that waits longer than write_timeout_s ─▶ ended
       └─ more than max_connections ─▶ ended at once

uvicorn waits for ever for headers that never come and for a reader that does not read; its connections are made to end
here. It has no signal handlers and no thread: the composition root tells it when to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from router.http.settings import HttpSettings
from router.http.tls import HttpTls
from serving.addresses import joined

_log = logging.getLogger(__name__)
_STOP_S = 1


class _Config(uvicorn.Config):
    """uvicorn's, with what its connections are bounded by."""

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
            h11_max_incomplete_event_size=settings.max_header_bytes,
            timeout_keep_alive=settings.keep_alive_s,
            timeout_graceful_shutdown=_STOP_S,
        )
        self.settings = settings
        self.write_timeout_s = write_timeout_s
        self.tls = tls
        self.load()
        self.ssl = None if tls is None else tls.context


class _Patience:
    """Ends something unless it is told in time that all is well."""

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self._seconds = seconds
        self._end = end
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """From now on, or from when it began."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)

    def over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Connection(H11Protocol):
    """One client's connection."""

    config: _Config
    cycle: RequestResponseCycle | None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._with_head = _Patience(self.config.settings.read_timeout_s, transport.abort)
        self._with_reader = _Patience(self.config.write_timeout_s, transport.abort)
        if len(self.connections) > self.config.settings.max_connections or not self._is_admitted(transport):
            transport.abort()
        else:
            self._with_head.begin()

    def _is_admitted(self, transport: asyncio.Transport) -> bool:
        tls = self.config.tls
        return tls is None or tls.admits(transport.get_extra_info("peercert"))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._with_head.begin()
        else:
            self._with_head.over()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._with_reader.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._with_reader.over()

    def connection_lost(self, exc: Exception | None) -> None:
        self._with_head.over()
        self._with_reader.over()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to the composition root


class HttpServer:
    """Serves one ASGI application. Belongs to one event loop and one composition root."""

    def __init__(
        self, app: ASGIApp, settings: HttpSettings, *, write_timeout_s: float, tls: HttpTls | None = None
    ) -> None:
        """`tls` None listens in plaintext."""
        self._where = settings.where
        self._scheme = "http" if tls is None else "https"
        self._server = _Server(_Config(app, settings, write_timeout_s, tls))
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port that is listened on; only after `start`."""
        assert self._socket is not None, "the HTTP server has not started"
        host, port = self._socket.getsockname()[:2]
        return joined(host, port)

    async def start(self) -> None:
        """Listens. Raises OSError where the address is taken or not ours."""
        assert self._where is not None, "made only where the settings say where to listen"
        host, port = self._where
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise OSError(f"cannot serve HTTP on {joined(host, port)}: {error.strerror}") from error
        told = self.address
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")
        await self._server.listening.wait()
        _log.info("OpenAI's API at %s://%s/v1", self._scheme, told)

    async def stop(self) -> None:
        """Closes the port; answers that are still being sent have a second. Idempotent."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
