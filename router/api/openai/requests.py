"""Request bodies: OpenAI's parameters and vLLM's additions, as pydantic models, and their conversion to the wire.

pydantic parses the JSON itself, strictly: no numbers in strings, limited nesting, no lone surrogates. Null members
of an object mean "not given". router/request/validation.py checks ranges; here only values that the wire's types
cannot hold are rejected, and parameters that are unknown or unsupported and would change the answer.
FastAPI does not parse the bodies: it would read them before authorization and limits, and by the lenient json module.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, model_validator

from engine.errors import shown, suggestion
from engine.sampling.json_schema import json_text
from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai.chat_messages import Message, NamedTool, Tool
from router.api.openai.strict_model import StrictModel, invalid_body
from router.request.validation import MAX_PRIORITY
from serving.errors import ServiceError, invalid_argument

MAX_PROMPTS = 32

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # OpenAI's
    **dict.fromkeys(("audio", "reasoning_effort", "web_search_options"), ()),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    # vLLM's
    **dict.fromkeys(("add_special_tokens", "chat_template", "documents", "kv_transfer_params"), ()),
    **dict.fromkeys(("logits_processors", "prompt_embeds", "prompt_logprobs", "truncate_prompt_tokens"), ()),
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "length_penalty": (1.0,),
    "mm_processor_kwargs": ({},),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Parameters that are known and not supported, at least by one of the endpoints, each with the values that have no
effect and are ignored."""


class StreamOptions(StrictModel):
    include_usage: bool = False  # a last event, without choices, carries the usage of the whole request
    continuous_usage_stats: bool = False  # vLLM's: each earlier event carries the usage of its choice so far
    include_obfuscation: bool = False  # OpenAI's padding of events; has no effect


class JsonSchemaFormat(StrictModel):
    """`response_format.json_schema`. `strict` changes nothing: every schema is followed, or rejected."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's constraint of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise invalid_argument("response_format", "json_schema belongs to type json_schema", "both, or neither")
        return self

    def constraint(self) -> tuple[str, Any] | None:
        """Wire field and value."""
        if self.json_schema is not None and self.json_schema.json_schema is not None:
            return "json_schema", self.json_schema.json_schema
        return None if self.type == "text" else ("json_object", True)


class StructuredOutputs(StrictModel):
    """vLLM's constraints of an answer."""

    json_object: bool | None = None
    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None

    def constraints(self) -> list[tuple[str, Any]]:
        """Wire fields and values."""
        given = [(name, getattr(self, name)) for name in type(self).model_fields]
        return [(name, value) for name, value in given if value is not None and value is not False]


_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


def _stops(value: object) -> object:
    if not isinstance(value, str | list):
        raise invalid_argument("stop", f"is {shown(value)}", "a text, or an array of texts")
    return [value] if isinstance(value, str) else value


Stops = Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=str | list[str])]


def _biases(value: object) -> object:
    """JSON has no integer keys; the ids come as strings."""
    if not isinstance(value, dict):
        return value
    if (wrong := next((key for key in value if not _TOKEN_ID.fullmatch(key)), None)) is not None:
        raise invalid_argument("logit_bias", f"{shown(wrong)} is not a token id", "ids as strings of digits")
    return {int(key): bias for key, bias in value.items()}


class Body(StrictModel, ABC):
    """The body of one endpoint that generates."""

    renamed: ClassVar[dict[str, str]]  # wire fields by their names here, for errors

    model: str = ""
    stream: bool = False

    @abstractmethod
    def requests(self, label: str) -> list[generation_pb2.GenerateRequest]:
        """One wire request for each prompt."""

    def client_names(self) -> dict[str, str]:
        """The client's names of wire fields, for errors."""
        return self.renamed


class CommonParameters(StrictModel):
    """What completions, chats and the Responses API have in common; from `top_k` on vLLM's."""

    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    stop: Stops = Field([])
    prompt_cache_key: str = ""  # OpenAI's hint for caches: the session of a request

    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str = ""
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Lower goes first. The router's goes the other way."""


