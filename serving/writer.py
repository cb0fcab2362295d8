"""The answer of one streaming call, written message by message for as long as its client reads.

    idle ⇄ writing ──longer than the timeout──▶ cut off: the call ends with RESOURCE_EXHAUSTED

grpcio's `write` returns when the message has left for the client, and waits for ever on one that does not read. A timer
for each message would cost as much as a good part of the message: there is one for each call, which looks at the clock
when it goes off. One message is written at a time; whoever shares a writer between tasks takes turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import grpc.aio
from google.protobuf.message import Message

from serving.errors import Overloaded

M = TypeVar("M", bound=Message)


class Writer(Generic[M]):
    """Owned by one call; whatever writes must run inside of `bounded`, in its task or one that this task waits for."""

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Any], serialised: Callable[[M], bytes], timeout_s: float
    ) -> None:
        self._context = context
        self._serialised = serialised
        self._timeout_s = timeout_s
        self._headers_sent = False
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, message: M) -> None:
        """Returns when `message` is on its way; raises TypeError when it is not what the method answers with."""
        data = self._serialised(message)
        if not self._headers_sent:
            await self._send_headers()
        self._since_s = time.monotonic()
        await self._context.write(data)
        self._since_s = None

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """While inside, a write that takes too long ends the block; raises Overloaded then."""
        try:
            async with asyncio.timeout(None) as bound:
                self._look(bound)
                try:
                    yield
                finally:
                    if self._timer is not None:
                        self._timer.cancel()
        except TimeoutError:
            if not bound.expired():
                raise
            raise Overloaded(f"client too slow: a message waited {self._timeout_s:g} s", None) from None

    def _look(self, bound: asyncio.Timeout) -> None:
        waited_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        if waited_s >= self._timeout_s:
            bound.reschedule(0.0)
        else:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s - waited_s, self._look, bound)

    async def _send_headers(self) -> None:
        """Sends the headers on their own, to the end even when cancelled.

        Otherwise they travel with the first message; if that write is cancelled, grpcio sends them again with the
        status, its core refuses the batch, and the client gets no status at all.
        """
        sending = asyncio.ensure_future(self._context.send_initial_metadata(()))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait({sending})
            raise
        self._headers_sent = True
