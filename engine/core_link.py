"""The two lines from a front to its engine core: a process of its own, or a thread of this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.messages import Command, CoreMessage, Shutdown

if TYPE_CHECKING:
    from engine.core_loop import ThreadMailbox

_SHUTDOWN_S = 5.0
_MAX_SOCKET_HOME = 70


class CoreLink(Protocol):
    """The front's end of the line to a core."""

    def send(self, command: Command) -> None:
        """Queue a command. Does not block."""
        ...

    async def receive(self) -> CoreMessage:
        """The next message."""
        ...

    async def wait_dead(self) -> str:
        """Return, with the reason, once the core has ended."""
        ...

    async def close(self) -> None:
        """End the core and leave nothing behind."""
        ...


class ProcessLink:
    """A core in a process of its own. Its socket lives in a private folder that goes with it."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: Path) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)

    @classmethod
    async def start(cls, config: EngineConfig) -> ProcessLink:
        """Spawn the process and give it its configuration.

        Threads that wait for each other spin only on cores of their own: on shared ones spinning costs a step 5 to 10
        times its length (measured, benchmarks/LOG.md).
        """
        folder = Path(tempfile.mkdtemp(prefix="tandem-core-", dir=_socket_home()))
        address = f"ipc://{folder}/core"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set(zmq.LINGER, 0)
        socket.set_hwm(0)
        socket.bind(address)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "engine.core_process", address),
            stdin=asyncio.subprocess.PIPE,
            env={"OMP_WAIT_POLICY": "active" if config.cpu_cores else "passive", **os.environ},
        )
        assert process.stdin is not None
        payload = msgspec.msgpack.encode(config)
        process.stdin.write(len(payload).to_bytes(8, "little") + payload)
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        return cls(process, socket, folder)

    def send(self, command: Command) -> None:
        # hwm 0: the send is queued at once, the future is done before it is returned
        self._socket.send(self._encoder.encode(command))

    async def receive(self) -> CoreMessage:
        message: CoreMessage = self._decoder.decode(await self._socket.recv())
        return message

    async def wait_dead(self) -> str:
        status = await self._process.wait()
        return f"the engine core process {self._process.pid} ended with status {status}"

    async def close(self) -> None:
        try:
            if self._process.returncode is None:
                self.send(Shutdown())
                await asyncio.wait_for(self._process.wait(), _SHUTDOWN_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        finally:
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def _socket_home() -> str:
    """Where the socket's folder goes: a socket's path has 107 characters at the most, and TMPDIR may be longer."""
    home = tempfile.gettempdir()
    return home if len(home) <= _MAX_SOCKET_HOME else "/tmp"


class ThreadLink:
    """A core in a thread of this process."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[CoreMessage] = asyncio.Queue()
        self._dead: asyncio.Future[str] = self._loop.create_future()
        self._mailbox: ThreadMailbox | None = None
        self._backlog: list[Command] = []
        self._thread = threading.Thread(target=self._run, args=(config,), daemon=True, name="engine-core")
        self._thread.start()

    def send(self, command: Command) -> None:
        if self._mailbox is None:
            self._backlog.append(command)
        else:
            self._mailbox.put(command)

    async def receive(self) -> CoreMessage:
        return await self._messages.get()

    async def wait_dead(self) -> str:
        return await asyncio.shield(self._dead)

    async def close(self) -> None:
        self.send(Shutdown())
        await asyncio.wait([self._dead], timeout=_SHUTDOWN_S)

    def _run(self, config: EngineConfig) -> None:
        reason = "the engine core was shut down"
        try:
            from engine.core import EngineCore
            from engine.core_loop import ThreadMailbox, run_core

            mailbox = ThreadMailbox(lambda message: self._post(self._messages.put_nowait, message))
            core = EngineCore(config, mailbox.wake)
            self._post(self._attach, mailbox)
            run_core(core, mailbox)
        except Exception as error:
            reason = f"the engine core failed: {type(error).__name__}: {error}"
        self._post(self._end, reason)

    def _attach(self, mailbox: ThreadMailbox) -> None:
        self._mailbox = mailbox
        for command in self._backlog:
            mailbox.put(command)

    def _end(self, reason: str) -> None:
        if not self._dead.done():
            self._dead.set_result(reason)

    def _post(self, callback: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(callback, argument)
