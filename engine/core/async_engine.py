"""Asynchronous client of an engine core: requests in, streams of events out. Free of torch.

start ─▶ ready (EngineInfo) ─▶ dead (shut down, or the core's process ended)
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from engine.config import EngineConfig, EngineKind
from engine.core.messages import (
    AbortRequests,
    AddRequest,
    Command,
    CoreMessage,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    Outputs,
    RequestOutput,
    Shutdown,
    TokensEvent,
    TransferEvent,
)
from engine.errors import (
    CANNOT_START,
    EngineDeadError,
    EngineError,
    EngineStartError,
    InvalidRequest,
    may_pass,
    shown,
)
from engine.imports import child_environment
from engine.machine import openmp_waiting

_TICK_S = 0.25
_LATE_S = 0.1
"""A tick that is later than this has been delayed by a pause of this process, or of its machine."""


class RequestStream:
    """The events of one request, up to the TokensEvent with a finish reason. Closing it early aborts the request."""

    def __init__(self, engine: AsyncEngine, request_id: str, number: int) -> None:
        self.request_id = request_id
        self.number = number
        """Of the request, counted from 1."""
        self._engine = engine
        self._events: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._finished = False

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        event = await self._events.get()
        if event is None:
            self._finished = True
            raise EngineDeadError(self._engine.death or "the engine core has ended", crashed=self._engine.crashed)
        self._finished = isinstance(event, TokensEvent) and event.finish_reason is not None
        return event

    async def aclose(self) -> None:
        """Abort the request if it is not finished. Idempotent."""
        if self._engine.forget(self.request_id, self):
            self._engine.send(AbortRequests([self.request_id]))
        self._finished = True

    def push(self, event: RequestOutput | None) -> None:
        """Called by the engine; None: the core is dead."""
        self._events.put_nowait(event)


class AsyncEngine:
    """One engine core and the streams of its requests. Belongs to one event loop."""

    def __init__(self, link: CoreLink, info: EngineInfo) -> None:
        self.info = info
        self.load = EngineLoad()
        self.on_transfer_event: Callable[[TransferEvent], None] | None = None
        self.death: str | None = None
        self.crashed = False
        """Whether the core ended without being shut down."""
        self._link = link
        self._streams: dict[str, RequestStream] = {}
        self._num_added = 0
        self._last_answer_s = self._last_message_s = time.monotonic()
        self._tick_due_s = math.inf
        self._load_changed = asyncio.Event()
        self._dead = asyncio.Event()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        self._tick()

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncEngine:
        """Start a core and wait until its model is loaded. Raises EngineStartError if it ends instead because of its
        settings or its model, EngineDeadError if it ends otherwise; what ProcessLink.start raises."""
        link = await ProcessLink.start(config)
        first = asyncio.ensure_future(link.receive())
        dead = asyncio.ensure_future(link.wait_dead())
        try:
            await asyncio.wait([first, dead], return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                raise (EngineStartError if link.status == CANNOT_START else EngineDeadError)(dead.result())
            info = first.result()
            if not isinstance(info, EngineInfo):
                raise EngineError("the engine core sent no EngineInfo first")
        except BaseException:
            await link.close()
            raise
        finally:
            dead.cancel()
            first.cancel()
        return cls(link, info)

    @property
    def core_silence_s(self) -> float:
        """Seconds since the core's last message between two steps, of which it sends one every 250 ms. Without pauses
        of this process: they may have been the core's, too."""
        now_s = time.monotonic()
        return now_s - self._silent_since_s(now_s)

    @property
    def load_age_s(self) -> float:
        """Seconds since the core's last message between two steps, with all pauses: how old what `load` counts is."""
        return time.monotonic() - self._last_answer_s

    def add_request(self, request: EngineRequest) -> RequestStream:
        """Queue a request. Raises EngineDeadError, or InvalidRequest if its id is running."""
        if self.death is not None:
            raise EngineDeadError(self.death)  # not `crashed`: the core did not end under this request
        if request.request_id in self._streams:
            raise InvalidRequest("request_id", f"{shown(request.request_id)} is already running")
        self._num_added += 1
        stream = self._streams[request.request_id] = RequestStream(self, request.request_id, self._num_added)
        self.send(AddRequest(request))
        return stream

    def send(self, command: Command) -> None:
        """Queue a command. A dead core ignores it."""
        if self.death is None:
            self._link.send(command)

    def forget(self, request_id: str, stream: RequestStream) -> bool:
        """Stop delivering events to `stream`. True if it was unfinished."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            return True
        return False

    async def wait_load(self, timeout_s: float) -> None:
        """Return when the core has reported its load again, or after `timeout_s`."""
        self._load_changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._load_changed.wait(), timeout_s)

    async def wait_dead(self) -> str:
        """Return, with the reason, once the core has ended."""
        await self._dead.wait()
        return self.death or ""

    async def shutdown(self) -> None:
        """End the core. Unfinished streams raise EngineDeadError."""
        self._die("the engine core was shut down")
        self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()

    def kill(self, reason: str) -> None:
        """Ends a core that hangs, as if it had crashed: its streams raise EngineDeadError."""
        self._die(reason, crashed=True)
        self._link.kill()

    def _silent_since_s(self, now_s: float) -> float:
        """The time of the last message, moved by the delay of the tick that is due."""
        return min(now_s, self._last_message_s + max(0.0, now_s - self._tick_due_s - _LATE_S))

    def _tick(self) -> None:
        now_s = time.monotonic()
        self._last_message_s = self._silent_since_s(now_s)
        self._tick_due_s = now_s + _TICK_S
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    async def _receive(self) -> None:
        while True:
            message = await self._link.receive()
            if isinstance(message, Outputs):
                if message.answered:
                    self._last_answer_s = self._last_message_s = time.monotonic()
                self.load = message.load
                self._load_changed.set()
                for event in message.events:
                    self._dispatch(event, message.num_added)

    def _dispatch(self, event: RequestOutput | TransferEvent, num_added: int) -> None:
        if isinstance(event, TransferEvent):
            if self.on_transfer_event is not None:
                self.on_transfer_event(event)
            return
        stream = self._streams.get(event.request_id)
        if stream is None or num_added < stream.number:  # of an earlier request with this id, whose stream was closed
            return
        if isinstance(event, TokensEvent) and event.finish_reason is not None:
            del self._streams[event.request_id]
        stream.push(event)

    async def _watch(self) -> None:
        self._die(await self._link.wait_dead(), crashed=True)

    def _die(self, reason: str, *, crashed: bool = False) -> None:
        if self.death is not None:
            return
        self.death, self.crashed = reason, crashed
        self._dead.set()
        self._load_changed.set()
        for stream in self._streams.values():
            stream.push(None)
        self._streams.clear()


# The link to the core

_MODULES: dict[EngineKind, str] = {"tandem": "engine.core.process", "vllm": "vllm_engine.process"}
_SHUTDOWN_S = 5.0
_MAX_FOLDER_BYTES = 70


class CoreLink(Protocol):
    """A connection to an engine core; a test may script one."""

    def send(self, command: Command) -> None:
        """Queue a command. Does not block."""

    async def receive(self) -> CoreMessage:
        """The next message."""

    async def wait_dead(self) -> str:
        """Return, with the reason, once the core has ended."""

    def kill(self) -> None:
        """End the core without its doing anything for it. Does not wait."""

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
        """Spawn the process and send it its configuration. Raises EngineError for an interpreter that cannot be run,
        OSError where the machine lacks something."""
        python = config.python or sys.executable
        if shutil.which(python) is None:
            raise EngineError(f"engine.python: {python} is no program; give the path of a Python interpreter")
        try:
            payload = msgspec.msgpack.encode(config)
        except OverflowError as error:
            raise EngineError(
                "the engine's settings have an integer of more than 64 bits; give a smaller one"
            ) from error
        folder = Path(tempfile.mkdtemp(prefix="tandem-core-", dir=_temporary_folder()))
        address = f"ipc://{folder}/core"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set(zmq.LINGER, 0)
        socket.set_hwm(0)
        socket.bind(address)
        process: asyncio.subprocess.Process | None = None
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, "-m", _MODULES[config.kind], address),
                stdin=asyncio.subprocess.PIPE,
                env={**_openmp_waiting(config), **os.environ, **child_environment()},
            )
        except OSError as error:
            if may_pass(error):
                raise OSError(error.errno, f"the engine core's process cannot be started: {error.strerror}") from error
            raise EngineError(f"engine.python: {python} cannot be run: {error.strerror}") from error
        finally:
            if process is None:
                socket.close()
                shutil.rmtree(folder, ignore_errors=True)
        assert process.stdin is not None
        link = cls(process, socket, folder)
        try:
            process.stdin.write(len(payload).to_bytes(8, "little") + payload)
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
        except BaseException:
            await link._kill()
            raise
        return link

    def send(self, command: Command) -> None:
        # with a high-water mark of 0 the message is queued at once and the future is done
        self._socket.send(self._encoder.encode(command))

    async def receive(self) -> CoreMessage:
        message: CoreMessage = self._decoder.decode(await self._socket.recv())
        return message

    @property
    def status(self) -> int | None:
        """With which the process has ended; None: it runs."""
        return self._process.returncode

    async def wait_dead(self) -> str:
        status = await self._process.wait()
        return f"the engine core process {self._process.pid} ended with status {status}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        try:
            if self._process.returncode is None:
                self.send(Shutdown())
                await asyncio.wait_for(self._process.wait(), _SHUTDOWN_S)
        except TimeoutError:
            await self._kill()
        finally:
            self._remove()

    async def _kill(self) -> None:
        try:
            self.kill()
            await self._process.wait()
        finally:
            self._remove()

    def _remove(self) -> None:
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _openmp_waiting(config: EngineConfig) -> dict[str, str]:
    """None where the environment has a policy: a count of spins would override it."""
    return {} if "OMP_WAIT_POLICY" in os.environ else openmp_waiting(config.cpu_cores)


def _temporary_folder() -> str:
    """A socket's path has at most 107 bytes, and TMPDIR may be longer."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= _MAX_FOLDER_BYTES else "/tmp"
