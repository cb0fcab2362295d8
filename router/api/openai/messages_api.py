"""Anthropic's Messages API: its body as that of a chat, and its answer, whole or as events.

    MessagesRequest ─▶ ChatBody ─▶ GenerateRequest ─▶ … GenerateResponse ─▶ Block ─▶ content blocks

A content block (thinking, text, tool_use) is one block of the answer (blocks.py). Errors have Anthropic's form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import msgspec
from pydantic import Field, model_validator

from engine.errors import shown
from engine.text.chat_output import Brackets
from engine.text.chat_template import loads_unicode
from protos.tandem.v1 import common_pb2
from router.api.openai.blocks import Block, BlocksBuilder
from router.api.openai.chat_messages import joined_parts, text_member
from router.api.openai.exchange import Exchange, body_of, status_of
from router.api.openai.requests import FrontBody, Int64
from router.api.openai.strict_model import StrictModel
from serving.errors import Aborted, ServiceError, invalid_argument

_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def _error_type(status: int) -> str:
    """Other 4xx have Anthropic's first type, as documented there."""
    return _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")


class MessagesExchange(Exchange):
    """One request of this API."""

    def error_body(self, error: ServiceError) -> dict[str, Any]:
        body = body_of(error, self.renamed)["error"]
        described = {"type": _error_type(status_of(error)), "message": body["message"]}
        if body["param"] == "thread":
            described["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": described, "request_id": self.request_id}

    def last_headers(self) -> dict[str, str]:
        return {**super().last_headers(), "request-id": self.request_id}

    def sign_of_life(self) -> bytes:
        return b'event: ping\ndata: {"type": "ping"}\n\n'

    async def send_failure(self, body: dict[str, Any]) -> None:
        await self.send_event(msgspec.json.encode(body), "error")
        await self.end_events(None)


_BILLING_HEADER = "x-anthropic-billing-header:"
"""Claude Code's first line of `system`, for Anthropic alone. It is another one in each request: in the prompt it would
keep every block from the prefix cache."""


class AnthropicTool(StrictModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    """Has no effect: prefixes are always cached."""
    eager_input_streaming: bool | None = None
    """Has no effect: arguments are always sent as they are written."""
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: list[dict[str, Any]] | None = None
    """Has no effect: templates have no place for them."""


class AnthropicToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != bool(self.name):
            raise invalid_argument("tool_choice.name", "belongs to type tool, and is required there")
        return self


class Thinking(StrictModel):
    """The template's switch enable_thinking."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int64 | None = None
    """Has no effect."""
    display: str | None = None


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The template's variable reasoning_effort."""


class AnthropicMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountTokensRequest(FrontBody):
    """The body of /v1/messages/count_tokens: what makes a prompt."""

    renamed: ClassVar = {
        "prompt": "messages", "chat.messages": "messages", "chat.messages[": "messages", "chat.tools": "tools",
        "chat.tool_choice": "tool_choice", "chat.required_tool": "tool_choice", "stop": "stop_sequences",
        "structural_tag": "tools", "response_format": "output_config.format", "json_schema": "output_config.format",
    }  # fmt: skip
    ignored: ClassVar = frozenset({
        "betas", "cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier",
        "speed",
    })  # fmt: skip
    """Whatever `context_management` says, all messages stay in the prompt."""

    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[dict[str, Any]] = ""
    tools: list[AnthropicTool] = Field(default_factory=list)
    tool_choice: AnthropicToolChoice = AnthropicToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    @classmethod
    def _supported(cls, members: dict[str, Any]) -> dict[str, Any]:
        """The beta client sends the whole conversation when it reads the error's details."""
        if "thread" in members:
            raise invalid_argument(
                "thread", "is not supported: nothing is stored", "the whole conversation as messages"
            )
        return members

    def client_names(self) -> dict[str, str]:
        name = "tools" if self.output_config.format is None else "output_config.format"
        return {**self.renamed, "request.sampling": name}

    def chat(self) -> dict[str, Any]:
        system = _without_billing_header(joined_parts(self.system, "system"))
        messages = [{"role": "system", "content": system}] if system else []
        for index, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{index}]")
        chat: dict[str, Any] = {"model": self.model, "stream": self.stream, "messages": messages}
        if self.tools or self.tool_choice.type in ("any", "tool"):
            chat["tools"] = [_function(tool) for tool in self.tools]
            chat["tool_choice"] = _tool_choice(self.tool_choice)
            chat["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if (form := self.output_config.format) is not None:
            chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.json_schema}}
        if (effort := self.output_config.effort) is not None:
            chat["reasoning_effort"] = effort
        if self.thinking is not None and self.thinking.type != "adaptive":
            chat["chat_template_kwargs"] = {"enable_thinking": self.thinking.type == "enabled"}
        return chat


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages."""

    max_tokens: Int64
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    stop_sequences: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_last(self) -> Self:
        if self.messages[-1].role == "assistant":
            problem = "the last one is of role assistant: continuing it is not supported"
            raise invalid_argument("messages", problem, "a user's message as the last one")
        return self

    def chat(self) -> dict[str, Any]:
        sampling = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        return {**super().chat(), **sampling, "stop": self.stop_sequences}


def _without_billing_header(system: str) -> str:
    return system.partition("\n")[2] if system.startswith(_BILLING_HEADER) else system


def _function(tool: AnthropicTool) -> dict[str, Any]:
    members = tool.model_dump(include={"name", "description", "strict"})
    return {"type": "function", "function": {**members, "parameters": tool.input_schema}}


def _tool_choice(choice: AnthropicToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


_BLOCKS = {"user": "text, tool_result", "assistant": "text, thinking, tool_use", "system": "text"}


def _messages(message: AnthropicMessage, field: str) -> list[dict[str, Any]]:
    """A message of content blocks as messages of a chat: results of tools come before a user's text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts, calls, results, thoughts = list[str](), list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
    for index, block in enumerate(message.content):
        where = f"{field}.content[{index}]"
        match (message.role, block.get("type")):
            case (_, "text"):
                texts.append(text_member(block, "text", where))
            case ("assistant", "tool_use"):
                arguments = json.dumps(block.get("input", {}))
                function = {"name": text_member(block, "name", where), "arguments": arguments}
                calls.append({"id": text_member(block, "id", where), "function": function})
            case ("user", "tool_result"):
                call_id = text_member(block, "tool_use_id", where)
                results.append({"role": "tool", "tool_call_id": call_id, "content": _result(block, where)})
            case ("assistant", "thinking"):
                thoughts.append(text_member(block, "thinking", where))
            case ("assistant", "redacted_thinking"):
                pass
            case (_, other):
                raise invalid_argument(f"{where}.type", f"{shown(other)} is not supported", _BLOCKS[message.role])
    rest: dict[str, Any] = {"role": message.role, "content": ("" if calls else "\n").join(texts)}
    if calls:
        rest["tool_calls"] = calls
    if thoughts:
        rest["reasoning_content"] = "\n".join(thoughts)
    return results if results and not texts else [*results, rest]