class RequestBody(CommonParameters, Body):
    """Parameters of both endpoints. The body's size bounds lists and objects; validation checks their contents."""

    ignored: ClassVar = frozenset({
        "include_reasoning", "metadata", "prediction", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "user",
    })  # fmt: skip
    """`prediction`: with it OpenAI's servers are faster, and their answers the same."""

    stream_options: StreamOptions = StreamOptions()
    max_tokens: Int64 | None = None
    n: Int64 = 1
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[Int64, float], BeforeValidator(_biases, json_schema_input_type=dict[str, float])] = (
        Field({})
    )

    min_tokens: Int64 | None = None
    stop_token_ids: list[Int64] = Field([])
    bad_words: list[str] = Field([])
    allowed_token_ids: list[Int64] | None = None
    return_token_ids: bool = False

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @classmethod
    def _supported(cls, members: dict[str, Any]) -> dict[str, Any]:
        supported = {}
        for name, value in members.items():
            if name in cls.model_fields:
                supported[name] = value
            elif name not in _UNSUPPORTED:
                raise _unknown(name, list(cls.model_fields))
            elif value not in _UNSUPPORTED[name]:
                pass_instead = "".join(f" or pass {shown(neutral)}" for neutral in _UNSUPPORTED[name])
                raise invalid_argument(name, f"is not supported; omit it{pass_instead}")
        return supported

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise invalid_argument("stream_options", "requires stream=true")
        if self.stream_options.continuous_usage_stats and not self.stream_options.include_usage:
            raise invalid_argument("stream_options.continuous_usage_stats", "requires include_usage=true")
        return self

    def sampling(self) -> common_pb2.SamplingParams:
        given = {name: getattr(self, name) for name in _SAMPLING}  # None leaves a field unset
        if self.allowed_token_ids is not None:
            given["allowed_token_ids"] = common_pb2.TokenIds(ids=self.allowed_token_ids)
        for _, field, value in self._constraints():
            given[field] = _constraint_on_wire(value)
        return common_pb2.SamplingParams(**given)

    @model_validator(mode="after")
    def _check_constraints(self) -> Self:
        given = self._constraints()
        if len(given) > 1:
            (first, first_field, _), (second, second_field, _) = given[:2]
            fields = f": {first_field} and {second_field}" if first == second else ""
            raise invalid_argument(second, f"is given together with {first}{fields}", "one constraint")
        return self

    def client_names(self) -> dict[str, str]:
        """An instance that cannot compile the constraint says so of `request.sampling`."""
        constraints = {wire: name for name, field, _ in self._constraints() for wire in (field, "request.sampling")}
        return {**self.renamed, **constraints}

    def _constraints(self) -> list[tuple[str, str, Any]]:
        """The client's name, the wire field and the value of each constraint."""
        given: list[tuple[str, str, Any]] = []
        if self.response_format is not None and (found := self.response_format.constraint()) is not None:
            given.append(("response_format", *found))
        if self.structured_outputs is not None:
            given += [("structured_outputs", *found) for found in self.structured_outputs.constraints()]
        for name, field in _GUIDED.items():
            if (value := getattr(self, name)) is not None:
                given.append((name, field, value))
        return given

    def _request(self, label: str, **prompt: Any) -> generation_pb2.GenerateRequest:
        return generation_pb2.GenerateRequest(
            request_id=label,
            model=self.model,
            sampling=self.sampling(),
            priority=-self.priority,
            cache_salt=self.cache_salt,
            session=self.prompt_cache_key,
            **prompt,
        )


_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older names, and the wire's."""


def _constraint_on_wire(value: Any) -> Any:
    if isinstance(value, dict):
        return json_text(value)
    return common_pb2.Texts(texts=value) if isinstance(value, list) else value


_SAMPLING = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words",
    "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip


def _unknown(name: str, known: list[str]) -> ServiceError:
    field = name if name.isidentifier() and len(name) <= 64 else "body"
    return invalid_argument(field, f"unknown parameter {shown(name)}{suggestion(name, known)}")


# /v1/completions: a text to continue, or its token ids, or several of either.

_PROMPT_FORMS = f"text, a list of token ids, or a list of 1..{MAX_PROMPTS} of either"
Prompt = str | list[int]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        return [_prompt("prompt", value)]
    if not isinstance(value, list):
        raise invalid_argument("prompt", f"{shown(value)} is not a prompt", _PROMPT_FORMS)
    if not 0 < len(value) <= MAX_PROMPTS:
        raise invalid_argument("prompt", f"{len(value)} prompts", _PROMPT_FORMS)
    return [_prompt(f"prompt[{index}]", prompt) for index, prompt in enumerate(value)]


