"""vLLM's gRPC service over the router, for routers and clients that were made for it.

    vllm GenerateRequest ─▶ rejected, or tandem's ─▶ RequestHandler ─▶ chunk … chunk, complete   (stream)
                                                                 └▶ complete for each choice   (no stream)

It behaves as vLLM's own server: absent sampling fields take vLLM's defaults, not the model's; a stream's complete
message repeats the last chunk's tokens; no text is sent. Unsupported and unknown fields are rejected.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any, Literal, TypeVar, get_args

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from engine.generation_config import GenerationDefaults
from protos.tandem.v1 import common_pb2, generation_pb2
from protos.vllm.grpc.engine import vllm_engine_pb2 as vllm
from router.api.grpc import GenerationService, answer_call
from router.dispatch.handler import RequestHandler
from router.pools.instance import LEFT
from router.pools.instance_info import InstanceView
from router.request.choice_state import finish_reason
from serving.errors import NotFound, PermissionDenied, invalid_argument
from serving.interceptor import Context, StreamWriter
from serving.limits import start_in_thread

SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]

_DATA_PARALLEL_RANK = 9
"""A field of later versions of GenerateRequest, which selects one of several engines. Ignored: here is one."""
_ENDS = ("draining", LEFT)
_SCALARS = (
    "top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos", "skip_special_tokens",
)  # fmt: skip
_ZERO_MEANS_ONE = ("top_p", "repetition_penalty", "n")
T = TypeVar("T")
_Optional = Literal["max_tokens", "logprobs", "prompt_logprobs", "seed"]
_KvField = Literal["kv_transfer_params", "kv_transfer_params_json"]


@dataclass(eq=False)
class VllmEngineService:
    service: GenerationService
    is_serving: Callable[[], bool]  # whether a request could be served now

    def __post_init__(self) -> None:
        self._started_s = time.monotonic()
        self._last_received = 0.0

    async def Generate(
        self, request: vllm.GenerateRequest, context: Context, writer: StreamWriter[vllm.GenerateResponse]
    ) -> None:
        self._last_received = time.time()
        message = generate_request(request)  # first: a handler counts its request from the beginning to the end
        handler = self.service.handler()
        defaults = GenerationDefaults(eos_token_ids=handler.model.defaults.eos_token_ids)
        handler.model = replace(handler.model, defaults=defaults)
        answer = _Answer(handler, request.sampling_params, writer if request.stream else None)
        await answer_call(handler, message, answer.write, context)
        for complete in await answer.whole():
            await writer.write(vllm.GenerateResponse(complete=complete))

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        await self.service.Abort(generation_pb2.AbortRequest(request_ids=request.request_ids), context)
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        healthy = self.is_serving()
        return vllm.HealthCheckResponse(healthy=healthy, message="serving" if healthy else "not serving")

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        limits, model = self.service.limits(), self.service.model
        bos = model.tokenizer.bos_token_id if model.tokenizer is not None else None
        return vllm.GetModelInfoResponse(
            model_path=model.name,
            served_model_name=model.name,
            is_generation=True,
            max_context_length=limits.max_model_len,
            max_req_input_len=limits.max_model_len - 1,
            vocab_size=limits.vocab_size,
            eos_token_ids=model.defaults.eos_token_ids,
            bos_token_id=bos or 0,
            default_sampling_params_json=json.dumps(model.defaults.sampling_fields()),
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        return vllm.GetServerInfoResponse(
            active_requests=self.service.abort_registry.num_requests,
            last_receive_timestamp=self._last_received,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="tandem",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        if request.HasField("dp_rank") and request.dp_rank != 0:
            raise NotFound(f"dp_rank: {request.dp_rank} does not exist; allowed: 0")
        pools, admission = self.service.dispatcher.pools, self.service.admission
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("tandem-llm"),
            dp_rank_count=1,
            loads=[load_of(pools.decode.views(), pools.prefill.views(), admission.num_queued)],
        )


def generate_request(request: vllm.GenerateRequest) -> generation_pb2.GenerateRequest:
    """Tandem's form of a request. Raises InvalidArgument or PermissionDenied for unsupported fields."""
    _check_known(request)
    message = generation_pb2.GenerateRequest(request_id=request.request_id, sampling=_sampling(request.sampling_params))
    if request.WhichOneof("input") == "text":
        message.text = request.text
    elif request.HasField("tokenized"):
        message.token_ids.ids.extend(request.tokenized.input_ids)
        message.token_ids.SetInParent()
    return message


