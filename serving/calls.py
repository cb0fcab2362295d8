"""The one place that every call passes: parse, admit, bound, write, answer errors.

bytes ─▶ request id ─▶ gate ─▶ admission ─▶ deadline ─▶ parse ─▶ handler ─▶ serialise ─▶ bounded write ─▶ status

grpcio answers malformed protobuf with UNKNOWN and a Python class name, lets deadlines of 0 and of 30 years through, and
waits for ever on a client that does not read. So methods are registered without (de)serialisers, and this guard does
both inside its own bounds and its own error handling. A streaming method is an async generator, or a coroutine function
that writes its answer to a third argument, a Writer, which is cheaper for each message. The guard closes or cancels it
when the call ends early, and so its `finally` blocks are where a request's resources are freed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import time
import uuid
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

from serving.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    ServiceError,
    status_text,
    trailers,
)
from serving.logging import request_id, set_request_id
from serving.open_calls import REQUEST, CallPolicy, OpenCalls
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
_deadline_s: ContextVar[float | None] = ContextVar("tandem_deadline", default=None)


def remaining_s() -> float | None:
    """Seconds that the current call may still take, by the client's deadline and the server's cap; None: no bound."""
    deadline_s = _deadline_s.get()
    return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What bounds a single call."""

    max_deadline_s: float
    write_timeout_s: float


class CallGuard:
    """Makes grpc handlers of a servicer's methods. One per server; it owns no call, each call's task does."""

    def __init__(self, limits: CallLimits, open_calls: OpenCalls, gate: Gate | None = None) -> None:
        """`gate` None lets everybody call."""
        self._limits = limits
        self._open_calls = open_calls
        self._gate = gate

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

        async def unary(incoming: Any, context: Context) -> bytes:
            return await self._guarded(call, context, lambda: call.answer(incoming, context))

        async def streaming(incoming: Any, context: Context) -> None:
            await self._guarded(call, context, lambda: self._stream(call, incoming, context))

        # The stubs type these for the threaded server; the asyncio one takes coroutine functions.
        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[method.client_streaming, method.server_streaming]
        handler: grpc.RpcMethodHandler[Any, Any] = make(streaming if method.server_streaming else unary)
        return handler

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
                    await _abort(context, error)
        except ServiceError as error:
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

    async def _stream(self, call: _Method, incoming: Any, context: Context) -> None:
        writer = Writer(context, call.serialised, self._limits.write_timeout_s)
        async with writer.bounded():
            await call.stream(incoming, context, writer)


class _Method:
    """One rpc: its name, types and policy, and the handler behind them."""

    def __init__(self, method: MethodDescriptor, behaviour: Any, policy: CallPolicy) -> None:
        self.name = method.full_name
        self.policy = policy
        self._behaviour = behaviour
        self._client_streaming = method.client_streaming
        self._request: type[Message] = GetMessageClass(method.input_type)
        self._response: type[Message] = GetMessageClass(method.output_type)

    async def answer(self, incoming: Any, context: Context) -> bytes:
        return self.serialised(await self._behaviour(self._parsed_input(incoming), context))

    async def stream(self, incoming: Any, context: Context, writer: Writer[Message]) -> None:
        if not inspect.isasyncgenfunction(self._behaviour):
            await self._behaviour(self._parsed_input(incoming), context, writer)
            return
        async with aclosing(self._behaviour(self._parsed_input(incoming), context)) as responses:
            async for response in responses:
                await writer.write(response)

    def _parsed_input(self, incoming: Any) -> Message | AsyncIterator[Message]:
        return self._parsed_stream(incoming) if self._client_streaming else self._parsed(incoming)

    async def _parsed_stream(self, incoming: AsyncIterator[bytes]) -> AsyncIterator[Message]:
        async for data in incoming:
            yield self._parsed(data)

    def _parsed(self, data: bytes) -> Message:
        try:
            return self._request.FromString(data)
        except DecodeError:
            raise InvalidArgument(f"request is not a valid {self._request.DESCRIPTOR.name}") from None

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
    _log.debug("%s: %s", error.code.name, error.message)
    text = status_text(error, request_id())
    await context.abort(error.code, text, trailing_metadata=trailers(error, text))
