"""vLLM's gRPC service over the router, for routers and clients that were made for it.

    vllm GenerateRequest ─▶ refused, or tandem's ─▶ GenerateCall ─▶ chunk … chunk, complete   (stream)
                                                                └▶ complete for each choice   (not)

It behaves as vLLM's own server does where the proto leaves it open: absent sampling fields take vLLM's defaults, not
the model's; a stream's complete message repeats the last chunk's tokens; no text is sent. What is asked for and not
served is refused by name, and so is a field that this version does not know, for it could change the answer.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Literal, get_args

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protos.tandem.v1 import common_pb2, generation_pb2
from protos.vllm.grpc.engine import vllm_engine_pb2 as vllm
from router.call import GenerateCall
from router.model import ServedModel
from router.pools.instances import InstanceView
from router.pools.pool import Pools
from router.service import GenerationService
from serving.calls import Context, remaining_s
from serving.errors import NotFound, PermissionDenied, invalid_argument
from serving.writer import Writer

SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]

_DATA_PARALLEL_RANK = 9
"""A field of later versions, of GenerateRequest: which of several equal engines is meant. Here is one."""
_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}
_SCALARS = (
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
)
_OR_ONE = ("top_p", "repetition_penalty", "n")
_Optional = Literal["max_tokens", "logprobs", "prompt_logprobs", "seed"]
_KvField = Literal["kv_transfer_params", "kv_transfer_params_json"]


class VllmEngineService:
    """vllm.grpc.engine.VllmEngine. Everything that it does is done by the router's own service."""

    def __init__(
        self,
        service: GenerationService,
        model: ServedModel,
        pools: Pools,
        num_queued: Callable[[], int],
        is_serving: Callable[[], bool],
    ) -> None:
        """`num_queued` counts what waits at the router; `is_serving` says whether a request could be served now."""
        self._service = service
        self._model = model
        self._pools = pools
        self._num_queued = num_queued
        self._is_serving = is_serving
        self._started_s = time.monotonic()
        self._last_received = 0.0

    async def Generate(
        self, request: vllm.GenerateRequest, context: Context, writer: Writer[vllm.GenerateResponse]
    ) -> None:
        self._last_received = time.time()
        call = self._service.call()
        answer = _Answer(call, request.sampling_params, writer if request.stream else None)
        try:
            wanted = generate_request(request)
            await call.run(wanted, answer, metadata=context.invocation_metadata(), remaining_s=remaining_s())
            for complete in answer.whole():
                await writer.write(vllm.GenerateResponse(complete=complete))
        finally:
            context.set_trailing_metadata(call.journey.trailers())

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        await self._service.Abort(generation_pb2.AbortRequest(request_ids=request.request_ids), context)
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        healthy = self._is_serving()
        return vllm.HealthCheckResponse(healthy=healthy, message="serving" if healthy else "not serving")

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        limits, defaults = self._service.limits(), self._model.defaults
        bos = self._model.tokenizer.bos_token_id if self._model.tokenizer is not None else None
        return vllm.GetModelInfoResponse(
            model_path=self._model.name,
            served_model_name=self._model.name,
            is_generation=True,
            max_context_length=limits.max_model_len,
            max_req_input_len=limits.max_model_len - 1,
            vocab_size=limits.vocab_size,
            eos_token_ids=defaults.eos_token_ids,
            bos_token_id=bos or 0,
            default_sampling_params_json=json.dumps(defaults.sampling_fields()),
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        return vllm.GetServerInfoResponse(
            active_requests=self._service.running.num_requests,
            last_receive_timestamp=self._last_received,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="tandem",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        if request.HasField("dp_rank") and request.dp_rank != 0:
            raise NotFound(f"dp_rank: {request.dp_rank} is not here; there is one, 0")
        decode, prefill = self._pools.decode.views(), self._pools.prefill.views()
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("tandem-llm"),
            dp_rank_count=1,
            loads=[load_of(decode, prefill, self._num_queued())],
        )


def generate_request(request: vllm.GenerateRequest) -> generation_pb2.GenerateRequest:
    """Tandem's form of a request. Raises InvalidArgument or PermissionDenied for what is not served."""
    _check_known(request)
    wanted = generation_pb2.GenerateRequest(request_id=request.request_id, sampling=_sampling(request.sampling_params))
    if request.WhichOneof("input") == "text":
        wanted.text = request.text
    elif request.HasField("tokenized"):
        wanted.token_ids.ids.extend(request.tokenized.input_ids)
        wanted.token_ids.SetInParent()
    return wanted


def load_of(decode: Iterable[InstanceView], prefill: Iterable[InstanceView], num_queued: int) -> vllm.SchedulerLoad:
    """Both pools as one engine; memory and places are the decode pool's."""
    decode = list(decode)
    loads = [view.load for view in (*decode, *prefill)]
    num_running = sum(load.num_running for load in loads)
    num_waiting = sum(load.num_waiting + load.num_loading for load in loads) + num_queued
    total = sum(view.info.num_blocks * view.info.identity.block_size for view in decode)
    unused = sum((view.load.free_blocks + view.load.cached_blocks) * view.info.identity.block_size for view in decode)
    used = max(0, total - unused)
    return vllm.SchedulerLoad(
        num_running_reqs=num_running,
        num_waiting_reqs=num_waiting,
        num_total_reqs=num_running + num_waiting,
        num_used_tokens=used,
        max_total_num_tokens=total,
        token_usage=used / total if total else 0.0,
        max_running_requests=sum(view.info.max_num_seqs for view in decode),
    )


def _check_known(request: vllm.GenerateRequest) -> None:
    for name in get_args(_KvField):
        if request.HasField(name):
            raise PermissionDenied(f"{name}: clients name no KV here; leave it out")
    if request.HasField("mm_inputs"):
        raise invalid_argument("mm_inputs", "is not served here", "text or token ids")
    params = request.sampling_params
    if (constraint := params.WhichOneof("constraint")) is not None:
        raise invalid_argument(f"sampling_params.{constraint}", "is not served here", "no constraint")
    if params.HasField("truncate_prompt_tokens"):
        raise invalid_argument("sampling_params.truncate_prompt_tokens", "is not served here", "a prompt that fits")
    _check_fields("", request, {_DATA_PARALLEL_RANK})
    _check_fields("sampling_params: ", params, set())
    _check_fields("tokenized: ", request.tokenized, set())


def _check_fields(where: str, message: Message, passed_over: set[int]) -> None:
    found: Any = UnknownFieldSet(message)  # the stubs forget that it can be iterated
    unknown = {field.field_number for field in found} - passed_over
    if unknown:
        raise invalid_argument("request", f"{where}field {min(unknown)} is of a version that is not known here")


def _sampling(params: vllm.SamplingParams) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams(
        stop=params.stop, stop_token_ids=params.stop_token_ids, logit_bias=dict(params.logit_bias)
    )
    if params.HasField("seed") and params.seed < 0:
        raise invalid_argument("sampling_params.seed", f"{params.seed} is out of range", "0..2147483647")
    for name in _SCALARS:
        setattr(sampling, name, getattr(params, name))
    sampling.temperature = params.temperature if params.HasField("temperature") else 1.0
    for name in _OR_ONE:
        setattr(sampling, name, getattr(params, name) or 1)
    for optional in get_args(_Optional):
        if params.HasField(optional):
            setattr(sampling, optional, getattr(params, optional))
    return sampling


class _Answer:
    """Where a call writes: to the client at once, or, without a stream, to be asked for when it is over."""

    def __init__(
        self, call: GenerateCall, params: vllm.SamplingParams, writer: Writer[vllm.GenerateResponse] | None
    ) -> None:
        self._call = call
        self._num_top = params.logprobs
        self._num_prompt_top = params.prompt_logprobs
        self._writer = writer
        self._chunks: defaultdict[int, list[common_pb2.TokenChunk]] = defaultdict(list)

    async def write(self, message: generation_pb2.GenerateResponse, /) -> None:
        chunk = message.tokens
        if self._writer is None:
            self._chunks[chunk.choice].append(common_pb2.TokenChunk.FromString(chunk.SerializeToString()))
            return
        await self._writer.write(vllm.GenerateResponse(chunk=self._piece(chunk)))
        if chunk.HasField("finish"):
            await self._writer.write(vllm.GenerateResponse(complete=self._complete([chunk])))

    def whole(self) -> list[vllm.GenerateComplete]:
        """What was not streamed, choice by choice."""
        return [self._complete(self._chunks[choice]) for choice in sorted(self._chunks)]

    @property
    def _prompt(self) -> tuple[int, ...]:
        assert self._call.wanted is not None, "a call that writes has been validated"
        return self._call.wanted.prompt_token_ids

    def _piece(self, chunk: common_pb2.TokenChunk) -> vllm.GenerateStreamChunk:
        return vllm.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(chunk.token_ids),
            cached_tokens=chunk.finish.usage.cached_tokens,
            output_logprobs=_output_logprobs([chunk], self._num_top),
            input_logprobs=_input_logprobs(self._prompt, chunk, self._num_prompt_top),
            index=chunk.choice,
        )

    def _complete(self, chunks: list[common_pb2.TokenChunk]) -> vllm.GenerateComplete:
        first, finish = chunks[0], chunks[-1].finish
        output_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        complete = vllm.GenerateComplete(
            output_ids=output_ids,
            finish_reason=_REASONS.get(finish.reason, "error"),
            prompt_tokens=len(self._prompt),
            completion_tokens=len(output_ids),
            cached_tokens=finish.usage.cached_tokens,
            output_logprobs=_output_logprobs(chunks, self._num_top),
            input_logprobs=_input_logprobs(self._prompt, first, self._num_prompt_top),
            index=first.choice,
        )
        if finish.HasField("stop_token_id"):
            complete.matched_token_id = finish.stop_token_id
        elif finish.HasField("stop_string"):
            complete.matched_stop_str = finish.stop_string
        return complete


