"""The streams in which decodes answer together: what an engine's step brings for one router goes to it as one message.

    opened ──first message, empty──▶ open ──its router cancels it, goes away or does not read──▶ ended, and its calls

A call joins the stream that its start names and leaves it once its last answer is on its way, so that a drain which
waits for calls has waited for the streams as well. Nothing waits for a fuller message: while one is being written, or
before the writer gets its turn, answers gather, and then all of them leave. Too many that wait hold up who answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from protos.tandem.v1 import decode_pb2
from serving.errors import AlreadyExists, Overloaded, ServiceError, Unavailable

Answer = Callable[[decode_pb2.DecodeResponse], Awaitable[None]]
"""Sends one answer of one call."""
Write = Callable[[decode_pb2.StreamTokensResponse], Awaitable[None]]
"""Returns when the message is on its way."""

_MAX_STREAMS = 256
_MAX_BATCH_BYTES = 1 << 18
"""Of answers that gather: some thousands. A router takes messages of 4 MiB, unless it is told otherwise."""


@dataclass(slots=True)
class _Batch:
    """One message, while it gathers and until it is written."""

    message: decode_pb2.StreamTokensResponse = field(default_factory=decode_pb2.StreamTokensResponse)
    num_bytes: int = 0
    written: asyncio.Event = field(default_factory=asyncio.Event)


class _TokenStream:
    """One stream and the calls on it. Owned by the task of its own call."""

    def __init__(self) -> None:
        self._gathering = _Batch()
        self._written_last = self._gathering
        self._is_due = asyncio.Event()
        self._ends: dict[int, asyncio.Timeout] = {}

    async def run(self, write: Write) -> None:
        """Writes for ever; once it is cancelled, or `write` raises, every call on the stream ends with Unavailable."""
        try:
            self._is_due.set()
            while True:
                await self._is_due.wait()
                self._is_due.clear()
                self._written_last, self._gathering = self._gathering, _Batch()
                await write(self._written_last.message)
                self._written_last.written.set()
        finally:
            for end in self._ends.values():
                if not end.expired():
                    end.reschedule(0.0)

    @asynccontextmanager
    async def joined(self, call_number: int) -> AsyncIterator[Answer]:
        """What one call answers while inside; left, but for a cancellation, when all of that is on its way."""
        if call_number in self._ends:
            raise AlreadyExists(f"call number {call_number} runs on this token stream")
        try:
            async with asyncio.timeout(None) as end:
                self._ends[call_number] = end
                try:
                    yield partial(self._put, call_number)
                    await self._flushed()
                except ServiceError:
                    await self._flushed()
                    raise
                finally:
                    del self._ends[call_number]
        except TimeoutError:
            if not end.expired():
                raise
            raise Unavailable("its token stream has ended") from None

    async def _put(self, call_number: int, response: decode_pb2.DecodeResponse) -> None:
        while self._gathering.num_bytes >= _MAX_BATCH_BYTES:
            await self._gathering.written.wait()
        self._gathering.message.responses.add(call_number=call_number, response=response)
        self._gathering.num_bytes += response.ByteSize()
        self._is_due.set()

    async def _flushed(self) -> None:
        """Returns when everything put so far is on its way."""
        batch = self._gathering if self._gathering.num_bytes else self._written_last
        await batch.written.wait()


class TokenStreams:
    """The open streams of one instance, by id. Belongs to its event loop."""

    def __init__(self) -> None:
        self._open: dict[str, _TokenStream] = {}

    @property
    def num_open(self) -> int:
        """Streams that can be named now."""
        return len(self._open)

    async def run(self, stream_id: str, write: Write) -> None:
        """One stream, until it is cancelled or `write` raises. Raises AlreadyExists, or Overloaded above 256."""
        if stream_id in self._open:
            raise AlreadyExists("this token stream is open")
        if len(self._open) >= _MAX_STREAMS:
            raise Overloaded(f"{_MAX_STREAMS} token streams are open, the most allowed", 1.0)
        stream = self._open[stream_id] = _TokenStream()
        try:
            await stream.run(write)
        finally:
            del self._open[stream_id]

    @asynccontextmanager
    async def way_of(self, start: decode_pb2.DecodeStart, own: Answer) -> AsyncIterator[Answer]:
        """How the call that `start` opens answers: in the stream that it names, else, or if that is not open, by `own`.

        Raises AlreadyExists for a call number in use; where the stream ends before the call, Unavailable.
        """
        named = start.token_stream
        stream = self._open.get(named.stream_id) if start.HasField("token_stream") else None
        if stream is None:
            yield own
            return
        async with stream.joined(named.call_number) as answer:
            yield answer
