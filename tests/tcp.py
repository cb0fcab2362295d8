"""TCP servers of tests, which leave no connection behind.

A connection that outlives its event loop is a ResourceWarning of whichever test runs when it is collected. asyncio's
own servers leave those whose handler is cancelled before it closes them, or before it begins.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

from serving.settings import format_address

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_CHUNK_BYTES = 65_536


class TcpServer:
    """Serves each connection by a call of `serve`, in a task of its own; the connection ends with it.

    A context manager: leaving it cancels the tasks, aborts their connections and raises what a call has raised, other
    than OSError or IncompleteReadError, as when the peer is gone.
    """

    def __init__(
        self,
        serve: Serve,
        address: tuple[str, int] | Path = ("127.0.0.1", 0),
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`address` is a host and a port, 0 for any that is free, or the path of a Unix socket."""
        self._serve = serve
        if isinstance(address, Path):
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(address))
            self._listener.listen(100)
            self.address = f"unix:{address}"
        else:
            self._listener = socket.create_server(address)
            self.address = format_address(*self._listener.getsockname()[:2])
        self._listener.setblocking(False)
        self._tls = tls
        self._tasks: dict[asyncio.Task[None], Callable[[], None]] = {}
        """How to end the connection of each at once."""
        self._failures: list[Exception] = []

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks)
        self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted sockets are closed in the next turn of the loop
        for failure in self._failures:
            raise failure

    def stop_listening(self) -> None:
        """Accepts no further connection; those that are open stay."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    def cut(self) -> None:
        """Accepts no further connection and aborts those that are open."""
        if self._listener.fileno() >= 0:
            self.stop_listening()
        for task, abort in self._tasks.items():
            task.cancel()
            abort()

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionError):  # the peer may be gone again
            connection, _ = self._listener.accept()
            task = asyncio.create_task(self._serve_to_the_end(connection))
            self._tasks[task] = connection.close
            task.add_done_callback(self._tasks.pop)

    async def _serve_to_the_end(self, connection: socket.socket) -> None:
        loop, reader, task = asyncio.get_running_loop(), asyncio.StreamReader(), asyncio.current_task()
        assert task is not None
        connection.setblocking(False)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
        except OSError:  # among them ssl.SSLError
            return connection.close()
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self._tasks[task] = transport.abort
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        except Exception as error:
            self._failures.append(error)
        finally:
            writer.close()
            with suppress(OSError):  # the peer is gone
                await writer.wait_closed()  # else `cut` would not know of a connection whose peer does not read
        return None


@asynccontextmanager
async def proxy(address: str, *, delay_s: float = 0.0) -> AsyncIterator[TcpServer]:
    """A port that passes bytes on to `address`, those of the server `delay_s` late."""
    host, _, port = address.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(host, int(port))
        copies = [asyncio.create_task(_copy(reader, requests)), asyncio.create_task(_copy(answers, writer, delay_s))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()
            requests.close()
            await asyncio.gather(*copies, return_exceptions=True)

    async with TcpServer(serve) as server:
        yield server


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_s: float = 0.0) -> None:
    while data := await source.read(_CHUNK_BYTES):
        await asyncio.sleep(delay_s)
        sink.write(data)
        await sink.drain()
