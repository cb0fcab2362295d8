"""The one place that every call passes: parse, admit, bound, write, answer errors.

headers ─▶ request id ─▶ gate ─▶ admission ─▶ deadline ─▶ read, parse ─▶ handler ─▶ bounded write ─▶ status

grpcio answers malformed protobuf with UNKNOWN and a Python class name, lets deadlines of 0 and of 30 years through,
waits for ever on a client that does not read, and as long for the message of a call that nobody has counted yet. So
methods are registered without (de)serialisers, and as taking a stream, which looks the same on the wire; this guard
does the rest inside its own bounds and its own error handling. A streaming method is an async generator, or a coroutine
function that writes its answer to a third argument, a Writer, which is cheaper for each message. The guard closes or
cancels it when the call ends early, and so its `finally` blocks are where a request's resources are freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from serving.bad_callers import BadCallers
from serving.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    ServiceError,
    status_text,
    trailers,
)
from serving.large_messages import LargeMessages
from serving.logging import request_id, set_request_id
from serving.open_calls import REQUEST, CallPolicy, OpenCalls, peer_key
from serving.writer import Writer

REQUEST_ID_KEY = "tandem-request-id"
"""Metadata key that carries a request's id between the services."""

Context = grpc.aio.ServicerContext[Any, Any]
Gate = Callable[[Context], None]
"""Looks at who calls, before anything else does. Raises Unauthenticated or PermissionDenied."""
T = TypeVar("T")

_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SHORTEST_DEADLINE_S = 0.002  # gRPC rounds a deadline of 0 up on its way: without this, some such calls get through
_REFUSED_S = 1.0
"""Longest wait for the message of a call that is refused: it comes with the headers, or is not meant to come."""
_MAX_REFUSED = 512
"""Calls of one address that wait so: more than have their messages under way."""
_deadline_s: ContextVar[float | None] = ContextVar("tandem_deadline", default=None)


def remaining_s() -> float | None:
    """Seconds that the current call may still take, by the client's deadline and the server's cap; None: no bound."""
    deadline_s = _deadline_s.get()
    return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What bounds a single call."""

    max_deadline_s: float
    read_timeout_s: float
    write_timeout_s: float


class _NoMessage(InvalidArgument):
    """The client has closed its side, or gone."""


class CallGuard:
    """Makes grpc handlers of a servicer's methods. One per server; it owns no call, each call's task does."""

    def __init__(
        self, limits: CallLimits, open_calls: OpenCalls, bad_callers: BadCallers, gate: Gate | None = None
    ) -> None:
        """`gate` None lets everybody call."""
        self._limits = limits
        self._open_calls = open_calls
        self._bad_callers = bad_callers
        self._gate = gate
        self._num_refused: Counter[str] = Counter()
        self._large = LargeMessages()

    def handlers(
        self, service: ServiceDescriptor, servicer: object, policies: Mapping[str, CallPolicy]
    ) -> grpc.GenericRpcHandler:
        """The handlers of every method of `service`; raises TypeError where `servicer` or `policies` do not fit it."""
        if unknown := policies.keys() - {method.name for method in service.methods}:
            raise TypeError(f"{service.full_name} has no {', '.join(sorted(unknown))}")
        handlers = {
            method.name: self._handler(method, getattr(servicer, method.name, None), policies.get(method.name, REQUEST))
            for method in service.methods
        }
        return grpc.method_handlers_generic_handler(service.full_name, handlers)

    def _handler(self, method: MethodDescriptor, behaviour: Any, policy: CallPolicy) -> grpc.RpcMethodHandler[Any, Any]:
        is_generator = inspect.isasyncgenfunction(behaviour) and method.server_streaming
        if not (is_generator or inspect.iscoroutinefunction(behaviour)):
            kind = "an async generator or a coroutine function" if method.server_streaming else "a coroutine function"
            raise TypeError(f"{method.full_name} must be implemented as {kind}")
        call = _Method(method, behaviour, policy)

        # What comes is read from the context: grpcio's iterator keeps itself and the call alive until Python's garbage
        # is collected, and a server with thousands of ended calls alive refuses new ones.
        async def unary(_: AsyncIterator[bytes], context: Context) -> bytes:
            await self._turn_away(context)
            return await self._guarded(call, context, lambda: self._answer(call, context))

        async def streaming(_: AsyncIterator[bytes], context: Context) -> None:
            await self._turn_away(context)
            await self._guarded(call, context, lambda: self._stream(call, context))

        # The stubs type these for the threaded server; the asyncio one takes coroutine functions.
        make_streaming: Any = grpc.stream_stream_rpc_method_handler
        make_unary: Any = grpc.stream_unary_rpc_method_handler
        handler: grpc.RpcMethodHandler[Any, Any] = (
            make_streaming(streaming) if method.server_streaming else make_unary(unary)
        )
        return handler

    async def _turn_away(self, context: Context) -> None:
        """Ends a call of a connection that is being dropped, as cheaply as can be."""
        if self._bad_callers.is_condemned(context.peer()):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this connection has begun too many calls in vain")

    async def _guarded(self, call: _Method, context: Context, body: Callable[[], Awaitable[T]]) -> T:
        """Runs one call's body within its bounds; every exception but a cancellation ends in a status."""
        set_request_id(_incoming_request_id(context))
        try:
            if self._gate is not None:
                self._gate(context)
            with self._open_calls.admitted(context.peer(), call.policy):
                try:
                    with self._open_calls.awaited(call.policy):
                        return await self._within_deadline(call, context, body)
                except ServiceError as error:
                    # Still admitted: a client that never reads its status keeps its place until it goes away.
                    if isinstance(error, InvalidArgument) and not isinstance(error, _NoMessage):
                        await self._bad_callers.slow_down(context.peer())
                    await _abort(context, error)
        except ServiceError as error:
            await self._take_message(context)
            await _abort(context, error)
        raise AssertionError("abort always raises")

    async def _within_deadline(self, call: _Method, context: Context, body: Callable[[], Awaitable[T]]) -> T:
        limit_s: float | None = cast(float | None, context.time_remaining())  # the stubs forget None: no deadline
        if limit_s is not None and limit_s < _SHORTEST_DEADLINE_S:
            raise DeadlineExceeded("the deadline had passed before the call began")
        if call.policy.cap_deadline:
            limit_s = self._limits.max_deadline_s if limit_s is None else min(limit_s, self._limits.max_deadline_s)
        _deadline_s.set(None if limit_s is None else time.monotonic() + limit_s)
        bound = asyncio.timeout(limit_s)
        try:
            with self._open_calls.ends_with(bound, call.policy):
                async with bound:
                    return await body()
        except (ServiceError, grpc.aio.AbortError):
            raise
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the client has gone, or the server stops
            _log.exception("%s was cancelled from inside", call.name)
        except Exception as error:
            if bound.expired() and isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"not finished within {limit_s:.3g} s") from None
            _log.exception("%s failed", call.name)
        raise InternalError("internal error") from None

    async def _answer(self, call: _Method, context: Context) -> bytes:
        return await call.answer(await self._request(call, context), context)

    async def _stream(self, call: _Method, context: Context) -> None:
        request = await self._request(call, context)
        writer = Writer(context, call.serialised, self._limits.write_timeout_s)
        async with writer.bounded():
            await call.stream(request, context, writer)

    async def _request(self, call: _Method, context: Context) -> Message | AsyncIterator[Message]:
        """What the method is given: its message, once that has come whole, or the stream of them."""
        if call.client_streaming:
            return self._messages(call, context)
        data = await self._first(context)
        if data is None:
            raise _NoMessage(f"no {call.request_name} came")
        return await self._large.parsed(peer_key(context.peer()), data, call.parsed)

    async def _messages(self, call: _Method, context: Context) -> AsyncIterator[Message]:
        data: Any = await self._first(context)
        while data is not None and data is not grpc.aio.EOF:
            yield call.parsed(data)
            data = await context.read()

    async def _first(self, context: Context) -> bytes | None:
        try:
            return await self._read(context, self._limits.read_timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"no whole request within {self._limits.read_timeout_s:g} s") from None

    async def _take_message(self, context: Context) -> None:
        """Before a call is refused: gRPC resets one that ends while its message is under way, and the client may then
        take the reset, INTERNAL, for its status."""
        key = peer_key(context.peer())
        if self._num_refused[key] >= _MAX_REFUSED:
            self._bad_callers.gone_early(context.peer())
            return
        self._num_refused[key] += 1
        try:
            with contextlib.suppress(TimeoutError):
                await self._read(context, _REFUSED_S)
        finally:
            self._num_refused[key] -= 1
            if not self._num_refused[key]:
                del self._num_refused[key]

    async def _read(self, context: Context, within_s: float) -> bytes | None:
        """The call's first message; None if there is none. Raises TimeoutError."""
        try:
            async with asyncio.timeout(within_s):
                data = await context.read()
        except asyncio.CancelledError:
            self._bad_callers.gone_early(context.peer())
            raise
        if isinstance(data, bytes):  # and not EOF
            return data
        self._bad_callers.gone_early(context.peer())
        return None


