"""From a request's work to its client: messages made of token chunks, written one at a time, and the end from outside.

    open ──abort──▶ ending: no message begins; the work is cancelled when the one being written is out ──▶ aborted
     └──the work ends by itself──▶ over

The work runs in the call's own task and writes what it emits: a queue between two tasks would cost each token a turn of
the event loop more. A client that does not read keeps the work waiting. Choices that share a stream take turns. What
has been emitted is delivered, whatever the moment of an abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from protos.tandem.v1 import common_pb2, generation_pb2
from router.request import GenerationRequest
from serving.errors import Overloaded

Emit = Callable[[common_pb2.TokenChunk], Awaitable[None]]

_WRITE_GRACE_S = 0.5
"""How long an abort waits for the message that is being written: gRPC takes no other one before."""


class Sink(Protocol):
    """Where an answer goes, in whatever protocol."""

    async def write(self, message: generation_pb2.GenerateResponse, /) -> None:
        """Returns when `message` is on its way. The message is reused for the next one: nothing may keep it."""
        ...


class Relay:
    """One request's way to its client. Belongs to the call's task."""

    def __init__(self, request: GenerationRequest, sink: Sink) -> None:
        self._sink = sink
        self._turn = asyncio.Lock()
        self._num_choices = request.params.n
        self._response = generation_pb2.GenerateResponse(
            request_id=request.label, seed=request.seed, prompt_tokens=request.num_prompt_tokens, model=request.model
        )
        self._on_begin: Callable[[], object] | None = None
        self._is_writing = False
        self._is_ending = False
        self._late: list[common_pb2.TokenChunk] = []
        self._scope: asyncio.Timeout | None = None
        self._aborted = False

    @property
    def aborted(self) -> bool:
        """Whether `abort` ended the work before it was over."""
        return self._aborted

    def on_begin(self, call: Callable[[], object]) -> None:
        """`call` is called once, before the first message goes out."""
        self._on_begin = call

    def abort(self) -> None:
        """Ends the work. Only while inside of `until_aborted`."""
        self._is_ending = True
        self._end_work(_WRITE_GRACE_S if self._is_writing else 0.0)

    @asynccontextmanager
    async def until_aborted(self) -> AsyncIterator[None]:
        """The work runs inside. An abort is a good end, unless the client does not even take what is being written."""
        self._scope = scope = asyncio.timeout(None)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            if self._is_writing:
                raise Overloaded("client too slow: the request was aborted while a message waited", None) from None
            self._aborted = True
        finally:
            self._scope, self._is_ending = None, False

    async def emit(self, chunk: common_pb2.TokenChunk) -> None:
        """Returns when the message with `chunk` is on its way. The first one tells seed, prompt length and model."""
        if self._on_begin is not None:
            self._on_begin()
            self._on_begin = None
        if self._num_choices == 1:
            await self._write(chunk)
        else:
            await self._write_in_turn(chunk)

    async def catch_up(self) -> None:
        """After an abort: writes what was emitted while the work was ending."""
        for chunk in self._late:
            await self._write(chunk)

    async def _write_in_turn(self, chunk: common_pb2.TokenChunk) -> None:
        try:
            await self._turn.acquire()
        except asyncio.CancelledError:
            self._late.append(chunk)
            raise
        try:
            await self._write(chunk)
        finally:
            self._turn.release()

    async def _write(self, chunk: common_pb2.TokenChunk) -> None:
        if self._is_ending:
            self._late.append(chunk)
            await asyncio.Event().wait()  # until it is cancelled
        response = self._response
        response.tokens.CopyFrom(chunk)
        self._is_writing = True
        await self._sink.write(response)
        self._is_writing = False
        if response.model:  # it was the first
            for field in ("seed", "prompt_tokens", "model"):
                response.ClearField(field)
        if self._is_ending:
            self._end_work(0.0)

    def _end_work(self, delay_s: float) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time() + delay_s)
