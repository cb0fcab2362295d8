"""Tandem over gRPC: tokens are counted by the ids of each message, and must arrive once and in order."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import grpc.aio

from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tandem.bench.serve.endpoint import Answer, OnTokens, PlannedRequest, RequestFailed, ServedModel, check_finished
from tandem.client.channel import KEEPALIVE, open_async_channel
from tandem.client.completion import CompletionAssembler
from tandem.client.credentials import PLAINTEXT, Credentials
from tandem.client.errors import StreamError, TandemError, explain, from_rpc

_SERVED_TIMEOUT_S = 10.0
_OPTIONS = (
    *KEEPALIVE,
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.enable_retries", 0),  # a retry would hide a failure
    ("grpc.use_local_subchannel_pool", 1),  # otherwise all channels share one connection
)


class GrpcEndpoint:
    """Endpoint for GenerationService at `address` (host:port).

    Requests alternate between `num_connections`, each of which carries many at a time, as a production client's do.
    Create it on the loop that uses it. Raises ValueError for unusable files of `credentials`.
    """

    counting = "by the token ids of each message"

    def __init__(
        self, address: str, *, num_connections: int = 4, model: str = "", credentials: Credentials = PLAINTEXT
    ) -> None:
        self.name = f"Tandem at {address} (gRPC)"
        self._address = address
        self._model = model
        self._credentials = credentials
        self._channels = [open_async_channel(address, _OPTIONS, credentials) for _ in range(num_connections)]
        self._stubs = itertools.cycle([generation_pb2_grpc.GenerationServiceStub(one) for one in self._channels])

    async def served_model(self) -> ServedModel:
        request = generation_pb2.GetModelInfoRequest()
        try:
            info = await next(self._stubs).GetModelInfo(request, timeout=_SERVED_TIMEOUT_S, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise _failed(error, await asyncio.to_thread(explain, error, self._address, self._credentials)) from None
        name, served = self._model or info.model, [info.model, *info.lora_adapters]
        if name not in served:
            hint = f"omit --model, or give {'one of these names' if info.lora_adapters else 'this name'}"
            raise RequestFailed("NOT_FOUND", f"--model {name}: {self.name} serves {', '.join(served)}; {hint}")
        return ServedModel(name, info.max_model_len, info.vocab_size, frozenset(info.eos_token_ids), info.model)

    async def generate(self, request: PlannedRequest, on_tokens: OnTokens) -> Answer:
        message = generation_pb2.GenerateRequest(
            model=self._model,
            token_ids=common_pb2.TokenIds(ids=request.prompt_token_ids),
            sampling=common_pb2.SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, temperature=0.0),
        )
        call = next(self._stubs).Generate(message, metadata=self._metadata())
        assembler = CompletionAssembler()
        try:
            async for response in call:
                if num_tokens := len(assembler.add(response).token_ids):
                    on_tokens(num_tokens)
            completion = assembler.finish()
        except grpc.aio.AioRpcError as error:
            raise _failed(error, from_rpc(error, self._address)) from None
        except StreamError as error:
            raise RequestFailed(error.status, error.message) from None
        finally:
            call.cancel()
        reason = completion.finish_reason
        check_finished(reason, len(completion.token_ids))
        usage = completion.usage
        return Answer(reason, num_cached_tokens=usage.cached_tokens, num_stored_tokens=usage.stored_tokens)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        try:
            return self._credentials.metadata()
        except ValueError as error:
            raise RequestFailed("UNAUTHENTICATED", str(error)) from None


def _failed(error: grpc.aio.AioRpcError, reason: TandemError) -> RequestFailed:
    fields = "".join(f"; {field}: {problem}" for field, problem in reason.violations)
    refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return RequestFailed(reason.status, reason.message + fields, refused=refused)
