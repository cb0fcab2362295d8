"""The Python client: `Client` for blocking code, `AsyncClient` for an event loop. Both check what they receive.

    with Client() as client:                      # the local stack; or Client("host:port"), or several routers
        print(client.generate("Once upon a time", max_tokens=32).text)
        for piece in client.stream([{"role": "user", "content": "What is a tandem?"}]):
            print(piece.text, end="", flush=True)
    with Client("router:50051", credentials=Credentials(ca_file=Path("ca.crt"), token=TOKEN)) as client:
        ...                                       # TLS and a bearer token; docs/security.md

A stream whose router dies continues at another router, or at the same one after its restart, without a gap or a repeat.
Leaving a stream early (break, an exception, a cancelled task) cancels the call; both pools then free its blocks.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from protos.tandem.v1 import generation_pb2, generation_pb2_grpc
from serving.waits import is_cancelling
from tandem.client.channel import (
    MAX_TIMEOUT_S,
    ClientChannel,
    Owner,
    Target,
    client_closed,
    open_async_channel,
    router_target,
)
from tandem.client.completion import Completion, CompletionAssembler, Piece, Route
from tandem.client.credentials import Credentials
from tandem.client.errors import TandemError, explain, from_rpc
from tandem.client.registry import credentials_for
from tandem.client.request import Prompt, RequestOptions, generate_request, shows_options
from tandem.client.resumption import DEFAULT_MAX_RESUMPTIONS, Resumption

DEFAULT_TIMEOUT_S = 600.0


def _supported(timeout_s: float) -> float:
    """Raises ValueError."""
    if math.isnan(timeout_s):
        raise ValueError(f"timeout_s: is {timeout_s}; give seconds, or math.inf for no limit")
    return min(timeout_s, MAX_TIMEOUT_S)


def _ignore(connectivity: grpc.ChannelConnectivity) -> None:
    """Of a channel that is watched for the watching alone."""


class _BaseClient(ABC):
    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: int | None = None,
        max_resumptions: int = DEFAULT_MAX_RESUMPTIONS,
        credentials: Credentials | None = None,
    ) -> None:
        if max_resumptions < 0:
            raise ValueError(f"max_resumptions: is {max_resumptions}; it must be at least 0")
        target = router_target(address, retries)
        self.address = target.address
        self._timeout_s = _supported(timeout_s)
        self._max_resumptions = max_resumptions
        self._credentials = credentials_for(self.address) if credentials is None else credentials
        self._open(target)

    @abstractmethod
    def _open(self, target: Target) -> None: ...

    def _prepare(self, prompt: Prompt, options: RequestOptions) -> tuple[CompletionAssembler, Resumption]:
        """Of one request: what assembles its answer, and its calls."""
        timeout_s = options.get("timeout_s")
        timeout_s = self._timeout_s if timeout_s is None else _supported(timeout_s)
        request, assembler = generate_request(prompt, options), CompletionAssembler(options.get("n") or 1)
        return assembler, Resumption(request, assembler, timeout_s, self._max_resumptions)


class Client(_BaseClient):
    """A connection to a router, or to several. Safe to share between threads; `close` it, or use it in a `with`.

    `address` is host:port of a router; None takes the stack that `tandem up` runs on this machine. With several, as in
    `Client(["10.0.0.1:50051", "10.0.0.2:50051"])` or `Client("dns:tandem-routers:50051")` (with a DNS server of
    its own: dns://10.0.0.53/tandem-routers:50051), a request goes to one that is ready, and to another if that one
    rejects it as UNAVAILABLE before the answer has begun, at most `retries` times (0..4; absent: 4, or 0 with a single
    address). An answer that has begun and breaks off is continued at most `max_resumptions` times. `timeout_s` limits
    the whole time of one request. `credentials` None: those of the local stack that has the address, or else plaintext.

    gRPC does not work across fork(): start processes by spawn (`multiprocessing.get_context("spawn")`), or close every
    client well before the fork, and create a client in the new process. In a forked process a call of the parent's
    client raises TandemError, and so does a new client if one was open at the fork.
    """

    def _open(self, target: Target) -> None:
        self._channel = ClientChannel(target.target, target.options, self._credentials)

    @shows_options
    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """The whole answer to `prompt` (text, token ids or chat messages). None is the server's default; docs/python.md
        documents each option. Raises TandemError, and TypeError or ValueError for options that do not exist, that
        exclude each other, or whose value has another type or does not fit into it."""
        assembler, calls = self._prepare(prompt, options)
        for _ in self._pieces(assembler, calls):
            pass
        return assembler.finish()

    @shows_options
    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Generator[Piece, None, Completion]:
        """The answer to `prompt` piece by piece, as the tokens come. Raises TandemError, also mid-stream. The generator
        returns what `generate` returns: `completion = yield from client.stream(…)`."""
        return self._pieces(*self._prepare(prompt, options))

    def abort(self, *request_ids: str) -> int:
        """Aborts requests by their request_id at one router; returns how many were running there. One of several
        routers knows its own requests alone: to end a stream in any case, close it."""
        response: generation_pb2.AbortResponse = self._call(
            "Abort", generation_pb2.AbortRequest(request_ids=request_ids)
        )
        return response.num_aborted

    def model_info(self) -> generation_pb2.GetModelInfoResponse:
        """The served model and its limits."""
        response: generation_pb2.GetModelInfoResponse = self._call("GetModelInfo", generation_pb2.GetModelInfoRequest())
        return response

    def close(self) -> None:
        """Cancels every call of this client."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, method: str, request: Any) -> Any:
        ends_s = time.monotonic() + self._timeout_s
        with self._channel.connection(self._timeout_s) as connection:
            call = getattr(connection.stub, method)
            remaining_s = max(ends_s - time.monotonic(), 0.0)
            try:
                return call(request, timeout=remaining_s, metadata=self._credentials.metadata())
            except grpc.RpcError as error:
                raise explain(error, self.address, self._credentials) from error

    def _pieces(self, assembler: CompletionAssembler, calls: Resumption) -> Generator[Piece, None, Completion]:
        calls.begin()
        while True:
            try:
                yield from self._pieces_of_call(assembler, calls)
                break
            except grpc.RpcError as error:
                failed = from_rpc(error, self.address)
                if calls.lacks_nothing(failed):
                    break
                if (delay_s := calls.delay_s(failed)) is None:
                    raise explain(error, self.address, self._credentials) from error
            if self._waits_until_closed(delay_s):
                raise client_closed()
        return assembler.finish()

    def _waits_until_closed(self, delay_s: float) -> bool:
        """Whether the client was closed within `delay_s`. The channel is watched meanwhile: where nothing does and no
        call runs, gRPC attends to its connections every five seconds, and finds a router that late."""
        with self._channel.connection() as connection:
            connection.channel.subscribe(_ignore)
            try:
                return self._channel.closed.wait(delay_s)
            finally:
                connection.channel.unsubscribe(_ignore)

    def _pieces_of_call(self, assembler: CompletionAssembler, calls: Resumption) -> Iterator[Piece]:
        with self._channel.connection(calls.remaining_s) as connection:
            metadata = self._credentials.metadata()
            call = connection.stub.Generate(calls.request, timeout=calls.remaining_s, metadata=metadata)
            try:
                for response in call:
                    yield assembler.add(response)
                    self._channel.owner.check()
                assembler.route = Route.from_trailers(call.trailing_metadata() or ())
            finally:
                if self._channel.owner.is_here:
                    call.cancel()
                else:
                    self._channel.owner.keep(call)


class AsyncClient(_BaseClient):
    """Client for an event loop, with the same methods. Create and use it on one loop; `await close()`, or use it in an
    `async with`."""

    def _open(self, target: Target) -> None:
        self._owner = Owner(self)
        self._channel = open_async_channel(target.target, target.options, self._credentials)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._is_closed = False
        self._streams = set[grpc.aio.UnaryStreamCall[Any, Any]]()

    @shows_options
    async def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """See Client.generate."""
        assembler, calls = self._prepare(prompt, options)
        async for _ in self._pieces(assembler, calls):
            pass
        return assembler.finish()

    @shows_options
    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncGenerator[Piece]:
        """See Client.stream. Leave it with `contextlib.aclosing`, or cancel the task, to end the call at once."""
        return self._pieces(*self._prepare(prompt, options))

    async def abort(self, *request_ids: str) -> int:
        """See Client.abort."""
        response: generation_pb2.AbortResponse = await self._call(
            self._stub.Abort, generation_pb2.AbortRequest(request_ids=request_ids)
        )
        return response.num_aborted

    async def model_info(self) -> generation_pb2.GetModelInfoResponse:
        """See Client.model_info."""
        response: generation_pb2.GetModelInfoResponse = await self._call(
            self._stub.GetModelInfo, generation_pb2.GetModelInfoRequest()
        )
        return response

    async def close(self) -> None:
        """See Client.close."""
        self._is_closed = True
        if not self._owner.is_here:
            return
        self._owner.closed()
        for call in self._streams:  # gRPC finds those alone on which a task waits directly
            call.cancel()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @contextmanager
    def _ended_by_close(self) -> Iterator[None]:
        """gRPC reports a call that was about to begin when its channel was closed as if the caller were cancelled."""
        self._check_open()
        try:
            yield
        except asyncio.CancelledError:
            if not is_cancelling():
                self._check_open()
            raise

    def _check_open(self) -> None:
        self._owner.check()
        if self._is_closed:
            raise client_closed()

    async def _call(self, method: Any, request: Any) -> Any:
        with self._ended_by_close():
            try:
                return await method(request, timeout=self._timeout_s, metadata=self._credentials.metadata())
            except grpc.aio.AioRpcError as error:
                raise await self._explain(error) from error

    async def _pieces(self, assembler: CompletionAssembler, calls: Resumption) -> AsyncGenerator[Piece]:
        calls.begin()
        while True:
            with self._ended_by_close():
                metadata = self._credentials.metadata()
                call = self._stub.Generate(calls.request, timeout=calls.remaining_s, metadata=metadata)
            self._streams.add(call)
            try:
                with self._ended_by_close():
                    async for response in call:
                        yield assembler.add(response)
                    assembler.route = Route.from_trailers(await call.trailing_metadata() or ())
                break
            except grpc.aio.AioRpcError as error:
                failed = from_rpc(error, self.address)
                if calls.lacks_nothing(failed):
                    break
                if (delay_s := calls.delay_s(failed)) is None:
                    raise await self._explain(error) from error
            finally:
                self._streams.discard(call)
                call.cancel()
            await asyncio.sleep(delay_s)
        assembler.finish()

    async def _explain(self, error: grpc.aio.AioRpcError) -> TandemError:
        return await asyncio.to_thread(explain, error, self.address, self._credentials)
