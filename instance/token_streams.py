"""Token streams: shared streams in which Decode calls of one router respond, one message per step of the engine.

    opened ──first message, empty──▶ open ──cancelled, router gone or not reading──▶ ended, and the calls on it too

A call joins the stream named by its start and leaves it once its last response is written, so that a drain that waits
for calls has waited for the streams as well. No message waits to be filled: responses are batched only while the
previous message is being written, or until the writer is scheduled. A full batch blocks the calls that add to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from protos.tandem.v1 import decode_pb2
from serving.errors import AlreadyExists, Overloaded, ServiceError, StreamEnded
from serving.limits import CallEnd, call_end

WriteResponse = Callable[[decode_pb2.DecodeResponse], Awaitable[None]]  # writes one response of one call
WriteMessage = Callable[[decode_pb2.StreamTokensResponse], Awaitable[None]]  # returns when the message is written

_MAX_STREAMS = 256
_MAX_BATCH_BYTES = 1 << 18  # some thousands of responses. Routers accept messages of 4 MiB by default.


@dataclass(slots=True)
class _Batch:
    """One message, from its first response until it is written."""

    message: decode_pb2.StreamTokensResponse = field(default_factory=decode_pb2.StreamTokensResponse)
    num_bytes: int = 0
    written: asyncio.Event = field(default_factory=asyncio.Event)


class _TokenStream:
    """One stream and the calls on it. Owned by the task of its StreamTokens call."""

    def __init__(self) -> None:
        self._batch = _Batch()
        self._last_written = self._batch
        self._has_responses = asyncio.Event()
        self._calls: dict[int, tuple[asyncio.Timeout, CallEnd]] = {}
        """The calls on the stream, by number; their timeouts are rescheduled to now when the stream ends."""

    async def write_batches(self, write: WriteMessage) -> None:
        """Writes until it is cancelled or `write` raises; then every call on the stream ends with StreamEnded."""
        try:
            self._has_responses.set()
            while True:
                await self._has_responses.wait()
                self._has_responses.clear()
                self._last_written, self._batch = self._batch, _Batch()
                await write(self._last_written.message)
                self._last_written.written.set()
        finally:
            for timeout, end in self._calls.values():
                if not timeout.expired():
                    end.error = end.error or call_end().error  # where the server ends the stream, it ends the calls too
                    timeout.reschedule(0.0)

    @asynccontextmanager
    async def join(self, call_number: int) -> AsyncIterator[WriteResponse]:
        """The writer of one call's responses; unless cancelled, the block ends when all of them are written."""
        if call_number in self._calls:
            raise AlreadyExists(f"call number {call_number} is in use on this token stream")
        try:
            async with asyncio.timeout(None) as timeout:
                self._calls[call_number] = timeout, call_end()
                try:
                    yield partial(self._add_response, call_number)
                    await self._wait_written()
                except ServiceError:
                    await self._wait_written()
                    raise
                finally:
                    del self._calls[call_number]
        except TimeoutError:
            if not timeout.expired():
                raise
            raise StreamEnded("the token stream has ended") from None

    async def _add_response(self, call_number: int, response: decode_pb2.DecodeResponse) -> None:
        while self._batch.num_bytes >= _MAX_BATCH_BYTES:
            await self._batch.written.wait()
        self._batch.message.responses.add(call_number=call_number, response=response)
        self._batch.num_bytes += response.ByteSize()
        self._has_responses.set()

    async def _wait_written(self) -> None:
        """Returns when all responses added so far are written."""
        batch = self._batch if self._batch.num_bytes else self._last_written
        await batch.written.wait()


class TokenStreams:
    """The open streams of one instance, by id. Belongs to its event loop."""

    def __init__(self) -> None:
        self._open: dict[str, _TokenStream] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def serve_stream(self, stream_id: str, write: WriteMessage) -> None:
        """One stream, until it is cancelled or `write` raises. Raises AlreadyExists, or Overloaded above 256."""
        if stream_id in self._open:
            raise AlreadyExists("this token stream is already open")
        if len(self._open) >= _MAX_STREAMS:
            raise Overloaded(f"limit of {_MAX_STREAMS} token streams reached", 1.0)
        stream = self._open[stream_id] = _TokenStream()
        try:
            await stream.write_batches(write)
        finally:
            del self._open[stream_id]

    @asynccontextmanager
    async def response_writer(self, start: decode_pb2.DecodeStart, own: WriteResponse) -> AsyncIterator[WriteResponse]:
        """The writer for the call that `start` opens: the stream that it names if that is open, else the call's `own`.

        Raises AlreadyExists for a call number in use, and StreamEnded when the stream ends before the call.
        """
        named = start.token_stream
        stream = self._open.get(named.stream_id) if start.HasField("token_stream") else None
        if stream is None:
            yield own
            return
        async with stream.join(named.call_number) as write:
            yield write