def _output_logprobs(chunks: Iterable[common_pb2.TokenChunk], num_top: int) -> vllm.OutputLogProbs | None:
    positions = [position.candidates for chunk in chunks for position in chunk.logprobs]
    if not positions:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[candidates[0].logprob for candidates in positions],
        token_ids=[candidates[0].token_id for candidates in positions],
        top_logprobs=[_top(candidates, num_top) for candidates in positions] if num_top else [],
    )


def _input_logprobs(prompt: tuple[int, ...], chunk: common_pb2.TokenChunk, num_top: int) -> vllm.InputLogProbs | None:
    if not chunk.prompt_logprobs:
        return None
    positions = [position.candidates for position in chunk.prompt_logprobs]
    values = [candidates[0].logprob if candidates else None for candidates in positions]
    return vllm.InputLogProbs(
        token_logprobs=[vllm.InputTokenLogProb(value=value) for value in values],
        token_ids=prompt,
        top_logprobs=[_top(candidates, num_top) for candidates in positions] if num_top else [],
    )


def _top(candidates: Iterable[common_pb2.Logprob], num_top: int) -> vllm.TopLogProbs:
    best = sorted((item for item in candidates if item.rank <= num_top), key=lambda item: item.rank)
    return vllm.TopLogProbs(values=[item.logprob for item in best], token_ids=[item.token_id for item in best])
