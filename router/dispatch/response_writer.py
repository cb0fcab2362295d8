"""Writes one request's token chunks to its client, one message at a time, and ends its work on an abort.

    open ──abort──▶ ending: no message begins; the work is cancelled when the current one is written ──▶ aborted
     └──the work ends by itself──▶ over

The work runs in the call's own task and writes what it emits: a queue between two tasks would cost each token another
turn of the event loop. A client that does not read makes the work wait. Choices share the stream and write one after
the other. What has been emitted is delivered, whatever the moment of an abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from protos.tandem.v1 import common_pb2, generation_pb2
from router.request.chat_output import ChatDeltas
from router.request.generation_request import GenerationRequest
from serving.errors import Overloaded

Emit = Callable[[common_pb2.TokenChunk], Awaitable[None]]

_WRITE_GRACE_S = 0.5  # how long an abort waits for the message that is being written: gRPC takes no other one before


Sink = Callable[[generation_pb2.GenerateResponse], Awaitable[None]]
"""Where an answer goes, in any protocol: returns when the message is on its way. The message is reused for the next one
and must not be kept."""


class ResponseWriter:
    """The response stream of one request. Belongs to the call's task."""

    def __init__(self, request: GenerationRequest, sink: Sink) -> None:
        self._sink = sink
        self._on_first_chunk: Callable[[], object] | None = None
        self._write_lock = asyncio.Lock()
        self._num_choices = request.params.n
        self._response = generation_pb2.GenerateResponse(
            request_id=request.label, seed=request.seed, prompt_tokens=request.num_prompt_tokens, model=request.model
        )
        self._deltas = None
        if request.chat_output:
            is_constrained = request.params.is_constrained
            self._deltas = ChatDeltas(request.request_id, request.chat_output, is_constrained=is_constrained)
        self._is_writing = False
        self._is_ending = False
        self._unsent: list[common_pb2.TokenChunk] = []
        self._scope: asyncio.Timeout | None = None
        self.aborted = False  # whether `abort` ended the work before it was over

    def on_first_chunk(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once, before the first message is written."""
        self._on_first_chunk = callback

    def abort(self) -> None:
        """Ends the work. Only inside `until_aborted`."""
        self._is_ending = True
        self._end_work(_WRITE_GRACE_S if self._is_writing else 0.0)

    @asynccontextmanager
    async def until_aborted(self) -> AsyncIterator[None]:
        """The work runs inside. An abort ends it without an error, unless the client blocks the current message."""
        self._scope = scope = asyncio.timeout(None)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            if self._is_writing:
                raise Overloaded("client too slow: the request was aborted while a message waited", None) from None
            self.aborted = True
        finally:
            self._scope, self._is_ending = None, False

    async def emit(self, chunk: common_pb2.TokenChunk) -> None:
        """Returns when the message with `chunk` is on its way. The first one carries seed, prompt length and model."""
        if self._on_first_chunk is not None:
            self._on_first_chunk()
            self._on_first_chunk = None
        if self._num_choices == 1:
            await self._write(chunk)
        else:
            await self._write_in_turn(chunk)

    async def write_unsent(self) -> None:
        """After an abort: writes what was emitted while the work was ending."""
        for chunk in self._unsent:
            await self._write(chunk)

    async def _write_in_turn(self, chunk: common_pb2.TokenChunk) -> None:
        try:
            await self._write_lock.acquire()
        except asyncio.CancelledError:
            self._unsent.append(chunk)
            raise
        try:
            await self._write(chunk)
        finally:
            self._write_lock.release()

    async def _write(self, chunk: common_pb2.TokenChunk) -> None:
        if self._is_ending:
            self._unsent.append(chunk)
            await asyncio.Event().wait()  # until it is cancelled
        response = self._response
        response.tokens.CopyFrom(chunk)
        if self._deltas is not None:
            response.delta.CopyFrom(self._deltas.of(chunk))
        self._is_writing = True
        await self._sink(response)
        self._is_writing = False
        if response.model:  # it was the first
            for field in ("seed", "prompt_tokens", "model"):
                response.ClearField(field)
        if self._is_ending:
            self._end_work(0.0)

    def _end_work(self, delay_s: float) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time() + delay_s)
