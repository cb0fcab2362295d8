"""Validation: a client's message becomes a `GenerationRequest`, or an error that names field, value and range.

Cheap checks come first, then the length limit, then tokenising (once, in a thread), then what depends on the prompt's
length. Nothing is checked again afterwards.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ContextExceeded, InvalidRequest, NotSupported, UnsupportedModel, shown
from engine.generation_config import GenerationDefaults
from engine.identity import tokenizer_digest
from engine.sampling.params import MAX_SEED, SamplingParams, check_each_id, validate, validate_prompt, with_bad_word_ids
from engine.text.channels import ANSWER_HEAD, CHANNEL
from engine.text.chat_output import THINK_BEGIN, THINK_END, TOOL_FORMATS, ToolFormat, tool_format_of
from engine.text.detokenizer import OutputProcessor
from engine.text.tokenizer import Tokenizer, supports_constraints
from protos.tandem.v1 import common_pb2, generation_pb2
from router.pools.instance_info import InstanceInfo
from router.request.caller import Caller
from router.request.chat import ChatOutput, Tools, template_messages
from router.request.generation_request import GenerationRequest, ResumedChoice, from_wire
from serving.errors import (
    ContextLengthExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
    invalid_argument,
)
from serving.limits import LARGE_BYTES, start_in_thread


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name, tokenizer and defaults from the model's folder. Needs neither weights nor torch."""

    name: str
    tokenizer: Tokenizer | None
    """None: the folder has none (random weights in benchmarks); prompts must then be token ids."""
    defaults: GenerationDefaults
    tokenizer_digest: str
    tool_format: ToolFormat | None = None
    """How it writes tool calls; None: it cannot, or in a way that is not supported."""
    thinks: bool = False
    """Whether its answers may begin with reasoning between <think> and </think>."""
    has_channels: bool = False
    """Whether it writes answers to chats into channels (engine/text/channels.py)."""

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        name: str | None = None,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> ServedModel:
        """Reads the tokenizer and generation_config.json; raises engine.errors.EngineError. `tool_call_parser` is
        a name of TOOL_FORMATS, `reasoning_parser` think or harmony; or they are none, or auto: by the chat template."""
        tokenizer = Tokenizer.from_folder(folder) if (Path(folder) / "tokenizer.json").is_file() else None
        defaults = GenerationDefaults.from_folder(folder, tokenizer)
        digest = tokenizer_digest(Path(folder))
        if tokenizer is not None:
            tokenizer.warm_up()
        template = tokenizer.chat_template if tokenizer is not None else None
        sources = (template.source, template.tool_source) if template is not None else ("", "")
        tool_format = tool_format_of(sources[1]) if tool_call_parser == "auto" else TOOL_FORMATS.get(tool_call_parser)
        if reasoning_parser == "auto":
            marks = {"harmony": CHANNEL, "think": THINK_END}
            found = (one for one, mark in marks.items() if any(mark in source for source in sources))
            reasoning_parser = next(found, "none")
        has_channels = reasoning_parser == "harmony"
        if tool_format is not None and tool_format.has_channels and not has_channels:
            tool_format = None
        thinks = reasoning_parser == "think"
        name = name or Path(folder).resolve().name
        return cls(name, tokenizer, defaults, digest, tool_format, thinks, has_channels)

    async def tools_of(self, chat: generation_pb2.Chat) -> Tools | None:
        """None if the chat has none, or none that may be called. Raises InvalidRequest."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        is_single = template is not None and template.single_calls
        read = partial(Tools.of, chat, self.tool_format, single_calls=is_single)
        if not chat.tools or chat.ByteSize() < LARGE_BYTES:
            return read()
        return await start_in_thread(read, "read the tools")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What every decode instance supports, so that a valid request is valid at each of them, and where every request
    is split, the prefill instance with the longest context."""

    max_model_len: int
    vocab_size: int
    longest_ready: int
    """The longest context of a ready decode instance."""
    longest: int
    """The same, ready or not: an answer that has begun was accepted already, and waits for an instance where it
    fits."""
    lora_adapters: frozenset[str] = frozenset()
    """Unlike the rest, what at least one decode instance has, ready or not: picks find it."""

    @classmethod
    def of(
        cls,
        decode: Sequence[InstanceInfo],
        prefill: Sequence[InstanceInfo] = (),
        known: Sequence[InstanceInfo] = (),
        lora_adapters: frozenset[str] = frozenset(),
    ) -> ModelLimits | None:
        """The tightest of `decode`, and the longest context of `prefill`; None when there is no decode instance.
        `known` decode instances count for the longest context alone."""
        if not decode:
            return None
        contexts = [info.max_model_len for info in decode]
        longest_ready = max(contexts)
        longest = max([longest_ready, *(info.max_model_len for info in known)])
        if prefill:
            contexts.append(max(info.max_model_len for info in prefill))
        return cls(min(contexts), min(info.vocab_size for info in decode), longest_ready, longest, lora_adapters)


