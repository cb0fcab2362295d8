"""The life of a request that an instance decodes, whichever its role, and the streams in which calls share messages.

    Decode(start) ─▶ waiting ─reserved▶ loading ─loaded and seeded▶ running ─tokens …▶ finished
                        │                  └─ missing, damaged or late KV is computed here
                        ├─ without a transfer: prefilled here, running at once, no seed
                        └─ no blocks, no seed in time, cancelled, engine dead ─▶ aborted, transfer released ─▶ freed

The engine moves the request. The servicer reads the seed while it waits, lets a `TransferClient` read the transfer at
the prefill instance from the reservation on, and releases it once the KV is loaded or no longer needed. A prefill
instance gets requests without a transfer here: those that it serves alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from engine import failpoints
from engine.core.messages import LoadedEvent, ReservedEvent
from instance.convert import Choice, TransferSource, common_fields, decode_choice, seed_ids
from instance.metrics import Observation
from instance.requests import ChoiceStream, ChoiceStreamEvent
from instance.transfers import TransferClient
from protos.tandem.v1 import decode_pb2
from serving import tracing
from serving.errors import AlreadyExists, Overloaded, ServiceError, StreamEnded, invalid_argument
from serving.interceptor import Context, StreamWriter
from serving.limits import CONTROL, CallEnd, call_end
from serving.logging import RequestEvent, set_request_id
from serving.waits import end_tasks, within

if TYPE_CHECKING:
    from instance.server import InstanceServer

SERVICE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"]
POLICIES = {"StreamTokens": CONTROL}
MAX_STREAM_ID_CHARS = 128

Requests = AsyncIterator[decode_pb2.DecodeRequest]
WriteResponse = Callable[[decode_pb2.DecodeResponse], Awaitable[None]]  # writes one response of one call
WriteMessage = Callable[[decode_pb2.StreamTokensResponse], Awaitable[None]]  # returns when the message is written

_CANCEL_NOTICE_S = 0.1
"""A cancelled call's messages end shortly before the call does."""
_MAX_STREAMS = 256
_MAX_BATCH_BYTES = 1 << 18  # some thousands of responses. Routers accept messages of 4 MiB by default.
_MARKS = {ReservedEvent: RequestEvent.KV_RESERVED, LoadedEvent: RequestEvent.KV_LOADED}


