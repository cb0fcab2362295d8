"""The one path of every call: read, parse, admit, bound, write, report errors.

headers ─▶ request id ─▶ authorizer ─▶ admission ─▶ deadline ─▶ read, parse, trace ─▶ handler ─▶ bounded write ─▶ status

grpcio answers malformed protobuf with UNKNOWN and a Python class name, accepts deadlines of 0 and of 30 years, and
waits for ever for a client that does not read, or for the message of an uncounted call. Therefore methods are
registered without (de)serialisers, and as taking a stream, which looks the same on the wire; the interceptor does the
rest within its own limits. A streaming method is an async generator, or a coroutine function that writes its answer to
a third argument, a StreamWriter, which costs less per message. It is closed or cancelled when the call ends early, so
its `finally` blocks are where a request's resources are freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from serving.errors import (
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidArgument,
    Overloaded,
    ServiceError,
    status_text,
    trailers,
)
from serving.limits import REQUEST, AbuseLimits, CallPolicy, LargeMessages, OpenCalls, call_end, peer_key
from serving.logging import request_id, set_request_id, valid_request_id
from serving.tracing import TRACEPARENT_KEY, attach_caller_context
from serving.waits import is_cancelling, within

M = TypeVar("M", bound=Message)


@dataclass(slots=True, eq=False)
class StreamWriter(Generic[M]):
    """The response stream of one call, which owns it: write inside `bounded`, in the call's task or one it awaits.

        idle ⇄ writing ──longer than the timeout──▶ cut off: the call ends with RESOURCE_EXHAUSTED

    grpcio's `write` returns when the message has left, and waits for ever for a client that does not read. A timer per
    message would cost a good part of the message, so there is one per call, which checks the clock when it fires. Tasks
    that share a writer must write one at a time.
    """

    context: grpc.aio.ServicerContext[Any, Any]
    serialised: Callable[[M], bytes]
    timeout_s: float
    _headers_sent: bool = False
    _since_s: float | None = None
    _timer: asyncio.TimerHandle | None = None

    async def write(self, message: M) -> None:
        """Returns when `message` has left; raises TypeError for a message of another type than the method's."""
        data = self.serialised(message)
        self._since_s = time.monotonic()
        try:
            if not self._headers_sent:
                await self._send_headers()
            await self.context.write(data)
        except grpc.aio.InternalError:
            # The client has gone: grpcio is about to cancel the call's task, which may await this one. Raised at once,
            # the error would come first and look like one of the service's own.
            await asyncio.sleep(_CANCEL_WITHIN_S)
            raise
        self._since_s = None

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """A write inside that takes too long ends the block with Overloaded."""
        bound = asyncio.timeout(None)
        async with within(bound, self._too_slow):
            self._check(bound)
            try:
                yield
            finally:
                if self._timer is not None:
                    self._timer.cancel()

    def _check(self, bound: asyncio.Timeout, seen_s: float | None = None) -> None:
        """`seen_s`: since when the message waits that was late at the last look; None: none was."""
        waited_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        if waited_s < self.timeout_s:
            next_s, seen_s = self.timeout_s - waited_s, None
        elif self._since_s != seen_s:
            next_s, seen_s = _LOOK_AGAIN_S, self._since_s
        else:
            call_end().error = self._too_slow()
            bound.reschedule(0.0)
            return
        self._timer = asyncio.get_running_loop().call_later(next_s, self._check, bound, seen_s)

    def _too_slow(self) -> Overloaded:
        return Overloaded(f"client too slow: a message waited {self.timeout_s:g} s", None)

    async def _send_headers(self) -> None:
        """Sends the headers separately, even when cancelled. If the first message carried them and its write were
        cancelled, grpcio would send them again with the status, and the client would get no status at all."""
        sending = asyncio.ensure_future(self.context.send_initial_metadata(()))
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it as lost
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait({sending})
            raise
        self._headers_sent = True


_CLOSED = "connection closed: too many calls cancelled before a request was sent"
REQUEST_ID_KEY = "tandem-request-id"  # metadata key that carries a request's id between the services

Context = grpc.aio.ServicerContext[Any, Any]
Authorizer = Callable[[Context], None]
"""Checks the caller before anything else happens. Raises Unauthenticated or PermissionDenied."""
T = TypeVar("T")