_LABEL = re.compile(r"[A-Za-z0-9._-]{1,128}")
MAX_PRIORITY = 100
_MAX_VARIABLES_BYTES = 4096
_MARK_TOKENS = 16
"""At the end of a prompt: enough for <think> and white space."""
_EXACT = ("regex", "choice", "grammar", "structural_tag")
"""The constraints whose white space is the client's."""
_MAX_FINGERPRINT_CHARS = 128
_MAX_LISTED = 16
"""Names in a message."""
_ROLES = ("system", "user", "assistant", "tool")


async def validated(
    request: generation_pb2.GenerateRequest,
    model: ServedModel,
    limits: ModelLimits,
    *,
    deadline_s: float | None,
    caller: Caller = Caller(),  # noqa: B008 - frozen
) -> GenerationRequest:
    """The request with every default resolved; `deadline_s` is monotonic. Raises InvalidArgument, NotFound,
    Unsupported, Unavailable or Overloaded."""
    _check_label("request_id", request.request_id)
    lora = _adapter(request, model, limits)
    shortest = limits.max_model_len
    if request.resume.choices:
        limits = replace(limits, max_model_len=limits.longest)
    with service_errors():
        _check_extras(request)
        tools = await model.tools_of(request.chat)
        prompt = await prompt_ids(request, model, limits, tools=tools)
        validate_prompt(prompt, limits.vocab_size, limits.max_model_len)
        output = _chat_output(request, model, tools, prompt)
        default = _default_max_tokens(request.resume, len(prompt), shortest, limits)
        params = _params(request, model, limits, len(prompt), default, output)
        if request.resume.choices and params.seed is None:
            raise InvalidRequest("sampling.seed", "is missing, and the answer is resumed", "that of its first message")
        resumed = await _resumed_choices(request.resume, params, prompt, model.tokenizer, limits)
    if params.seed is None:
        params = msgspec.structs.replace(params, seed=secrets.randbelow(MAX_SEED + 1))
    return GenerationRequest(
        label=request.request_id or secrets.token_hex(8),
        request_id=secrets.token_hex(16),
        model=lora or model.name,
        prompt_token_ids=tuple(prompt),
        params=params,
        priority=request.priority,
        instance_priority=caller.instance_priority(request.priority),
        cache_salt=caller.salt(request.cache_salt),
        lora=lora,
        session=request.session,
        deadline_s=deadline_s,
        tenant=caller.tenant,
        chat_output=output,
        resumed=resumed,
        eos_token_ids=model.defaults.eos_ids_within(limits.vocab_size),
    )


def check_model(name: str, model: ServedModel, adapters: Collection[str]) -> None:
    """Raises NotFound for a name that is neither the model's nor one of its LoRA adapters'."""
    if name not in ("", model.name, *adapters):
        served = [model.name, *sorted({*adapters} - {model.name})]
        raise NotFound(f"model: {shown(name)} is not served; served: {_listed(served)}")


def _adapter(request: generation_pb2.GenerateRequest, model: ServedModel, limits: ModelLimits) -> str:
    """The LoRA adapter that `lora` names, or else `model`; empty for none. Raises InvalidArgument, NotFound, or
    Unavailable for one of an answer that has begun: a router that has just started may not know its instances yet."""
    _check_label("lora", request.lora)
    adapters, by_model = limits.lora_adapters, "" if request.model == model.name else request.model
    try:
        check_model(request.model, model, adapters)
        if request.lora and request.lora not in adapters:
            served = _listed(sorted(adapters)) or "none"
            raise NotFound(f"lora: adapter {shown(request.lora)} is not served; served: {served}")
    except NotFound as error:
        if not request.resume.choices:
            raise
        raise Unavailable(error.message) from error
    if by_model and request.lora not in ("", by_model):
        problem = f"is {shown(request.lora)}, and model names the adapter {shown(by_model)}"
        raise invalid_argument("lora", problem, "one of the two, or equal ones")
    return request.lora or by_model


def _listed(names: Sequence[str]) -> str:
    """The first ones: the log and the live page keep the message."""
    more = f" and {num_more} more" if (num_more := len(names) - _MAX_LISTED) > 0 else ""
    return ", ".join(map(shown, names[:_MAX_LISTED])) + more


@contextmanager
def service_errors() -> Iterator[None]:
    """The engine's errors about a request as those of a service: InvalidArgument, Unsupported, FailedPrecondition."""
    try:
        yield
    except NotSupported as error:
        raise Unsupported(str(error)) from error
    except InvalidRequest as error:
        kind = ContextLengthExceeded if isinstance(error, ContextExceeded) else InvalidArgument
        raise invalid_argument(error.field, error.problem, error.allowed, kind=kind) from error
    except UnsupportedModel as error:
        raise FailedPrecondition(str(error)) from error


