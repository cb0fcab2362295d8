"""From a caller's prompt (one of three kinds) and keyword options to a GenerateRequest."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, TypeVar

from engine.errors import shown, suggestion
from protos.tandem.v1 import common_pb2, generation_pb2
from tandem.client.completion import ToolCall

F = TypeVar("F", bound=Callable[..., Any])
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or the messages of a chat: `[{"role": "user", "content": "…"}]`. An assistant's message may have
`tool_calls` (those of a Completion, or in OpenAI's form) and `reasoning`, a tool's has its `tool_call_id`."""

_TOOL_CHOICES = {
    "auto": generation_pb2.TOOL_CHOICE_AUTO,
    "none": generation_pb2.TOOL_CHOICE_NONE,
    "required": generation_pb2.TOOL_CHOICE_REQUIRED,
}
_CHAT_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "template_variables")
_REQUEST_FIELDS = ("request_id", "model", "priority", "cache_salt", "lora", "session", "idempotency_key")


class Sampling(TypedDict, total=False):
    """Keyword options of `generate` and `stream`; None counts as absent. docs/python.md documents each."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    n: int | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    bad_word_ids: Sequence[Sequence[int]] | None
    best_of: int | None
    json_object: bool | None
    """At most one of this and the next five."""
    json_schema: str | Mapping[str, object] | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    structural_tag: str | Mapping[str, object] | None


class RequestOptions(Sampling, total=False):
    """All keyword options of a call: the sampling parameters, and those of the request as a whole."""

    request_id: str | None
    """For logs and for abort; the router makes one if absent."""
    model: str | None
    priority: int | None
    """Larger is served first within a tenant; -100..100."""
    cache_salt: str | None
    """Requests with different salts share no prefix cache."""
    lora: str | None
    """Name of a LoRA adapter; `model_info().lora_adapters` lists them."""
    session: str | None
    idempotency_key: str | None
    tools: Sequence[Mapping[str, object]] | None
    """What the model of a chat may call, in OpenAI's form: name, description, parameters (a JSON schema), strict."""
    tool_choice: str | None
    """auto (the default), none, required, or the name of a tool."""
    parallel_tool_calls: bool | None
    """False: at most one call."""
    template_variables: Mapping[str, object] | None
    """The chat template's own switches, such as enable_thinking."""
    timeout_s: float | None
    """Limit on the whole time of this request, math.inf for none; absent: the client's. The router ends a call after
    `server.max_deadline_s`, 600 s, in any case."""


def shows_options(method: F) -> F:
    """Gives a method with `**options: Unpack[RequestOptions]` the options as parameters in its signature, for `help`
    and for editors that read no types."""
    signature = inspect.signature(method)
    parameters = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, kind in RequestOptions.__annotations__.items():
        annotation = getattr(kind, "__forward_arg__", kind)
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


def sampling_params(sampling: Mapping[str, object]) -> common_pb2.SamplingParams:
    """The message for `sampling`; None counts as absent. Raises TypeError for an unknown name."""
    params = common_pb2.SamplingParams()
    known = params.DESCRIPTOR.fields_by_name
    for name, value in sampling.items():
        if name not in known:
            options = [*known, *_REQUEST_FIELDS, *_CHAT_OPTIONS, "timeout_s"]
            hint = suggestion(name, options, f"known: {', '.join(sorted(options))}")
            raise TypeError(f"no option is called {name!r}{hint}")
        if value is not None:
            _set(params, name, value)
    constraints = params.DESCRIPTOR.oneofs_by_name["constraint"].fields
    if len(given := [field.name for field in constraints if sampling.get(field.name) is not None]) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: give one of them")
    return params