def _prompt(name: str, value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_argument(name, f"{shown(value)} is not a prompt", _PROMPT_FORMS)
    try:
        return msgspec.convert(value, list[_Int64])  # a tenth of a Python loop's time: there can be millions
    except msgspec.ValidationError:
        index = next(index for index, token_id in enumerate(value) if not _is_int64(token_id))
        problem = f"{name}[{index}]={shown(value[index])} is not a token id"
        raise invalid_argument(name, problem, _PROMPT_FORMS) from None


def _is_int64(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


class CompletionBody(RequestBody):
    """The body of /v1/completions."""

    renamed: ClassVar = {"token_ids": "prompt", "session": "prompt_cache_key", "prompt_logprobs": "logprobs"}

    prompt: Annotated[
        list[Prompt], PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[Int64] | list[list[Int64]])
    ]
    max_tokens: Int64 | None = 16
    logprobs: Int64 | None = None
    echo: bool = False
    best_of: Int64 | None = None

    def sampling(self) -> common_pb2.SamplingParams:
        params = super().sampling()
        if self.best_of is not None:
            params.best_of = self.best_of
        if self.logprobs is not None:
            params.logprobs = self.logprobs
            if self.echo:
                params.prompt_logprobs = self.logprobs
        return params

    def requests(self, label: str) -> list[generation_pb2.GenerateRequest]:
        return [
            self._request(label, text=prompt)
            if isinstance(prompt, str)
            else self._request(label, token_ids=common_pb2.TokenIds(ids=prompt))
            for prompt in self.prompt
        ]


_TOOL_CHOICES = {
    "auto": generation_pb2.TOOL_CHOICE_AUTO,
    "none": generation_pb2.TOOL_CHOICE_NONE,
    "required": generation_pb2.TOOL_CHOICE_REQUIRED,
}
_TOOL_CHOICE_FORMS = (
    'auto, none, required, {"type": "function", "function": {"name": "one of tools"}}, '
    'or {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [some of tools]}}'
)


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = Field(min_length=1)


class ChosenTools(StrictModel):
    """Some of the tools. The prompt has these alone."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    def of(self, tools: list[Tool]) -> list[Tool]:
        """Raises InvalidArgument."""
        known = {tool.function.name: tool for tool in tools}
        names = [tool.function.name for tool in self.allowed_tools.tools]
        if (unknown := next((name for name in names if name not in known), None)) is not None:
            raise invalid_argument("tool_choice", f"{shown(unknown)} is not in tools", ", ".join(known))
        return [tool for name, tool in known.items() if name in names]


def _tool_choice(value: Any) -> Any:
    if isinstance(value, str) and value in _TOOL_CHOICES:
        return value
    with contextlib.suppress(ValidationError):
        form = ChosenTools if isinstance(value, dict) and "allowed_tools" in value else NamedTool
        return form.model_validate(value)
    raise invalid_argument("tool_choice", f"{shown(value)} is not supported", _TOOL_CHOICE_FORMS)


def template_variables_on_wire(variables: dict[str, Any]) -> str:
    return msgspec.json.encode(variables).decode() if variables else ""


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class ChatBody(RequestBody):
    """The body of /v1/chat/completions."""

    renamed: ClassVar = {
        "prompt": "messages",
        "chat.messages": "messages",
        "template_variables": "chat_template_kwargs",
        "session": "prompt_cache_key",
        "logprobs": "top_logprobs",
        "chat.tools": "tools",
        "chat.tool_choice": "tool_choice",
        "chat.required_tool": "tool_choice",
        "structural_tag": "tools",
    }

    messages: list[Message]
    max_completion_tokens: Int64 | None = None  # overrides max_tokens, its older name
    logprobs: bool = False
    top_logprobs: Int64 | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """vLLM's: the template's own switches, such as enable_thinking."""
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    tools: list[Tool] = Field([])
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedTool | ChosenTools, BeforeValidator(_tool_choice)
    ] = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid_argument("top_logprobs", f"{self.top_logprobs} requires logprobs=true")
        return self

    def sampling(self) -> common_pb2.SamplingParams:
        params = super().sampling()
        if self.max_completion_tokens is not None:
            params.max_tokens = self.max_completion_tokens
        if self.logprobs:
            params.logprobs = self.top_logprobs or 0
        return params

    def requests(self, label: str) -> list[generation_pb2.GenerateRequest]:
        variables, tools, choice = self._template_variables(), self.tools, self.tool_choice
        if isinstance(choice, ChosenTools):
            tools, choice = choice.of(tools), choice.allowed_tools.mode
        chat = {
            "messages": [message.on_wire() for message in self.messages],
            "template_variables": template_variables_on_wire(variables),
            "tools": [tool.function.on_wire() for tool in tools],
            "single_tool_call": not self.parallel_tool_calls,
        }
        if isinstance(choice, NamedTool):
            chat["required_tool"] = choice.function.name
        else:
            chat["tool_choice"] = _TOOL_CHOICES[choice]
        return [self._request(label, chat=chat)]

    def client_names(self) -> dict[str, str]:
        names = super().client_names()
        if self.tools:
            names.setdefault("request.sampling", "tools")
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def _template_variables(self) -> dict[str, Any]:
        """Templates that think read enable_thinking, others reasoning_effort, which knows no max."""
        effort = "xhigh" if self.reasoning_effort == "max" else self.reasoning_effort
        switches = {
            "reasoning_effort": effort,
            "enable_thinking": False if effort == "none" else None,
            "verbosity": self.verbosity,
        }
        return {name: value for name, value in switches.items() if value is not None} | self.chat_template_kwargs


class FrontBody(Body):
    """The body of another API for chats, as that of a chat."""

    @abstractmethod
    def chat(self) -> dict[str, Any]:
        """The body of /v1/chat/completions."""

    def requests(self, label: str) -> list[generation_pb2.GenerateRequest]:
        try:
            return ChatBody.model_validate(self.chat()).requests(label)
        except ValidationError as error:
            raise invalid_body(error) from None