def _check_label(field: str, label: str) -> None:
    """Its alphabet is narrow since it appears in logs and metadata; empty: none is given."""
    if label and not _LABEL.fullmatch(label):
        raise invalid_argument(field, f"{shown(label)} has {len(label)} characters", "1..128 of [A-Za-z0-9._-]")


def _check_extras(request: generation_pb2.GenerateRequest) -> None:
    """Everything that is neither prompt nor sampling."""
    for name, most in (("cache_salt", 256), ("session", 128), ("idempotency_key", 128)):
        if (num_bytes := len(getattr(request, name).encode())) > most:
            raise invalid_argument(name, f"{num_bytes} bytes", f"at most {most} bytes")
    if abs(request.priority) > MAX_PRIORITY:
        allowed = f"-{MAX_PRIORITY}..{MAX_PRIORITY}"
        raise invalid_argument("priority", f"{request.priority} is out of range", allowed)
    if request.idempotency_key:
        raise NotSupported("idempotency_key", shown(request.idempotency_key))


async def prompt_ids(
    request: generation_pb2.GenerateRequest,
    model: ServedModel,
    limits: ModelLimits,
    *,
    tools: Tools | None = None,
    add_special_tokens: bool = True,
) -> Sequence[int]:
    """The prompt's ids; a prompt that cannot fit is rejected before tokenising. Raises InvalidRequest."""
    given = [name for name in ("text", "token_ids", "chat") if request.HasField(name)]
    if not given:
        raise InvalidRequest("prompt", "one of text, token_ids, chat is required", "exactly one of them")
    if len(given) > 1:
        raise InvalidRequest("prompt", f"exactly one of text, token_ids, chat is allowed, not {' and '.join(given)}")
    max_tokens = limits.max_model_len - 1
    if request.HasField("token_ids"):
        if len(request.token_ids.ids) > max_tokens:
            return range(len(request.token_ids.ids))  # too long whatever they are: validate_prompt raises
        return list(request.token_ids.ids)
    if model.tokenizer is None:
        raise InvalidRequest(given[0], "this model has no tokenizer", "token_ids")
    if request.HasField("text"):
        if not request.text:
            raise InvalidRequest("prompt", "prompt is empty", f"1..{max_tokens} tokens")
        encode_text = partial(
            model.tokenizer.encode, request.text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )
        return await start_in_thread(encode_text, "tokenise the prompt")
    if (num_messages := len(request.chat.messages)) > max_tokens:  # they take time, here and in the template
        raise ContextExceeded("chat.messages", f"{num_messages} messages", f"at most {max_tokens}, a token for each")
    for index, message in enumerate(request.chat.messages):
        if message.role not in _ROLES:
            raise InvalidRequest(f"chat.messages[{index}].role", shown(message.role), ", ".join(_ROLES))
    tokenizer = model.tokenizer

    def encode() -> list[int]:
        return tokenizer.encode_chat(
            template_messages(request.chat, model.tool_format),
            tools=None if tools is None else [tool.for_template() for tool in tools.tools],
            template_variables=_template_variables(request.chat.template_variables),
            max_tokens=max_tokens,
        )

    return [*await start_in_thread(encode, "tokenise the prompt"), *_answer_head(request.sampling, model, tools)]


def _template_variables(text: str) -> dict[str, Any]:
    """The template's variables; the template decides which names it supports."""
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


def _answer_head(sampling: common_pb2.SamplingParams, model: ServedModel, tools: Tools | None) -> Sequence[int]:
    """Of a constrained answer of a model that writes into channels: the constraint excludes their marks."""
    constraint = sampling.WhichOneof("constraint")
    is_constrained = constraint is not None and (constraint != "json_object" or sampling.json_object)
    if not model.has_channels or model.tokenizer is None or not (is_constrained or (tools and tools.is_required)):
        return ()
    return model.tokenizer.encode(ANSWER_HEAD, add_special_tokens=False)


def _chat_output(
    request: generation_pb2.GenerateRequest, model: ServedModel, tools: Tools | None, prompt: Sequence[int]
) -> ChatOutput:
    if model.has_channels and request.HasField("chat"):
        return ChatOutput(tools, has_channels=True)
    if not model.thinks or model.tokenizer is None or not request.HasField("chat"):
        return ChatOutput(tools)
    end = model.tokenizer.decode(prompt[-_MARK_TOKENS:], skip_special_tokens=False)
    is_required = tools is not None and tools.is_required
    is_exact = request.sampling.WhichOneof("constraint") in _EXACT and not is_required
    return ChatOutput(tools, thinks=True, is_thinking=end.rstrip().endswith(THINK_BEGIN), is_exact=is_exact)


