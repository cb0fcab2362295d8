"""Requests as vLLM takes them, and its outputs as the engine's events.

vLLM computes logits and holds KV; every token is sampled by `worker.py`, from `tandem_request` in the request's extra
arguments. So to vLLM all requests are greedy, and those that continue a stream are plain prompts: a token's position,
its penalties and its grammar come from the request, never from what vLLM counts as output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from vllm.inputs.engine import TokensInput, tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from engine.core.messages import EngineRequest, FinishReason, TokenLogprob, TokensEvent

_EXTRA_ARG = "tandem_request"
_PLACEHOLDER = 0


class SampledRequest(msgspec.Struct, frozen=True):
    """What the worker needs of a request beside its tokens, which it has."""

    request: EngineRequest
    """Without token ids."""
    num_prompt_tokens: int

    def with_tokens(self, token_ids: Sequence[int]) -> EngineRequest:
        """The whole request; `token_ids`: its prompt and what was emitted before it came here."""
        prompt, emitted = token_ids[: self.num_prompt_tokens], token_ids[self.num_prompt_tokens :]
        return msgspec.structs.replace(self.request, prompt_token_ids=list(prompt), output_token_ids=list(emitted))


_decoder = msgspec.msgpack.Decoder(SampledRequest)


def hands_over(sampled: SampledRequest, num_tokens: int, max_model_len: int) -> bool:
    """Whether a request whose KV is held goes on elsewhere: of its `num_tokens` the last one was sampled here, and it
    was not a stop token."""
    max_tokens = sampled.request.params.max_tokens
    num_output_tokens = num_tokens - sampled.num_prompt_tokens
    return num_tokens < max_model_len and (max_tokens is None or num_output_tokens < max_tokens)


def vllm_input(request: EngineRequest) -> TokensInput:
    """With a placeholder for the seed where that comes later: see kv_scheduler.py."""
    placeholder = [] if request.remote_kv is None else [_PLACEHOLDER]
    token_ids = [*request.prompt_token_ids, *request.output_token_ids, *placeholder]
    return tokens_input(token_ids, cache_salt=request.cache_salt or None)


def vllm_params(request: EngineRequest) -> VllmSamplingParams:
    """Greedy: the worker leaves the sampled token as the best one."""
    params = request.params
    return VllmSamplingParams(
        temperature=0.0,
        max_tokens=_max_tokens(request),
        stop_token_ids=list(request.ending_token_ids),
        ignore_eos=True,
        detokenize=False,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs if request.returns_prompt_logprobs else None,
        output_kind=RequestOutputKind.DELTA,
        extra_args={_EXTRA_ARG: msgspec.msgpack.encode(sampled_request(request))},
        skip_clone=True,
    )


def sampled_request(request: EngineRequest) -> SampledRequest:
    bare = msgspec.structs.replace(request, prompt_token_ids=[], output_token_ids=[])
    return SampledRequest(bare, len(request.prompt_token_ids))


def read_sampled_request(params: Any) -> SampledRequest | None:
    """What `vllm_params` put into a request's parameters; None for a request of vLLM's own."""
    encoded = ((params and params.extra_args) or {}).get(_EXTRA_ARG)
    return None if encoded is None else _decoder.decode(encoded)


def _max_tokens(request: EngineRequest) -> int:
    """To be sampled here: of a hand-over the first, of a request that gets its KV all but the seed."""
    assert request.params.max_tokens is not None
    if request.hold_kv is not None:
        return 1
    return max(1, request.params.max_tokens - len(request.output_token_ids) - (request.remote_kv is not None))


def tokens_event(request: EngineRequest, output: RequestOutput, *, is_first: bool, max_model_len: int) -> TokensEvent:
    """The event of one output, which has the tokens since the last one."""
    completion = output.outputs[0]
    reason, stop_token_id = _ending(request, completion) if output.finished else (None, None)
    if reason == "length" and request.hold_kv is not None:
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids) + len(completion.token_ids)
        reason = "hand_over" if hands_over(sampled_request(request), num_tokens, max_model_len) else "length"
    metrics = output.metrics
    queue_s = metrics.scheduled_ts - metrics.queued_ts if is_first and metrics is not None else 0.0
    return TokensEvent(
        request.request_id,
        list(completion.token_ids),
        finish_reason=reason,
        stop_token_id=stop_token_id,
        num_cached_tokens=output.num_cached_tokens or 0,
        queue_s=max(0.0, queue_s),
        logprobs=_logprobs(completion.logprobs or (), completion.token_ids),
        prompt_logprobs=_prompt_logprobs(request, output) if is_first else [],
    )


def _ending(request: EngineRequest, completion: Any) -> tuple[FinishReason, int | None]:
    """As engine.scheduling.request.Request.check_stop: a stop token of the request is named, the model's EOS is not."""
    last = completion.token_ids[-1] if completion.token_ids else None
    if last in request.params.stop_token_ids:
        return "stop", last
    if completion.finish_reason == "abort":
        return "abort", None
    return ("stop" if last in request.ending_token_ids else "length"), None


def _logprobs(positions: Sequence[Mapping[int, Any]], token_ids: Sequence[int]) -> list[list[TokenLogprob]]:
    return [_entries(found, token_id) for found, token_id in zip(positions, token_ids, strict=False)]


def _prompt_logprobs(request: EngineRequest, output: RequestOutput) -> list[list[TokenLogprob]]:
    if request.params.prompt_logprobs is None or not request.returns_prompt_logprobs:
        return []
    positions = output.prompt_logprobs or []
    return [[] if found is None else _entries(found, token_id) for found, token_id in
            zip(positions, request.prompt_token_ids, strict=True)]  # fmt: skip


def _entries(found: Mapping[int, Any], token_id: int) -> list[TokenLogprob]:
    """The token itself, then the best others, best first."""
    own = TokenLogprob(token_id, found[token_id].logprob, found[token_id].rank)
    others = (TokenLogprob(one, entry.logprob, entry.rank) for one, entry in found.items() if one != token_id)
    return [own, *sorted(others, key=lambda entry: entry.rank)]
