"""OpenAI's Responses API, stateless: its body as that of a chat, and its answer, whole or as events.

    ResponsesRequest ─▶ ChatBody ─▶ GenerateRequest ─▶ … GenerateResponse ─▶ Block ─▶ output items

An item of reasoning, a message or a function call is one block of the answer (blocks.py).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from engine.errors import shown
from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai.blocks import Block, BlocksBuilder, text_member
from router.api.openai.chat_messages import joined_parts
from router.api.openai.exchange import Exchange
from router.api.openai.requests import FrontBody, Int64, ReasoningEffort
from router.api.openai.strict_model import StrictModel
from router.dispatch.handler import RequestHandler
from serving.errors import invalid_argument


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(StrictModel):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Has no effect: reasoning comes as it is."""


_PARTS = ("input_text", "output_text", "text")
_Input = str | list[dict[str, Any]]


def _named(value: Any) -> Any:
    """The tool choice of a chat."""
    if isinstance(value, dict) and value.get("type") == "function" and set(value) == {"type", "name"}:
        return {"type": "function", "function": {"name": value["name"]}}
    return value


class ResponsesRequest(FrontBody):
    """The body of /v1/responses."""

    renamed: ClassVar = {
        "prompt": "input", "messages": "input", "messages[": "input", "chat.messages": "input",
        "chat.messages[": "input", "chat.tools": "tools", "tools": "tools", "chat.tool_choice": "tool_choice",
        "chat.required_tool": "tool_choice", "max_tokens": "max_output_tokens", "response_format": "text",
        "json_schema": "text", "structural_tag": "tools", "session": "prompt_cache_key",
    }  # fmt: skip
    ignored: ClassVar = frozenset({
        "include", "max_tool_calls", "metadata", "safety_identifier", "service_tier", "store", "stream_options", "user",
    })  # fmt: skip
    """Nothing is stored, whatever `store` says."""

    input: Annotated[_Input, Field(min_length=1)]
    instructions: str = ""
    max_output_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Annotated[Any, BeforeValidator(_named)] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    prompt_cache_key: str = ""
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _is_stateless(cls, given: Any) -> Any:
        for name in ("previous_response_id", "conversation", "prompt"):
            if isinstance(given, dict) and given.get(name) is not None:
                raise invalid_argument(name, "is not supported: nothing is stored", "the whole conversation as input")
        return given

    def chat(self) -> dict[str, Any]:
        form = self.text.format
        schema = {"name": form.name, "schema": form.json_schema or {}}
        chat = {
            "model": self.model,
            "stream": self.stream,
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_function(tool) for tool in self.tools],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "prompt_cache_key": self.prompt_cache_key,
            "response_format": {"type": form.type, **({"json_schema": schema} if form.type == "json_schema" else {})},
        }
        return {name: value for name, value in chat.items() if value is not None}

    def _messages(self) -> list[dict[str, Any]]:
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for index, item in enumerate(items):
            _add_item(messages, item, f"input[{index}]")
        return [message for message in messages if set(message) != {"role", "reasoning_content"}]


def _function(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], field: str) -> None:
    """Adds an item to the messages; reasoning, text and calls of one answer become one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match item.get("type", "message"):
        case "message":
            message = {"role": text_member(item, "role", field), "content": _text(item, "content", field)}
            if last is not None and message["role"] == "assistant" and "content" not in last:
                last.update(message)
            else:
                messages.append(message)
        case "function_call":
            function = {"name": text_member(item, "name", field), "arguments": text_member(item, "arguments", field)}
            call = {"id": text_member(item, "call_id", field), "function": function}
            if last is None:
                messages.append(last := {"role": "assistant"})
            last.setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = _text(item, "output", field)
            messages.append({"role": "tool", "tool_call_id": text_member(item, "call_id", field), "content": output})
        case "reasoning":
            thought = _text({"content": item.get("content") or ""}, "content", field, ("reasoning_text",))
            messages.append({"role": "assistant", "reasoning_content": thought})
        case other:
            kinds = "message, function_call, function_call_output, reasoning"
            raise invalid_argument(f"{field}.type", f"{shown(other)} is not supported", kinds)


def _text(item: dict[str, Any], name: str, field: str, kinds: Collection[str] = _PARTS) -> str:
    """A string among an item's members, or that of its parts."""
    return text_member({name: joined_parts(item.get(name), "input", kinds)}, name, field)