def _default_max_tokens(
    resume: generation_pb2.Resume, num_prompt_tokens: int, shortest: int, limits: ModelLimits
) -> int:
    """The tokens that fit behind the prompt, in the shortest context unless a choice has got further: then the router
    where it began knew a longer one."""
    num_begun = max([1, *(len(choice.token_ids) + (not choice.finished) for choice in resume.choices)])
    contexts = shortest, limits.longest_ready, limits.longest
    return next((one for one in contexts if num_prompt_tokens + num_begun <= one), limits.longest) - num_prompt_tokens


def _params(
    request: generation_pb2.GenerateRequest,
    model: ServedModel,
    limits: ModelLimits,
    num_prompt_tokens: int,
    default_max_tokens: int,
    output: ChatOutput,
) -> SamplingParams:
    sampling = request.sampling
    params = from_wire(sampling, model.defaults.sampling_fields())
    if not sampling.HasField("max_tokens") and (params.max_tokens is None or params.max_tokens > default_max_tokens):
        params = msgspec.structs.replace(params, max_tokens=default_max_tokens)  # not a value that the client has set
    if model.tokenizer is not None:
        params = with_bad_word_ids(params, partial(model.tokenizer.encode, add_special_tokens=False))
    elif params.stop:
        raise InvalidRequest("stop", "requires a tokenizer, which this model does not have", "no stop strings")
    params = output.constrained(params)
    if params.is_constrained and not supports_constraints(model.tokenizer):
        raise InvalidRequest("constraint", "requires a tokenizer whose tokens have bytes", "no constraint")
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
            raise NotSupported("best_of", f"best_of={sampling.best_of} > n={params.n}", str(params.n))
    return params


# An answer whose router has died continues here:
#
#     Resume ──checked──▶ ids ──OutputProcessor──▶ ResumedChoice: ids and the text that was delivered with them
#
# The state of a stream is its ids. So a router needs nothing of the one before: the text that is delivered after some
# ids is a function of those ids alone, as for a stream that continues at another instance.


async def _resumed_choices(
    resume: generation_pb2.Resume,
    params: SamplingParams,
    prompt: Sequence[int],
    tokenizer: Tokenizer | None,
    limits: ModelLimits,
) -> Mapping[int, ResumedChoice]:
    """The choices of `resume` by their index; `params` with max_tokens filled in. Raises InvalidRequest."""
    resumed: dict[int, ResumedChoice] = {}
    for index, choice in enumerate(resume.choices):
        field = f"resume.choices[{index}]"
        if not 0 <= choice.choice < params.n or choice.choice in resumed:
            raise InvalidRequest(f"{field}.choice", f"is {choice.choice}", f"each of 0..{params.n - 1} once")
        if len(choice.fingerprint) > _MAX_FINGERPRINT_CHARS:
            problem = f"has {len(choice.fingerprint)} characters"
            raise InvalidRequest(f"{field}.fingerprint", problem, f"at most {_MAX_FINGERPRINT_CHARS}")
        _check_number(field, len(choice.token_ids), choice.finished, params, limits.max_model_len - len(prompt))
        ids = tuple(choice.token_ids)
        check_each_id(f"{field}.token_ids", ids, limits.vocab_size)
        text = ""
        if not choice.finished:
            delivered = partial(_delivered, field, ids, params, prompt, tokenizer)
            text = await start_in_thread(delivered, "continue the text of the answer")
        resumed[choice.choice] = ResumedChoice(ids, text, choice.finished, choice.fingerprint)
    if len(resumed) == params.n and all(choice.is_finished for choice in resumed.values()):
        raise InvalidRequest("resume", "every choice has finished", "a choice that has not")
    return resumed


def _check_number(field: str, num_ids: int, finished: bool, params: SamplingParams, room: int) -> None:
    """Before any id is looked at: a message has room for millions. `room`: tokens that fit behind the prompt."""
    assert params.max_tokens is not None, "validation fills max_tokens in"
    most = min(params.max_tokens, room) - (not finished)
    if num_ids > most:
        problem = f"has {num_ids} ids, of at most {min(params.max_tokens, room)} that the choice can have"
        raise InvalidRequest(f"{field}.token_ids", problem, f"at most {most}, or finished")


def _delivered(
    field: str, ids: Sequence[int], params: SamplingParams, prompt: Sequence[int], tokenizer: Tokenizer | None
) -> str:
    text = OutputProcessor(tokenizer, params, prompt=prompt).replay(ids)
    if text is None:
        raise InvalidRequest(f"{field}.token_ids", "contain a stop string: the choice has ended", "finished")
    return text
