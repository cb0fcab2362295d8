"""Clients that read slowly, or not at all, with TLS and without."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router.api.openai.server import HttpServer, HttpSettings, HttpTls, _Connection
from serving.settings import parse_address
from tandem.local_stack.pki import StackCa
from tests.certificates import Files, files_of
from tests.router.rig import TIMEOUT_S
from tests.waiting import until

_PIECE = b"x" * 4096


async def late(release: asyncio.Event, num_bytes: int) -> AsyncIterator[bytes]:
    await release.wait()
    yield b"x" * num_bytes


async def respond(request: Request) -> Response:
    """As many bytes as the path says, whole, as a stream, or once they are released."""
    num_bytes = int(request.path_params["num_bytes"])
    if request.path_params["kind"] == "whole":
        return Response(b"x" * num_bytes)
    if request.path_params["kind"] == "late":
        return StreamingResponse(late(request.app.state.release, num_bytes))

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(num_bytes // len(_PIECE)):
            yield _PIECE

    return StreamingResponse(pieces(), headers={"content-length": str(num_bytes)})


@asynccontextmanager
async def serving(
    files: Files | None, *, write_timeout_s: float, max_connections: int = 100, num_kernel_bytes: int | None = None
) -> AsyncIterator[Port]:
    app = Starlette(routes=[Route("/{kind}/{num_bytes}", respond)])
    app.state.release = asyncio.Event()
    settings = HttpSettings(listen="127.0.0.1:0", max_connections=max_connections, keep_alive_s=3600)
    tls = HttpTls(files.tls(), require_client_cert=False, client_names=()) if files else None
    server = HttpServer(app, settings, write_timeout_s=write_timeout_s, tls=tls)
    await server.start()
    if num_kernel_bytes is not None:
        assert server._socket is not None
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_kernel_bytes)  # its connections inherit it
    try:
        yield Port(server, app.state.release, files)
    finally:
        await server.stop()


class Port:
    def __init__(self, server: HttpServer, release: asyncio.Event, files: Files | None) -> None:
        self.server = server
        self.release = release
        self.address = server.address
        self._address = parse_address(server.address)
        self._context = ssl.create_default_context(cafile=str(files.ca)) if files else None

    def ask(self, path: str, *, close: bool) -> socket.socket:
        """Sends a request. The client's kernel takes next to nothing of the response."""
        client = socket.socket()
        client.settimeout(TIMEOUT_S)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(self._address)
        if self._context is not None:
            client = self._context.wrap_socket(client, server_hostname="127.0.0.1")
        client.sendall(b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (path.encode(), b"Connection: close\r\n" * close))
        return client

    def reads_slowly(self, path: str, *, slow_s: float) -> int:
        """Reads some 40 KiB/s for a while, then the rest. Returns how many bytes of a body came."""
        num_read, until_s = 0, time.monotonic() + slow_s
        with self.ask(path, close=True) as client, contextlib.suppress(ConnectionError, ssl.SSLEOFError):
            while data := client.recv(4096 if time.monotonic() < until_s else 1 << 20):
                num_read += len(data.rpartition(b"\r\n\r\n")[2])
                if time.monotonic() < until_s:
                    time.sleep(0.1)
        return num_read

    def is_served(self) -> bool:
        try:
            with self.ask("/whole/1", close=True) as client:
                return bool(client.recv(1))
        except OSError:
            return False


@pytest.fixture(params=["plaintext", "TLS"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files | None:
    return files_of(tmp_path, "router", StackCa()) if request.param == "TLS" else None


async def test_a_client_that_reads_slowly_gets_all(files: Files | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.constants.SSL_SHUTDOWN_TIMEOUT", 1.0)  # 30 s: this test would take as long
    num_bytes = 6 << 20  # more than the kernel's buffers and TLS's take
    async with serving(files, write_timeout_s=3.0) as port:
        paths = (f"/whole/{num_bytes}", f"/stream/{num_bytes}")
        num_read = await asyncio.gather(*(asyncio.to_thread(port.reads_slowly, path, slow_s=7.0) for path in paths))
        assert num_read == [num_bytes, num_bytes]


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("path", ["/whole/40960", "/whole/1048576", "/stream/40960", "/stream/1048576"])
async def test_a_client_that_does_not_read_is_dropped(files: Files | None, path: str, close: bool) -> None:
    """Also where so little is left that no layer's flow control pauses the response."""
    async with serving(files, write_timeout_s=0.2, max_connections=1, num_kernel_bytes=4096) as port:
        with await asyncio.to_thread(port.ask, path, close=close):
            await until_served(port)


async def test_a_client_that_reads_all_and_does_not_close_is_dropped(files: Files | None) -> None:
    async with serving(files, write_timeout_s=0.2, max_connections=1) as port:
        with await asyncio.to_thread(port.ask, "/whole/10", close=True) as client:
            while await asyncio.to_thread(client.recv, 4096):
                pass
            await until_served(port)


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_stop_does_not_wait_for_clients_that_keep_their_connection(
    files: Files | None, is_running: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pool does it, which reads no end of TLS meanwhile."""
    monkeypatch.setattr("router.api.openai.server._STOP_S", int(TIMEOUT_S))
    async with serving(files, write_timeout_s=TIMEOUT_S) as port:
        client = await asyncio.to_thread(port.ask, "/late/1" if is_running else "/whole/1", close=False)
        assert await asyncio.to_thread(client.recv, 4096)  # the headers at least
        connections = list(port.server._server.server_state.connections)
        stopping = asyncio.create_task(port.server.stop())
        await until(lambda: all(one._is_stopping for one in connections if isinstance(one, _Connection)))
        port.release.set()
        await stopping
    with client:
        while await asyncio.to_thread(client.recv, 4096):
            pass  # raises where TLS was not ended
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_an_offer_of_another_protocol_is_ignored_without_a_warning(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(None, write_timeout_s=TIMEOUT_S) as port, httpx.AsyncClient() as client:
        headers = {"Connection": "Upgrade", "Upgrade": protocol}
        answer = await client.get(f"http://{port.address}/whole/1", headers=headers, timeout=TIMEOUT_S)
        assert (answer.status_code, answer.text) == (200, "x")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def until_served(port: Port) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await asyncio.to_thread(port.is_served):
            await asyncio.sleep(0.05)