def load_of(decode: Sequence[InstanceView], prefill: Sequence[InstanceView], num_queued: int) -> vllm.SchedulerLoad:
    """Both pools as one engine; memory and `max_running_requests` are the decode pool's. An instance that is out is no
    capacity, and only of one that ends as it should the last report says what still runs."""
    loads = [view.load for view in (*decode, *prefill) if view.out in (None, *_ENDS)]
    decode = [view for view in decode if view.out is None]
    num_running = sum(load.num_running for load in loads)
    num_waiting = sum(load.num_waiting + load.num_loading for load in loads) + num_queued
    total = sum(view.info.num_blocks * view.info.identity.block_size for view in decode)
    unused = sum(view.load.usable_blocks * view.info.identity.block_size for view in decode)
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
            raise PermissionDenied(f"{name}: clients cannot name KV transfers; omit it")
    if request.HasField("mm_inputs"):
        raise invalid_argument("mm_inputs", "is not supported", "text or token ids")
    params = request.sampling_params
    if params.HasField("truncate_prompt_tokens"):
        raise invalid_argument("sampling_params.truncate_prompt_tokens", "is not supported", "a prompt that fits")
    _check_fields("", request, {_DATA_PARALLEL_RANK})
    _check_fields("sampling_params: ", params, set())
    _check_fields("tokenized: ", request.tokenized, set())


def _check_fields(where: str, message: Message, ignored: set[int]) -> None:
    found: Any = UnknownFieldSet(message)  # iterable, though its stubs do not say so
    unknown = {field.field_number for field in found} - ignored
    if unknown:
        raise invalid_argument("request", f"{where}field {min(unknown)} is of an unknown version")


def _sampling(params: vllm.SamplingParams) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams(
        stop=params.stop, stop_token_ids=params.stop_token_ids, logit_bias=dict(params.logit_bias)
    )
    if params.HasField("seed") and params.seed < 0:
        raise invalid_argument("sampling_params.seed", f"{params.seed} is out of range", "0..2147483647")
    for name in _SCALARS:
        setattr(sampling, name, getattr(params, name))
    sampling.temperature = params.temperature if params.HasField("temperature") else 1.0
    for name in _ZERO_MEANS_ONE:
        setattr(sampling, name, getattr(params, name) or 1)
    if (constraint := params.WhichOneof("constraint")) == "choice":
        sampling.choice.texts.extend(params.choice.choices)
        sampling.choice.SetInParent()
    elif constraint is not None:
        setattr(sampling, constraint, getattr(params, constraint))
    for optional in get_args(_Optional):
        if params.HasField(optional):
            setattr(sampling, optional, getattr(params, optional))
    return sampling


class _Answer:
    """The sink of a request: writes to the client at once, or, without a stream, keeps the chunks until its end."""

    def __init__(
        self, handler: RequestHandler, params: vllm.SamplingParams, writer: StreamWriter[vllm.GenerateResponse] | None
    ) -> None:
        self._handler = handler
        self._num_top = params.logprobs
        self._num_prompt_top = params.prompt_logprobs
        self._writer = writer
        self._chunks: defaultdict[int, list[common_pb2.TokenChunk]] = defaultdict(list)

    async def write(self, message: generation_pb2.GenerateResponse) -> None:
        chunk = message.tokens
        if self._writer is None:
            self._chunks[chunk.choice].append(common_pb2.TokenChunk.FromString(chunk.SerializeToString()))
            return
        piece = await _made(partial(self._piece, chunk), [chunk])
        await self._writer.write(vllm.GenerateResponse(chunk=piece))
        if chunk.HasField("finish"):
            complete = await _made(partial(self._complete, [chunk]), [chunk])
            await self._writer.write(vllm.GenerateResponse(complete=complete))

    async def whole(self) -> list[vllm.GenerateComplete]:
        by_choice = [self._chunks[choice] for choice in sorted(self._chunks)]
        return [await _made(partial(self._complete, chunks), chunks) for chunks in by_choice]

    def _piece(self, chunk: common_pb2.TokenChunk) -> vllm.GenerateStreamChunk:
        return vllm.GenerateStreamChunk(token_ids=chunk.token_ids, **self._fields([chunk]))

    def _complete(self, chunks: list[common_pb2.TokenChunk]) -> vllm.GenerateComplete:
        finish = chunks[-1].finish
        output_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        complete = vllm.GenerateComplete(
            output_ids=output_ids, finish_reason=finish_reason(finish), **self._fields(chunks)
        )
        if finish.HasField("stop_token_id"):
            complete.matched_token_id = finish.stop_token_id
        elif finish.HasField("stop_string"):
            complete.matched_stop_str = finish.stop_string
        return complete

    def _fields(self, chunks: list[common_pb2.TokenChunk]) -> dict[str, Any]:
        """What a piece of a choice and the whole one have in common."""
        prompt = self._handler.prompt
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": sum(len(chunk.token_ids) for chunk in chunks),
            "cached_tokens": chunks[-1].finish.usage.cached_tokens,
            "output_logprobs": _output_logprobs(chunks, self._num_top),
            "input_logprobs": _input_logprobs(prompt, chunks[0], self._num_prompt_top),
            "index": chunks[0].choice,
        }


async def _made(make: Callable[[], T], chunks: Sequence[common_pb2.TokenChunk]) -> T:
    """`make()`, in a thread where it converts the log-probabilities of a prompt: of a long one they take a second."""
    return await start_in_thread(make, "convert log-probabilities") if chunks[0].prompt_logprobs else make()


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