_log = logging.getLogger(__name__)
_SERVER_STOPPED = "Server already stopped."
"""grpcio's text when a call that had just begun reads or writes after the server's stop."""
_MIN_DEADLINE_S = 0.002  # gRPC rounds a deadline of 0 up under way: without this, some such calls get through
_REJECTED_READ_S = 1.0
"""Longest wait for the message of a call that is rejected: it comes with the headers, or not at all."""
_CANCEL_WITHIN_S = 5.0
"""In which grpcio has cancelled the task of a call whose client has gone."""
_LOOK_AGAIN_S = 0.25
"""After a first look at which a message was late: a halt of this process looks the same, and ends in a moment."""
_MAX_REJECTED = 512  # calls of one address in that wait: more than can have their messages under way
_deadline_s: ContextVar[float | None] = ContextVar("tandem_deadline", default=None)


def remaining_s() -> float | None:
    """Seconds left to the current call, by the client's deadline and the server's limit; None: no bound."""
    deadline_s = _deadline_s.get()
    return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)


@dataclass(frozen=True, slots=True)
class CallLimits:
    max_deadline_s: float
    read_timeout_s: float
    write_timeout_s: float


class _NoMessage(InvalidArgument):
    """The client has closed its side, or disconnected."""


@dataclass(eq=False)
class CallInterceptor:
    """Makes grpc handlers of a servicer's methods. One per server. Each call's own task owns the call."""

    limits: CallLimits
    open_calls: OpenCalls
    abuse_limits: AbuseLimits
    authorizer: Authorizer | None = None  # None admits every caller
    large: LargeMessages = field(default_factory=LargeMessages)
    _num_rejected: Counter[str] = field(default_factory=Counter)

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

        # Messages are read from the context: grpcio's iterator keeps itself and the call alive until Python's garbage
        # is collected, and a server with thousands of ended calls alive rejects new ones.
        async def unary(_: AsyncIterator[bytes], context: Context) -> bytes:
            return await self._run_call(call, context, lambda: self._answer(call, context))

        async def streaming(_: AsyncIterator[bytes], context: Context) -> None:
            await self._run_call(call, context, lambda: self._stream(call, context))

        # The stubs type these for the threaded server; the asyncio one takes coroutine functions.
        make_streaming: Any = grpc.stream_stream_rpc_method_handler
        make_unary: Any = grpc.stream_unary_rpc_method_handler
        handler: grpc.RpcMethodHandler[Any, Any] = (
            make_streaming(streaming) if method.server_streaming else make_unary(unary)
        )
        return handler

    async def _run_call(self, call: _Method, context: Context, body: Callable[[], Awaitable[T]]) -> T:
        """Runs one call's body within its limits; every exception but a cancellation ends in a status."""
        if self.abuse_limits.is_blocked(context.peer()):  # as cheaply as possible
            await context.abort(grpc.StatusCode.UNAVAILABLE, _CLOSED)
        set_request_id(valid_request_id(dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY)))
        try:
            if self.authorizer is not None:
                self.authorizer(context)
            with self.open_calls.admitted(context.peer(), call.policy):
                try:
                    return await self._within_deadline(call, context, body)
                except ServiceError as error:
                    # Still admitted: a client that never reads its status keeps its place until it disconnects.
                    if isinstance(error, InvalidArgument) and not isinstance(error, _NoMessage):
                        await self.abuse_limits.delay_invalid(context.peer())
                    await _abort(context, error)
        except ServiceError as error:
            await self._read_rejected(context)
            await _abort(context, error)
        raise AssertionError("abort always raises")

    async def _within_deadline(self, call: _Method, context: Context, body: Callable[[], Awaitable[T]]) -> T:
        limit_s: float | None = cast(float | None, context.time_remaining())  # the stubs forget None: no deadline
        if limit_s is not None and limit_s < _MIN_DEADLINE_S:
            raise DeadlineExceeded("the deadline had passed before the call began")
        if call.policy.cap_deadline:
            limit_s = self.limits.max_deadline_s if limit_s is None else min(limit_s, self.limits.max_deadline_s)
        _deadline_s.set(None if limit_s is None else time.monotonic() + limit_s)
        bound = asyncio.timeout(limit_s)
        try:
            with self.open_calls.awaited(bound, call.policy):
                async with bound:
                    return await body()
        except (ServiceError, grpc.aio.AbortError):
            raise
        except asyncio.CancelledError:
            if is_cancelling():
                raise  # the client has disconnected, or the server stops
            _log.exception("%s was cancelled from inside", call.name)
        except Exception as error:
            if isinstance(error, grpc.aio.BaseError) and str(error) == _SERVER_STOPPED:
                raise asyncio.CancelledError from None  # as for the calls that the stop found running
            if bound.expired() and isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"not finished within {limit_s:.3g} s") from None
            _log.exception("%s failed", call.name)
        raise InternalError("internal error") from None

    async def _answer(self, call: _Method, context: Context) -> bytes:
        return call.serialised(await call.behaviour(await self._request(call, context), context))

    async def _stream(self, call: _Method, context: Context) -> None:
        request = await self._request(call, context)
        writer = StreamWriter(context, call.serialised, self.limits.write_timeout_s)
        async with writer.bounded():
            if not inspect.isasyncgenfunction(call.behaviour):
                await call.behaviour(request, context, writer)
                return
            async with aclosing(call.behaviour(request, context)) as responses:
                async for response in responses:
                    await writer.write(response)

    async def _request(self, call: _Method, context: Context) -> Message | AsyncIterator[Message]:
        """The method's argument: its message, once it is complete, or the stream of them. From here on the call's task
        is in its caller's trace."""
        metadata = context.invocation_metadata() or ()
        if call.client_streaming:
            attach_caller_context(metadata)
            return self._messages(call, context)
        data = await self._first(context)
        if data is None:
            raise _NoMessage(f"no {call.request_name} came")
        request = await self.large.parsed(peer_key(context.peer()), data, call.parsed, metadata)
        attach_caller_context(metadata, getattr(request, TRACEPARENT_KEY, ""))
        return request

    async def _messages(self, call: _Method, context: Context) -> AsyncIterator[Message]:
        data: Any = await self._first(context)
        while data is not None and data is not grpc.aio.EOF:
            yield call.parsed(data)
            data = await context.read()

    async def _first(self, context: Context) -> bytes | None:
        try:
            return await self._read(context, self.limits.read_timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"no whole request within {self.limits.read_timeout_s:g} s") from None

    async def _read_rejected(self, context: Context) -> None:
        """Reads a call's message before the call is rejected: gRPC resets a call that ends while its message is under
        way, and the client may then report the reset, INTERNAL, as its status."""
        key = peer_key(context.peer())
        if self._num_rejected[key] >= _MAX_REJECTED:
            self.abuse_limits.count_cancelled(context.peer())
            return
        self._num_rejected[key] += 1
        try:
            with contextlib.suppress(TimeoutError):
                await self._read(context, _REJECTED_READ_S)
        finally:
            self._num_rejected[key] -= 1
            if not self._num_rejected[key]:
                del self._num_rejected[key]

    async def _read(self, context: Context, within_s: float) -> bytes | None:
        """The call's first message; None if there is none. Raises TimeoutError."""
        try:
            async with asyncio.timeout(within_s):
                data = await context.read()
        except asyncio.CancelledError:
            self.abuse_limits.count_cancelled(context.peer())
            raise
        if isinstance(data, bytes):  # and not EOF
            return data
        self.abuse_limits.count_cancelled(context.peer())
        return None


