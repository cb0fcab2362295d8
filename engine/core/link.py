"""The link from `AsyncEngine` to an engine core in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from engine.config import EngineConfig, EngineKind
from engine.core.messages import Command, CoreMessage, Shutdown
from engine.errors import EngineError

_MODULES: dict[EngineKind, str] = {"tandem": "engine.core.process", "vllm": "vllm_engine.process"}
_SHUTDOWN_S = 5.0
_MAX_FOLDER_CHARS = 70


class CoreLink(Protocol):
    """A connection to an engine core."""

    def send(self, command: Command) -> None:
        """Queue a command. Does not block."""

    async def receive(self) -> CoreMessage:
        """The next message."""

    async def wait_dead(self) -> str:
        """Return, with the reason, once the core has ended."""

    async def close(self) -> None:
        """End the core and remove its files."""


class ProcessLink:
    """A core in a separate process, with a socket in a private folder."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: Path) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(CoreMessage)

    @classmethod
    async def start(cls, config: EngineConfig) -> ProcessLink:
        """Spawn the process and send it its configuration. Raises EngineError for an interpreter that does not exist.

        Waiting threads spin only on dedicated cores: on shared ones spinning makes a step 5 to 10 times as long
        (benchmarks/LOG.md).
        """
        python = config.python or sys.executable
        if shutil.which(python) is None:
            raise EngineError(f"engine.python: {python} is no program; give the path of a Python interpreter")
        folder = Path(tempfile.mkdtemp(prefix="tandem-core-", dir=_temporary_folder()))
        address = f"ipc://{folder}/core"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set(zmq.LINGER, 0)
        socket.set_hwm(0)
        socket.bind(address)
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", _MODULES[config.kind], address),
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
        # with a high-water mark of 0 the message is queued at once and the future is done
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


def _temporary_folder() -> str:
    """A socket's path has at most 107 characters, and TMPDIR may be longer."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _MAX_FOLDER_CHARS else "/tmp"
