"""Tandem over gRPC: tokens are counted by the ids in each message, and must arrive once and in order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import grpc
import grpc.aio

from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tandem.credentials import PLAINTEXT, Credentials
from tandem.errors import TandemError, from_rpc
from tandem.redialled import open_async_channel
from tandem.serve_bench.endpoints import Answer, AskFailed, OnTokens, Served
from tandem.serve_bench.records import PlannedRequest
from tandem.tls_trouble import explained

DEFAULT_NUM_CONNECTIONS = 4
_SERVED_TIMEOUT_S = 10.0
_LOST = "DATA_LOSS"
_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
    common_pb2.FINISH_REASON_ERROR: "error",
}
_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.enable_retries", 0),  # a retry would hide a failure from the figures
    ("grpc.use_local_subchannel_pool", 1),  # otherwise all channels share one connection
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class GrpcEndpoint:
    """GenerationService at `address` (host:port).

    Requests take turns over `num_connections`, each of which carries many at a time, as those of a production client
    do. Make it on the loop that uses it. Raises ValueError for files of `credentials` that cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        num_connections: int = DEFAULT_NUM_CONNECTIONS,
        model: str = "",
        credentials: Credentials = PLAINTEXT,
    ) -> None:
        self._address = address
        self._model = model
        self._credentials = credentials
        self._channels = [open_async_channel(address, _OPTIONS, credentials) for _ in range(num_connections)]
        self._stubs = itertools.cycle([generation_pb2_grpc.GenerationServiceStub(one) for one in self._channels])

    @property
    def name(self) -> str:
        return f"Tandem at {self._address} (gRPC)"

    @property
    def counting(self) -> str:
        return "by the token ids of each message"

    async def served(self) -> Served:
        """See Endpoint."""
        request = generation_pb2.GetModelInfoRequest()
        try:
            info = await next(self._stubs).GetModelInfo(request, timeout=_SERVED_TIMEOUT_S, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise _failed(error, await asyncio.to_thread(explained, error, self._address, self._credentials)) from None
        return Served(info.model, info.max_model_len, info.vocab_size, frozenset(info.eos_token_ids))

    async def ask(self, request: PlannedRequest, on_tokens: OnTokens) -> Answer:
        """See Endpoint."""
        call = next(self._stubs).Generate(self._message(request), metadata=self._metadata())
        stream = _Stream(on_tokens)
        try:
            async for response in call:
                stream.add(response.tokens)
        except grpc.aio.AioRpcError as error:
            raise _failed(error, from_rpc(error, self._address)) from None
        finally:
            call.cancel()
        return Answer(stream.finished())

    async def close(self) -> None:
        """See Endpoint."""
        for channel in self._channels:
            await channel.close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        try:
            return self._credentials.metadata()
        except ValueError as error:
            raise AskFailed("UNAUTHENTICATED", str(error)) from None

    def _message(self, request: PlannedRequest) -> generation_pb2.GenerateRequest:
        return generation_pb2.GenerateRequest(
            model=self._model,
            token_ids=common_pb2.TokenIds(ids=request.prompt_token_ids),
            sampling=common_pb2.SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, temperature=0.0),
            session=request.session,
        )


class _Stream:
    """One answer: counts its ids and checks that they continue each other."""

    def __init__(self, on_tokens: Callable[[int], None]) -> None:
        self._on_tokens = on_tokens
        self._num_tokens = 0
        self._reason = ""

    def add(self, chunk: common_pb2.TokenChunk) -> None:
        count = len(chunk.token_ids)
        if count:
            if chunk.token_index != self._num_tokens:
                text = f"a message begins at token {chunk.token_index} where {self._num_tokens} is the next"
                raise AskFailed(_LOST, text)
            self._num_tokens += count
            self._on_tokens(count)
        if chunk.HasField("finish"):
            self._reason = _REASONS.get(chunk.finish.reason, "unknown")

    def finished(self) -> str:
        """The finish reason of a stream that has ended."""
        if not self._reason:
            raise AskFailed(_LOST, f"the stream ended after {self._num_tokens} tokens without saying why")
        if self._reason in ("abort", "error"):
            raise AskFailed(self._reason.upper(), f"the answer ended so after {self._num_tokens} tokens")
        return self._reason


def _failed(error: grpc.aio.AioRpcError, reason: TandemError) -> AskFailed:
    fields = "".join(f"; {field}: {problem}" for field, problem in reason.violations)
    refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return AskFailed(reason.status, reason.message + fields, refused=refused)
