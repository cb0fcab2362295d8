"""From a request's work to its client: a short queue between two tasks.

The work runs in a task of its own, so that it can be ended from outside (abort, deadline, disconnect) at whatever it
waits for, and so that several choices can share one stream. A client that does not read fills the queue, and then the
work waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from protos.tandem.v1 import common_pb2

Emit = Callable[[common_pb2.TokenChunk], Awaitable[None]]

_MAX_CHUNKS = 64


class Relay:
    """One request's queue and the task that fills it. Made by `relayed`."""

    def __init__(self, work: Callable[[Emit], Awaitable[None]]) -> None:
        self._chunks: deque[common_pb2.TokenChunk] = deque()
        self._wake_reader = asyncio.Event()
        self._wake_writer = asyncio.Event()
        self._aborted = False
        self._task = asyncio.create_task(self._run(work))
        self._task.add_done_callback(self._ended)

    @property
    def aborted(self) -> bool:
        """Whether `abort` ended it before it was over."""
        return self._aborted

    def abort(self) -> None:
        """Ends the work; the chunks that are queued are still delivered."""
        if not self._task.done():
            self._aborted = True
            self._task.cancel()

    async def chunks(self) -> AsyncIterator[common_pb2.TokenChunk]:
        """Every chunk, then the work's own exception if it failed. An abort is a good end."""
        while True:
            while self._chunks:
                yield self._chunks.popleft()
                self._wake_writer.set()
            if self._task.done():
                if not self._task.cancelled() or not self._aborted:
                    self._task.result()
                return
            self._wake_reader.clear()
            await self._wake_reader.wait()

    async def close(self) -> None:
        """Ends the work and waits until it has let go of everything."""
        self._task.cancel()
        await asyncio.wait({self._task})

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # looked at here, since nobody may be left to tell
        self._wake_reader.set()

    async def _run(self, work: Callable[[Emit], Awaitable[None]]) -> None:
        await work(self._put)

    async def _put(self, chunk: common_pb2.TokenChunk) -> None:
        while len(self._chunks) >= _MAX_CHUNKS:
            self._wake_writer.clear()
            await self._wake_writer.wait()
        self._chunks.append(chunk)
        self._wake_reader.set()


@asynccontextmanager
async def relayed(work: Callable[[Emit], Awaitable[None]]) -> AsyncIterator[Relay]:
    """Runs `work` while inside; leaving ends it."""
    relay = Relay(work)
    try:
        yield relay
    finally:
        await relay.close()