def _result(block: dict[str, Any], where: str) -> str:
    text = text_member({"content": joined_parts(block.get("content") or "", where)}, "content", where)
    if block.get("is_error") is not True or text.startswith("Error:"):
        return text
    return f"Error: {text}" if text else "Error"


class MessagesBuilder(BlocksBuilder[MessagesRequest]):
    """The answer to one request, whole or as events."""

    async def finish(self, headers: Mapping[str, str]) -> None:
        """Raises Aborted for an aborted answer: none of Anthropic's stop reasons says that."""
        if self._finish.reason == common_pb2.FINISH_REASON_ABORT:
            raise Aborted("the request was aborted")
        if not self._body.stream:
            content = [_content(block) for block in self._blocks]
            await self._exchange.send_json({**self._message(content), **self._end()}, headers)
            return
        await self._close()
        await self._send("message_delta", delta=self._end(), usage=self._usage())
        await self._send("message_stop")
        await self._exchange.end_events(None)

    async def _send(self, kind: str, **members: Any) -> None:
        await self._exchange.send_event(msgspec.json.encode({"type": kind, **members}), kind)

    async def _send_begin(self) -> None:
        await self._send("message_start", message=self._message([]))

    async def _send_open(self, empty: Block) -> None:
        await self._send("content_block_start", index=empty.index, content_block=_content(empty))

    async def _send_added(self, block: Block, added: str) -> None:
        kind, member = _DELTAS[block.kind]
        await self._send("content_block_delta", index=block.index, delta={"type": kind, member: added})

    async def _send_close(self, block: Block) -> None:
        await self._send("content_block_stop", index=block.index)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._exchange.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _end(self) -> dict[str, str | None]:
        finish = self._finish
        if finish.reason != common_pb2.FINISH_REASON_STOP:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        calls = [block.text for block in self._blocks if block.kind == "call"]
        is_whole = bool(calls) and Brackets().find_end(calls[-1], 0, "") is not None
        if finish.HasField("stop_string") and not is_whole:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_string}
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Anthropic counts cached tokens apart."""
        num_cached = self._finish.usage.cached_tokens
        return {
            "input_tokens": self._num_prompt - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._num_tokens,
        }


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case _:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments that are no JSON object, as those that max_tokens has cut, are wrapped as Anthropic advises."""
    try:
        parsed = loads_unicode(arguments or "{}")
        json.dumps(parsed, allow_nan=False)  # raises ValueError for what JSON lacks, and would be null
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"INVALID_JSON": arguments}