class _Method:
    def __init__(self, method: MethodDescriptor, behaviour: Any, policy: CallPolicy) -> None:
        self.name = method.full_name
        self.policy = policy
        self.client_streaming = method.client_streaming
        self.request_name = method.input_type.name
        self.behaviour = behaviour
        self._request: type[Message] = GetMessageClass(method.input_type)
        self._response: type[Message] = GetMessageClass(method.output_type)

    def parsed(self, data: bytes) -> Message:
        try:
            return self._request.FromString(data)
        except DecodeError:
            problem = f"is not a valid {self.request_name}; allowed: protobuf whose texts are UTF-8"
            raise InvalidArgument(f"request {problem}", [FieldViolation("request", problem)]) from None

    def serialised(self, response: Message) -> bytes:
        if not isinstance(response, self._response):
            raise TypeError(f"{self.name} returned a {type(response).__name__}")
        return response.SerializeToString()


async def _abort(context: Context, error: ServiceError) -> None:
    if isinstance(error, InternalError):
        error = InternalError("internal error")  # the text is for the log alone
    # Its frames hold the request, maybe megabytes of it, and the client may be slow to read the status.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    _log.debug("%s: %s", error.code.name, error.message)
    text = status_text(error, request_id())
    try:
        await context.abort(error.code, text, trailing_metadata=trailers(error, text))
    except grpc.aio.InternalError:  # the client has gone; once a status is under way, grpcio no longer cancels the task
        raise asyncio.CancelledError from None