class ResponsesBuilder(BlocksBuilder[ResponsesRequest]):
    """The answer to one request, whole or as events."""

    def __init__(self, exchange: Exchange, body: ResponsesRequest, model: str) -> None:
        super().__init__(exchange, body, model)
        self._id = f"resp_{exchange.request_id}"
        self._created = int(time.time())
        self._num_thinking = self._sequence = 0

    async def add(self, prompt_index: int, call: RequestHandler, message: generation_pb2.GenerateResponse) -> None:
        await super().add(prompt_index, call, message)
        if self._blocks and self._blocks[-1].kind == "reasoning":
            self._num_thinking = self._num_tokens

    async def finish(self, headers: Mapping[str, str]) -> None:
        status = _STATUSES[self._finish.reason]
        response = self._response(status)
        if not self._body.stream:
            await self._exchange.send_json(response, headers)
            return
        await self._close()
        # OpenAI has no event response.cancelled, and clients read response.incomplete without a reason as complete.
        await self._send("response.failed" if status == "cancelled" else f"response.{status}", response=response)
        await self._exchange.end_events(None)

    # Events

    async def _send(self, kind: str, **members: Any) -> None:
        event = {"type": kind, "sequence_number": self._sequence, **members}
        self._sequence += 1
        await self._exchange.send_event(msgspec.json.encode(event), kind)

    async def _send_begin(self) -> None:
        await self._send("response.created", response=self._response("in_progress"))
        await self._send("response.in_progress", response=self._response("in_progress"))

    async def _send_open(self, empty: Block) -> None:
        item = self._item(empty, "in_progress")
        if empty.kind != "call":
            item["content"] = []
        await self._send("response.output_item.added", output_index=empty.index, item=item)
        if empty.kind == "text":
            await self._send("response.content_part.added", **self._place(empty), part=_text_part(""))

    async def _send_added(self, block: Block, added: str) -> None:
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        await self._send(f"response.{_EVENTS[block.kind]}.delta", **self._place(block), delta=added, **more)

    async def _send_close(self, block: Block) -> None:
        done = f"response.{_EVENTS[block.kind]}.done"
        if block.kind == "call":
            await self._send(done, **self._place(block), arguments=block.text, name=block.name)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            await self._send(done, **self._place(block), text=block.text, **more)
        if block.kind == "text":
            await self._send("response.content_part.done", **self._place(block), part=_text_part(block.text))
        await self._send("response.output_item.done", output_index=block.index, item=self._item(block))

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    # Objects

    def _item_id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self._exchange.request_id}_{block.index}"

    def _item(self, block: Block, status: str = "") -> dict[str, Any]:
        """`status` "": that of a block that has ended."""
        is_cut = self._finish.reason in _CUT and block is self._blocks[-1]
        status = status or ("incomplete" if is_cut else "completed")
        item_id = self._item_id(block)
        if block.kind == "call":
            named = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", "id": item_id, **named, "status": status}
        if block.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": block.text}]
            return {"type": "reasoning", "id": item_id, "summary": [], "content": content}
        message = {"role": "assistant", "status": status, "content": [_text_part(block.text)]}
        return {"type": "message", "id": item_id, **message}

    def _response(self, status: str) -> dict[str, Any]:
        body, form = self._body, self._body.text.format
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        is_last = status != "in_progress"
        schema = {"name": form.name, "schema": form.json_schema} if form.type == "json_schema" else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": [self._item(block) for block in self._blocks] if is_last else [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": form.type, **schema}},
            "tool_choice": _unnamed(body.tool_choice),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_last else None,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": self._finish.usage.cached_tokens},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_thinking},
            "total_tokens": self._num_prompt + self._num_tokens,
        }


_STATUSES = {
    common_pb2.FINISH_REASON_STOP: "completed",
    common_pb2.FINISH_REASON_LENGTH: "incomplete",
    common_pb2.FINISH_REASON_ABORT: "cancelled",
}
_CUT = (common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_ABORT)
_EVENTS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _unnamed(choice: Any) -> Any:
    return {"type": "function", "name": choice["function"]["name"]} if isinstance(choice, dict) else choice