@contextmanager
def _errors_named(name: str) -> Iterator[None]:
    """What protobuf raises for the value of an option names the option."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # a UnicodeEncodeError takes no text alone
        raise kind(f"{name}: {error}") from None


def _set(params: common_pb2.SamplingParams, name: str, value: object) -> None:
    with _errors_named(name):
        if name == "stop" and isinstance(value, str):
            value = [value]
        elif name in ("choice", "bad_words") and isinstance(value, str):
            raise TypeError(f"{value!r} is a string; give a list of strings")
        elif name == "allowed_token_ids":
            value = common_pb2.TokenIds(ids=value)  # type: ignore[arg-type]
        elif name == "choice":
            value = common_pb2.Texts(texts=value)  # type: ignore[arg-type]
        elif name in ("json_schema", "structural_tag") and not isinstance(value, str):
            value = json.dumps(value)
        elif name == "bad_word_ids":
            value = [common_pb2.TokenIds(ids=ids) for ids in value]  # type: ignore[attr-defined]
        params.MergeFrom(common_pb2.SamplingParams(**{name: value}))  # type: ignore[arg-type]


def generate_request(prompt: Prompt, options: Mapping[str, object]) -> generation_pb2.GenerateRequest:
    """The message of a call; `options` are RequestOptions, of which timeout_s is not sent."""
    others = (*_REQUEST_FIELDS, *_CHAT_OPTIONS, "timeout_s")
    sampling = {name: value for name, value in options.items() if name not in others}
    request = generation_pb2.GenerateRequest(sampling=sampling_params(sampling))
    for name in _REQUEST_FIELDS:
        if (value := options.get(name)) is not None:
            with _errors_named(name):
                setattr(request, name, value)
    chat_options = {name: options[name] for name in _CHAT_OPTIONS if options.get(name) is not None}
    if isinstance(prompt, str):
        with _errors_named("prompt"):
            request.text = prompt
    elif isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise TypeError(_PROMPTS)
    else:
        _set_items(request, list(prompt))
    if chat_options and not request.HasField("chat"):
        raise TypeError(f"{next(iter(chat_options))} goes with the messages of a chat")
    if chat_options:
        _set_chat_options(request.chat, **chat_options)  # type: ignore[arg-type]
    return request


def _set_items(request: generation_pb2.GenerateRequest, items: list[Any]) -> None:
    if items and all(isinstance(item, Mapping) for item in items):
        for index, item in enumerate(items):
            with _errors_named(f"messages[{index}]"):
                request.chat.messages.append(_message(item))
    elif all(isinstance(item, int) for item in items):
        request.token_ids.ids.extend(items)
        request.token_ids.SetInParent()
    else:
        raise TypeError(_PROMPTS)


_PROMPTS = "a prompt is text, a list of token ids, or a list of {'role': …, 'content': …}"
_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning")


def _message(message: Mapping[str, Any]) -> generation_pb2.ChatMessage:
    if unknown := set(message) - set(_MESSAGE_KEYS):
        raise TypeError(f"a chat message has the keys {', '.join(_MESSAGE_KEYS)}, not {min(unknown)!r}")
    if missing := {"role", "content"} - set(message) - ({"content"} if message.get("tool_calls") else set()):
        raise TypeError(f"a chat message has the key {min(missing)}; this one has {sorted(message)}")
    fields = {name: value for name, value in message.items() if name != "tool_calls" and value is not None}
    for name, value in fields.items():
        _check_type(name, value, str, "a string")
    calls = message.get("tool_calls") or ()
    _check_type("tool_calls", calls, Sequence, "a list of calls")
    return generation_pb2.ChatMessage(**fields, tool_calls=map(_tool_call, calls))


def _check_type(name: str, value: object, kind: type, wanted: str) -> None:
    """Raises TypeError. What protobuf says of a wrong type names neither field nor value."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: {shown(value)} is {type(value).__name__}, not {wanted}")


def _tool_call(call: ToolCall | Mapping[str, Any]) -> generation_pb2.ToolCall:
    if isinstance(call, ToolCall):
        return generation_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
    _check_type("tool_calls", call, Mapping, "a call")
    function = call.get("function", call)
    _check_type("function", function, Mapping, "an object of name and arguments")
    try:
        fields = {"id": call["id"], "name": function["name"], "arguments": function["arguments"]}
    except KeyError as missing:
        raise TypeError(f"a tool call has id, name and arguments; this one has no {missing}") from None
    for name, value in fields.items():
        _check_type(name, value, str, "a string")
    return generation_pb2.ToolCall(**fields)


def _set_chat_options(
    chat: generation_pb2.Chat,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str = "auto",
    parallel_tool_calls: bool = True,
    template_variables: Mapping[str, object] | None = None,
) -> None:
    _check_type("tools", tools, Sequence, "a list of tools")
    _check_type("tool_choice", tool_choice, str, "auto, none, required or the name of a tool")
    _check_type("parallel_tool_calls", parallel_tool_calls, int, "true or false")
    _check_type("template_variables", template_variables or {}, Mapping, "values by name")
    for index, tool in enumerate(tools):
        _check_type(f"tools[{index}]", tool, Mapping, "a tool")
        with _errors_named(f"tools[{index}]"):
            chat.tools.append(_tool(tool))
    if tool_choice in _TOOL_CHOICES:
        chat.tool_choice = _TOOL_CHOICES[tool_choice]
    else:
        chat.required_tool = tool_choice
    chat.single_tool_call = not parallel_tool_calls
    with _errors_named("template_variables"):
        chat.template_variables = json.dumps(template_variables) if template_variables else ""


def _tool(tool: Mapping[str, Any]) -> generation_pb2.Tool:
    function = tool.get("function", tool)
    _check_type("function", function, Mapping, "an object of name, description, parameters and strict")
    fields = {name: value for name, value in function.items() if value is not None}
    parameters = fields.get("parameters", "")
    fields["parameters"] = parameters if isinstance(parameters, str) else json.dumps(parameters)
    if unknown := set(fields) - set(generation_pb2.Tool.DESCRIPTOR.fields_by_name):
        raise TypeError(f"a tool has name, description, parameters and strict, not {sorted(unknown)}")
    for name, value in fields.items():
        _check_type(name, value, *((int, "true or false") if name == "strict" else (str, "a string")))
    return generation_pb2.Tool(**fields)
