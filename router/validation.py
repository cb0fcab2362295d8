"""The one gate: what a client sent becomes a `GenerationRequest`, or an error that names field, value and range.

Cheap checks come first, then the length gate, then tokenising (once, in a thread), then what depends on the prompt's
length. Behind this gate nothing is checked again.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from engine.bad_words import with_bad_word_ids
from engine.errors import InvalidRequest, NotServed, UnsupportedModel, shown
from engine.sampling_params import MAX_SEED, SamplingParams, validate, validate_prompt
from protos.tandem.v1 import generation_pb2
from router.callers import Caller
from router.model import ModelLimits, ServedModel
from router.request import GenerationRequest
from router.sampling import from_wire
from serving.errors import FailedPrecondition, NotFound, ServiceError, Unsupported, invalid_argument

_LABEL = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LABEL_ALLOWED = "1..128 of [A-Za-z0-9._-]"
_MAX_SALT_BYTES = 256
_MAX_KEY_BYTES = 128
_MAX_SESSION_BYTES = 128
_MAX_PRIORITY = 100
_MAX_VARIABLES_BYTES = 4096
_ROLES = ("system", "user", "assistant", "tool")


async def validated(
    request: generation_pb2.GenerateRequest,
    model: ServedModel,
    limits: ModelLimits,
    *,
    remaining_s: float | None,
    caller: Caller = Caller(),  # noqa: B008 - frozen
) -> GenerationRequest:
    """The request with every default resolved. Raises InvalidArgument, NotFound or Unsupported."""
    label = checked_label(request.request_id) if request.request_id else secrets.token_hex(8)
    _check_model(request.model, model.name)
    deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
    try:
        _check_extras(request)
        prompt = await _prompt(request, model, limits)
        validate_prompt(prompt, limits.vocab_size, limits.max_model_len)
        params = _params(request, model, limits, len(prompt))
    except InvalidRequest as error:
        raise refused(error) from error
    except UnsupportedModel as error:
        raise FailedPrecondition(str(error)) from error
    seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
    return GenerationRequest(
        label=label,
        request_id=secrets.token_hex(16),
        model=model.name,
        prompt_token_ids=tuple(prompt),
        params=msgspec.structs.replace(params, seed=seed),
        seed=seed,
        priority=request.priority,
        cache_salt=caller.salt(request.cache_salt),
        session=request.session,
        deadline_s=deadline_s,
        tenant=caller.tenant,
    )


def checked_label(label: str) -> str:
    """A request's label: it appears in logs and metadata, so its alphabet is narrow."""
    if not _LABEL.fullmatch(label):
        raise invalid_argument("request_id", f"{shown(label)} has {len(label)} characters", _LABEL_ALLOWED)
    return label


def refused(error: InvalidRequest) -> ServiceError:
    """The engine's refusal as the client sees it."""
    if isinstance(error, NotServed):
        return Unsupported(str(error))
    return invalid_argument(error.field, error.problem, error.allowed)


def _check_model(asked: str, served: str) -> None:
    if asked and asked != served:
        raise NotFound(f"model: {shown(asked)} is not served here; served: {shown(served)}")


def _check_extras(request: generation_pb2.GenerateRequest) -> None:
    """Everything that is neither prompt nor sampling."""
    if (num_bytes := len(request.cache_salt.encode())) > _MAX_SALT_BYTES:
        raise invalid_argument("cache_salt", f"{num_bytes} bytes", f"at most {_MAX_SALT_BYTES} bytes")
    if (num_bytes := len(request.session.encode())) > _MAX_SESSION_BYTES:
        raise invalid_argument("session", f"{num_bytes} bytes", f"at most {_MAX_SESSION_BYTES} bytes")
    if abs(request.priority) > _MAX_PRIORITY:
        allowed = f"-{_MAX_PRIORITY}..{_MAX_PRIORITY}"
        raise invalid_argument("priority", f"{request.priority} is out of range", allowed)
    if request.lora:
        if not _LABEL.fullmatch(request.lora):
            raise invalid_argument("lora", f"{shown(request.lora)} has {len(request.lora)} characters", _LABEL_ALLOWED)
        raise NotFound(f"lora: adapter {shown(request.lora)} is not loaded here")
    if request.idempotency_key:
        if (num_bytes := len(request.idempotency_key.encode())) > _MAX_KEY_BYTES:
            raise invalid_argument("idempotency_key", f"{num_bytes} bytes", f"at most {_MAX_KEY_BYTES} bytes")
        raise NotServed("idempotency_key", shown(request.idempotency_key))


async def _prompt(request: generation_pb2.GenerateRequest, model: ServedModel, limits: ModelLimits) -> Sequence[int]:
    """The prompt's ids, refused before tokenising when it cannot fit."""
    given = [name for name in ("text", "token_ids", "chat") if request.HasField(name)]
    if not given:
        raise InvalidRequest("prompt", "one of text or token_ids is required", "exactly one of text, token_ids, chat")
    if len(given) > 1:
        raise InvalidRequest("prompt", f"exactly one of text, token_ids, chat is allowed, not {' and '.join(given)}")
    max_tokens = limits.max_model_len - 1
    if request.HasField("token_ids"):
        if len(request.token_ids.ids) > max_tokens:
            return range(len(request.token_ids.ids))  # too long whatever they are: validate_prompt says so
        return list(request.token_ids.ids)
    if model.tokenizer is None:
        raise InvalidRequest(given[0], "this model has no tokenizer", "token_ids")
    if request.HasField("text"):
        if not request.text:
            raise InvalidRequest("prompt", "prompt is empty", f"1..{max_tokens} tokens")
        return await model.tokenizer.encode_async(request.text, max_tokens=max_tokens)
    for index, message in enumerate(request.chat.messages):
        if message.role not in _ROLES:
            raise InvalidRequest(f"chat.messages[{index}].role", shown(message.role), ", ".join(_ROLES))
    messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
    variables = _template_variables(request.chat.template_variables)
    return await model.tokenizer.encode_chat_async(messages, template_variables=variables, max_tokens=max_tokens)


def _template_variables(text: str) -> dict[str, Any]:
    """The template's switches; which names they may have the template says."""
    if not text:
        return {}
    if (num_bytes := len(text.encode())) > _MAX_VARIABLES_BYTES:
        raise InvalidRequest(
            "template_variables", f"{num_bytes} bytes", f"at most {_MAX_VARIABLES_BYTES} bytes of JSON"
        )
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest("template_variables", f"{shown(text)} is no JSON object", "a JSON object") from None


def _params(
    request: generation_pb2.GenerateRequest, model: ServedModel, limits: ModelLimits, num_prompt_tokens: int
) -> SamplingParams:
    sampling = request.sampling
    params = from_wire(sampling, model.defaults.sampling_fields())
    room = limits.max_model_len - num_prompt_tokens
    if not sampling.HasField("max_tokens") and params.max_tokens is not None and params.max_tokens > room:
        params = msgspec.structs.replace(params, max_tokens=room)  # the model's default is no promise of the client's
    if model.tokenizer is not None:
        params = with_bad_word_ids(params, partial(model.tokenizer.encode, add_special_tokens=False))
    params = validate(
        params,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        num_prompt_tokens=num_prompt_tokens,
        eos_token_ids=model.defaults.eos_token_ids,
    )
    if sampling.HasField("best_of"):
        if sampling.best_of < params.n:
            raise InvalidRequest("best_of", f"best_of={sampling.best_of} < n={params.n}", f"at least n={params.n}")
        if sampling.best_of > params.n:
            raise NotServed("best_of", f"best_of={sampling.best_of} > n={params.n}", str(params.n))
    return params