class DecodeServicer:
    """Generates from KV of a prefill instance or of this one. Belongs to the server's event loop."""

    def __init__(self, server: InstanceServer) -> None:
        self._choices = server.choices
        self._instance_epoch = server.instance_epoch
        self._metrics = server.metrics
        self._transfers = server.transfers
        self._token_streams = TokenStreams()

    async def Decode(
        self,
        request: Requests,
        context: Context,
        writer: StreamWriter[decode_pb2.DecodeResponse],
    ) -> None:
        first = await anext(request, None)
        if first is None or first.WhichOneof("message") != "start":
            raise invalid_argument("start", "is missing", "start as the first message")
        choice, source = decode_choice(first.start, self._choices.limits)
        set_request_id(choice.request_id)
        async with (
            self._token_streams.response_writer(first.start, writer.write) as write,
            aclosing(self._responses(choice, source, request)) as responses,
        ):
            async for response in responses:
                await write(response)

    async def StreamTokens(
        self,
        request: decode_pb2.StreamTokensRequest,
        context: Context,
        writer: StreamWriter[decode_pb2.StreamTokensResponse],
    ) -> None:
        if not 0 < len(request.stream_id) <= MAX_STREAM_ID_CHARS:
            raise invalid_argument("stream_id", "is missing or too long", f"1 to {MAX_STREAM_ID_CHARS} characters")
        await self._token_streams.serve_stream(request.stream_id, writer.write)

    async def _responses(
        self, choice: Choice, source: TransferSource | None, requests: Requests
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """The responses of one Decode call. Closing it early frees everything, here and at the prefill instance."""
        observed = self._metrics.observe_request(choice.engine_request)
        with observed as observation, _stages(choice, source, observation) as stages:
            async with (
                self._choices.open(choice) as stream,
                aclosing(self._events(stream, source, requests)) as events,
            ):
                async for event in events:
                    if isinstance(event, ReservedEvent | LoadedEvent):
                        observation.timeline.mark(_MARKS[type(event)])
                        yield self._progress(event)
                        continue
                    if observation.observe_chunk(event, stream.first):
                        stages.note({"tandem.queue_ms": observation.queue_s * 1e3})
                        stages.next("decode.generate")
                    yield decode_pb2.DecodeResponse(tokens=event)
                    await failpoints.hit_async("decode.after_token")

    async def _events(
        self, stream: ChoiceStream, source: TransferSource | None, requests: Requests
    ) -> AsyncGenerator[ChoiceStreamEvent, None]:
        """The events of a choice. With a `source`, KV and seed come from elsewhere, and both are read meanwhile."""
        if source is None:
            async for one in stream:
                yield one
            return
        with self._transfers.read_transfer(source, stream.choice.request_id) as transfer:
            seeded = asyncio.create_task(self._read_seed(stream, requests))
            try:
                while (event := await _next_unless_failed(stream, seeded)) is not None:
                    await _notify(transfer, event)
                    yield event
            finally:
                await end_tasks(seeded)

    async def _read_seed(self, stream: ChoiceStream, requests: Requests) -> None:
        """The client's second message. It may precede the reservation; without it the engine gives the request up."""
        message = await anext(requests, None)
        if message is None:
            await asyncio.sleep(_CANCEL_NOTICE_S)
        if message is None or message.WhichOneof("message") != "seed":
            raise invalid_argument("seed", "is missing", "start with a transfer, then seed, then the end of the stream")
        stream.seed(seed_ids(message.seed, stream.choice, self._choices.limits))
        self._metrics.num_seeded += 1

    def _progress(self, event: ReservedEvent | LoadedEvent) -> decode_pb2.DecodeResponse:
        """The response for an event before the first token; counts it."""
        if isinstance(event, ReservedEvent):
            fields = common_fields(event, decode_pb2.DecodeReserved)
            reserved = decode_pb2.DecodeReserved(instance_epoch=self._instance_epoch, **fields)
            return decode_pb2.DecodeResponse(reserved=reserved)
        self._metrics.num_loaded += 1
        self._metrics.num_external_tokens += event.num_external_tokens
        self._metrics.num_recomputed_blocks += event.num_recomputed_blocks
        loaded = decode_pb2.DecodeLoaded(**common_fields(event, decode_pb2.DecodeLoaded))
        return decode_pb2.DecodeResponse(loaded=loaded)


@contextmanager
def _stages(choice: Choice, source: TransferSource | None, observation: Observation) -> Iterator[tracing.Stages]:
    """Spans up to the first token from here, then up to the last."""
    first = "decode.prefill" if source is None else "decode.wait"
    stages = tracing.Stages(first, attributes={"gen_ai.request.id": choice.request_id})
    try:
        yield stages
    finally:
        stages.end(failure="ended before its last token" if observation.finish_reason is None else None)


async def _notify(transfer: TransferClient, event: ChoiceStreamEvent) -> None:
    if isinstance(event, ReservedEvent):
        transfer.blocks_reserved(event.num_local_blocks)
        await failpoints.hit_async("decode.reserved")
    elif isinstance(event, LoadedEvent):
        transfer.load_finished(event)
        await failpoints.hit_async("decode.loaded")


async def _next_unless_failed(stream: ChoiceStream, task: asyncio.Task[None]) -> ChoiceStreamEvent | None:
    """The next event, None after the last; raises an error of `task` as soon as it occurs."""
    if task.done():
        task.result()
        return await anext(stream, None)
    upcoming = asyncio.ensure_future(anext(stream, None))
    try:
        await asyncio.wait({upcoming, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return await upcoming
    finally:
        upcoming.cancel()


# Token streams


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
        timeout = asyncio.timeout(None)
        async with within(timeout, lambda: StreamEnded("the token stream has ended")):
            self._calls[call_number] = timeout, call_end()
            try:
                yield partial(self._add_response, call_number)
                await self._wait_written()
            except ServiceError:
                await self._wait_written()
                raise
            finally:
                del self._calls[call_number]

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
    """The open streams of one instance, by id, in which Decode calls of one router respond: one message per step of the
    engine. Belongs to the instance's event loop.

        opened ──first message, empty──▶ open ──cancelled, router gone or not reading──▶ ended, and the calls on it too

    A call joins the stream named by its start and leaves it once its last response is written, so that a drain that
    waits for calls has waited for the streams as well. No message waits to be filled: responses are batched only while
    the previous message is being written, or until the writer is scheduled. A full batch blocks the calls that add to
    it.
    """

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