class _Method:
    """One rpc: its name, types and policy, and the handler behind them."""

    def __init__(self, method: MethodDescriptor, behaviour: Any, policy: CallPolicy) -> None:
        self.name = method.full_name
        self.policy = policy
        self.client_streaming = method.client_streaming
        self.request_name = method.input_type.name
        self._behaviour = behaviour
        self._request: type[Message] = GetMessageClass(method.input_type)
        self._response: type[Message] = GetMessageClass(method.output_type)

    async def answer(self, request: Message | AsyncIterator[Message], context: Context) -> bytes:
        return self.serialised(await self._behaviour(request, context))

    async def stream(
        self, request: Message | AsyncIterator[Message], context: Context, writer: Writer[Message]
    ) -> None:
        if not inspect.isasyncgenfunction(self._behaviour):
            await self._behaviour(request, context, writer)
            return
        async with aclosing(self._behaviour(request, context)) as responses:
            async for response in responses:
                await writer.write(response)

    def parsed(self, data: bytes) -> Message:
        try:
            return self._request.FromString(data)
        except DecodeError:
            raise InvalidArgument(f"request is not a valid {self.request_name}") from None

    def serialised(self, response: Message) -> bytes:
        if not isinstance(response, self._response):
            raise TypeError(f"{self.name} answered a {type(response).__name__}")
        return response.SerializeToString()


def _incoming_request_id(context: Context) -> str:
    """The id that the caller's metadata names, if it is a well-formed one, else a new one."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex


async def _abort(context: Context, error: ServiceError) -> None:
    if isinstance(error, InternalError):
        error = InternalError("internal error")  # whatever it says, a client has no use for it
    # Its frames hold the request, maybe megabytes of it, and the client may take its time to read the answer.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    _log.debug("%s: %s", error.code.name, error.message)
    text = status_text(error, request_id())
    await context.abort(error.code, text, trailing_metadata=trailers(error, text))
