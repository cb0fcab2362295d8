"""The Python client: `Client` for ordinary code, `AsyncClient` for an event loop. Both check what they receive.

    with Client() as client:                      # the local stack; or Client("host:port"), or several routers
        print(client.generate("Once upon a time", max_tokens=32).text)
        for piece in client.stream([{"role": "user", "content": "Who lives here?"}]):
            print(piece.text, end="", flush=True)

Leaving a stream early (break, an exception, a cancelled task) cancels the call, and both pools free its blocks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from protos.tandem.v1 import generation_pb2, generation_pb2_grpc
from tandem.completion import Assembler, Completion, Piece
from tandem.errors import from_rpc
from tandem.routers import routers
from tandem.sampling import Prompt, RequestOptions, generate_request

DEFAULT_TIMEOUT_S = 600.0


class Client:
    """A connection to a router, or to several. Safe to share between threads; `close` it, or use it in a `with`.

    `address` is host:port of a router; None takes the stack that `tandem up` runs on this machine. With several, as in
    `Client(["10.0.0.1:50051", "10.0.0.2:50051"])` or `Client("dns:tandem-router:50051")`, a request goes to one that is
    ready, and to another if that one refuses it as UNAVAILABLE before the answer has begun: `retries` times at the most
    (0..4; absent: 4, and 0 with a single address). `timeout_s` is how long one request may take in all.
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: int | None = None,
    ) -> None:
        reached = routers(address, retries)
        self.address = reached.address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(reached.target, options=reached.options)
        channel: Any = self._channel  # the stubs are typed for the asyncio channel alone
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """The whole answer to `prompt` (text, token ids or chat messages). Raises TandemError."""
        assembler = Assembler(options.get("n", 1))
        for _ in self._pieces(generate_request(prompt, options), assembler, options.get("timeout_s")):
            pass
        return assembler.finish()

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Iterator[Piece]:
        """The answer to `prompt` piece by piece, as the tokens come. Raises TandemError, also in the middle."""
        return self._pieces(generate_request(prompt, options), Assembler(options.get("n", 1)), options.get("timeout_s"))

    def abort(self, *request_ids: str) -> int:
        """Ends requests by their labels; returns how many were running."""
        request = generation_pb2.AbortRequest(request_ids=request_ids)
        try:
            response: generation_pb2.AbortResponse = self._stub.Abort(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc(error, self.address) from error
        return response.num_aborted

    def model_info(self) -> generation_pb2.GetModelInfoResponse:
        """What is being served, and its limits."""
        request = generation_pb2.GetModelInfoRequest()
        try:
            response: generation_pb2.GetModelInfoResponse = self._stub.GetModelInfo(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc(error, self.address) from error
        return response

    def close(self) -> None:
        """Ends every call of this client."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _pieces(
        self, request: generation_pb2.GenerateRequest, assembler: Assembler, timeout_s: float | None
    ) -> Iterator[Piece]:
        call = self._stub.Generate(request, timeout=self._timeout_s if timeout_s is None else timeout_s)
        try:
            for response in call:
                yield assembler.add(response)
            assembler.finish()
        except grpc.RpcError as error:
            raise from_rpc(error, self.address) from error
        finally:
            call.cancel()


class AsyncClient:
    """The same for an event loop. Make it and use it on one loop; `await close()`, or use it in an `async with`."""

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: int | None = None,
    ) -> None:
        reached = routers(address, retries)
        self.address = reached.address
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(reached.target, options=reached.options)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """See Client.generate."""
        assembler = Assembler(options.get("n", 1))
        async for _ in self._pieces(generate_request(prompt, options), assembler, options.get("timeout_s")):
            pass
        return assembler.finish()

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncGenerator[Piece]:
        """See Client.stream. Leave it with `contextlib.aclosing`, or cancel the task, to end the call at once."""
        return self._pieces(generate_request(prompt, options), Assembler(options.get("n", 1)), options.get("timeout_s"))

    async def abort(self, *request_ids: str) -> int:
        """Ends requests by their labels; returns how many were running."""
        try:
            response = await self._stub.Abort(
                generation_pb2.AbortRequest(request_ids=request_ids), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.address) from error
        return response.num_aborted

    async def model_info(self) -> generation_pb2.GetModelInfoResponse:
        """What is being served, and its limits."""
        try:
            return await self._stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.address) from error

    async def close(self) -> None:
        """Ends every call of this client."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _pieces(
        self, request: generation_pb2.GenerateRequest, assembler: Assembler, timeout_s: float | None
    ) -> AsyncGenerator[Piece]:
        call = self._stub.Generate(request, timeout=self._timeout_s if timeout_s is None else timeout_s)
        try:
            async for response in call:
                yield assembler.add(response)
            assembler.finish()
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.address) from error
        finally:
            call.cancel()
