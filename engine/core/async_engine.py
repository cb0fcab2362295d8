"""Asynchronous client of an engine core: requests in, streams of events out. Free of torch.

start ─▶ ready (EngineInfo) ─▶ dead (shut down, or the core's process ended)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from engine.config import EngineConfig
from engine.core.link import CoreLink, ProcessLink
from engine.core.messages import (
    AbortRequests,
    AddRequest,
    Command,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    Outputs,
    RequestOutput,
    TokensEvent,
    TransferEvent,
)
from engine.errors import EngineDeadError, EngineError, InvalidRequest, shown


class RequestStream:
    """The events of one request, up to the TokensEvent with a finish reason. Closing it early aborts the request."""

    def __init__(self, engine: AsyncEngine, request_id: str) -> None:
        self.request_id = request_id
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
        self._last_message_s = time.monotonic()
        self._load_changed = asyncio.Event()
        self._dead = asyncio.Event()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncEngine:
        """Start a core and wait until its model is loaded. Raises EngineDeadError if it ends instead."""
        link = await ProcessLink.start(config)
        first = asyncio.ensure_future(link.receive())
        dead = asyncio.ensure_future(link.wait_dead())
        try:
            await asyncio.wait([first, dead], return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                raise EngineDeadError(dead.result())
            info = first.result()
        except BaseException:
            await link.close()
            raise
        finally:
            dead.cancel()
            first.cancel()
        if not isinstance(info, EngineInfo):
            raise EngineError("the engine core sent no EngineInfo first")
        return cls(link, info)

    @property
    def core_silence_s(self) -> float:
        """Seconds since the core's last message. It sends one every 250 ms, but not during a step."""
        return time.monotonic() - self._last_message_s

    def add_request(self, request: EngineRequest) -> RequestStream:
        """Queue a request. Raises EngineDeadError, or InvalidRequest if its id is running."""
        if self.death is not None:
            raise EngineDeadError(self.death)  # not `crashed`: the core did not end under this request
        if request.request_id in self._streams:
            raise InvalidRequest("request_id", f"{shown(request.request_id)} is already running")
        stream = self._streams[request.request_id] = RequestStream(self, request.request_id)
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()

    async def _receive(self) -> None:
        while True:
            message = await self._link.receive()
            self._last_message_s = time.monotonic()
            if isinstance(message, Outputs):
                self.load = message.load
                self._load_changed.set()
                for event in message.events:
                    self._dispatch(event)

    def _dispatch(self, event: RequestOutput | TransferEvent) -> None:
        if isinstance(event, TransferEvent):
            if self.on_transfer_event is not None:
                self.on_transfer_event(event)
            return
        stream = self._streams.get(event.request_id)
        if stream is None:
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
