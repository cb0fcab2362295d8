"""OpenAI's Responses API, stateless: its body as that of a chat, and its answer, whole or as events.

    ResponsesRequest ─▶ ChatBody ─▶ GenerateRequest ─▶ … GenerateResponse ─▶ Block ─▶ output items

An item of reasoning, a message or a function call is one block of the answer (blocks.py).
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field

from engine.errors import shown
from engine.text.channels import HEAD_END, MESSAGE_END
from engine.text.chat_output import HERMES, THINK_END
from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai.blocks import Block, BlocksBuilder
from router.api.openai.chat_messages import joined_parts, text_member
from router.api.openai.exchange import Exchange
from router.api.openai.requests import CommonParameters, FrontBody, Int64, JsonSchemaFormat, ReasoningEffort, Verbosity
from router.api.openai.responses import TokenTexts, candidates_of, chat_logprobs
from router.api.openai.responses_tools import ResponsesTool, ToolChoice, ToolName, functions_of, tools_in_chat
from router.api.openai.strict_model import StrictModel
from router.dispatch.handler import RequestHandler
from serving.errors import invalid_argument


class TextFormat(JsonSchemaFormat):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""


class TextOptions(StrictModel):
    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))
    verbosity: Verbosity | None = None


class ReasoningOptions(StrictModel):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Has no effect: reasoning comes as it is."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of `summary`."""
    context: Literal["auto", "current_turn"] | None = None
    """Has no effect: the template decides which earlier reasoning is in the prompt."""
    mode: Literal["standard"] | None = None


_PARTS = ("input_text", "output_text", "text", "refusal")
_LOGPROBS = "message.output_text.logprobs"
_KEPT_TOKENS = 64


def _items(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        return value
    raise invalid_argument("input", f"{shown(value)} is no input", "a text, or a list of items, which are objects")


class ResponsesRequest(CommonParameters, FrontBody):
    """The body of /v1/responses."""

    renamed: ClassVar = {
        "prompt": "input", "messages": "input", "messages[": "input", "chat.messages": "input",
        "chat.messages[": "input", "chat.tools": "tools", "chat.tools[": "tools", "tools": "tools",
        "chat.tool_choice": "tool_choice",
        "chat.required_tool": "tool_choice", "max_tokens": "max_output_tokens", "response_format": "text",
        "json_schema": "text", "structural_tag": "tools", "session": "prompt_cache_key",
    }  # fmt: skip
    ignored: ClassVar = frozenset({
        "access_programs", "client_metadata", "context_management", "max_tool_calls", "metadata",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
        "stream_options", "user",
    })  # fmt: skip
    """Nothing is stored, whatever `store` says; whatever `context_management` says, all items stay in the prompt."""

    input: Annotated[str | list[dict[str, Any]], Field(min_length=1), BeforeValidator(_items)]
    instructions: str = ""
    max_output_tokens: Int64 | None = None
    tools: list[ResponsesTool] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    truncation: Literal["auto", "disabled"] = "disabled"
    """Has no effect: an input that does not fit into the context is rejected."""
    include: list[str] = Field(default_factory=list)
    """Of what it may name, only log-probabilities exist here."""
    top_logprobs: Int64 | None = Field(None, ge=0, le=20)
    background: Literal[False] = False

    @classmethod
    def _supported(cls, members: dict[str, Any]) -> dict[str, Any]:
        for name in ("previous_response_id", "conversation", "prompt"):
            if name in members:
                raise invalid_argument(name, "is not supported: nothing is stored", "the whole conversation as input")
        return members

    @property
    def has_logprobs(self) -> bool:
        return self.top_logprobs is not None or _LOGPROBS in self.include

    def client_names(self) -> dict[str, str]:
        name = "tools" if self.text.format.type == "text" and self.tools else "text"
        return {**self.renamed, "request.sampling": name}

    def chat(self) -> dict[str, Any]:
        form = self.text.format
        schema = {"name": form.name, "schema": form.json_schema or {}}
        chat = {
            "model": self.model,
            "stream": self.stream,
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "tools": tools_in_chat(self.tools),
            "tool_choice": self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.in_chat(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.verbosity,
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs,
            **{name: getattr(self, name) for name in CommonParameters.model_fields},
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


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], field: str) -> None:
    """Adds an item to the messages; reasoning, text and calls of one answer become one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match kind := _kind(item):
        case "message":
            role, text = text_member(item, "role", field), _text(item, "content", field)
            if last is not None and role == "assistant" and ("content" not in last or "tool_calls" in last):
                last["content"] = last.get("content", "") + text
            else:
                messages.append({"role": role, "content": text})
        case "function_call":
            namespace = text_member({"namespace": item.get("namespace") or ""}, "namespace", field)
            name = ToolName(namespace, text_member(item, "name", field))
            function = {"name": name.in_chat(), "arguments": text_member(item, "arguments", field)}
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
        case "item_reference":
            problem = f"{shown(kind)} is not supported: nothing is stored"
            raise invalid_argument(f"{field}.type", problem, "the item itself (of clients: the option store=false)")
        case other:
            kinds = "message, function_call, function_call_output, reasoning"
            raise invalid_argument(f"{field}.type", f"{shown(other)} is not supported", kinds)


def _kind(item: dict[str, Any]) -> Any:
    """Messages and references may have no type."""
    if (kind := item.get("type")) is not None:
        return kind
    return "item_reference" if {name for name, value in item.items() if value is not None} == {"id"} else "message"


def _text(item: dict[str, Any], name: str, field: str, kinds: Collection[str] = _PARTS) -> str:
    """A string among an item's members, or that of its parts."""
    return text_member({name: joined_parts(item.get(name), "input", kinds)}, name, field)


class ResponsesExchange(Exchange):
    """One request of this API."""

    async def send_failure(self, body: dict[str, Any]) -> None:
        """OpenAI's event, and `error`, without which its Python client would go on."""
        error = body["error"]
        members = {name: error[name] for name in ("code", "message", "param")}
        event = {"type": "error", "sequence_number": self.num_events, **members, "error": error}
        await self.send_event(msgspec.json.encode(event), "error")
        await self.end_events(None)


class ResponsesBuilder(BlocksBuilder[ResponsesRequest]):
    """The answer to one request, whole or as events."""

    def __init__(self, exchange: Exchange, body: ResponsesRequest, model: str, texts: TokenTexts) -> None:
        super().__init__(exchange, body, model)
        self._texts = texts
        self._tool_names = {name.in_chat(): name for name, _ in functions_of(body.tools)}
        self._pending: list[dict[str, Any]] = []
        """Log-probabilities of tokens that may be of a text that has not come yet."""
        self._logprobs: list[dict[str, Any]] = []
        """Of the part of a text that is sent."""
        self._id = f"resp_{exchange.answer_id}"
        self._created = int(time.time())
        self._num_thinking = self._num_between = 0
        self._is_thought_over = False
        self._behind_thought: list[bytes] = []
        """The tokens since the last reasoning, those of its message too, up to the mark that ends it."""

    async def add(self, prompt_index: int, call: RequestHandler, message: generation_pb2.GenerateResponse) -> None:
        await super().add(prompt_index, call, message)
        if message.delta.reasoning:
            self._behind_thought.clear()
            if self._is_thought_over:  # a model that writes into channels thinks again
                self._num_between = self._num_tokens - len(message.tokens.token_ids) - self._num_thinking
        elif not self._num_thinking or self._is_thought_over:
            return
        self._count_thinking(message)

    def _count_thinking(self, message: generation_pb2.GenerateResponse) -> None:
        """Counts the tokens up to the mark, behind which a message may have the answer's. White space may go on for as
        long as the context: the last tokens have the beginning of a mark."""
        del self._behind_thought[:-_KEPT_TOKENS]
        self._behind_thought += map(self._texts.data_or_text, message.tokens.token_ids)
        end, ends = _END.search(b"".join(self._behind_thought)), list(accumulate(map(len, self._behind_thought)))
        num_behind = len(ends) - 1 - bisect_left(ends, end.end()) if end is not None else 0
        self._num_thinking = self._num_tokens - self._num_between - num_behind
        self._is_thought_over = end is not None or bool(message.delta.content or message.delta.tool_calls)

    def _added(self, message: generation_pb2.GenerateResponse) -> Iterator[tuple[Block, str]]:
        new: list[dict[str, Any]] = []
        if self._body.has_logprobs:
            positions = candidates_of(message.tokens.logprobs)
            new = chat_logprobs(self._texts, positions, self._body.top_logprobs or 0)["content"]
        self._pending += new
        for block, added in super()._added(message):
            if block.kind == "text":
                own = slice(None)
                if self._pending and message.HasField("delta"):
                    own = _own(self._pending, added, is_first=block.text == added)
                self._logprobs, self._pending = self._pending[own], self._pending[own.stop or len(self._pending) :]
                block.logprobs += self._logprobs
            else:  # a text behind it begins with a token of this message at the earliest
                self._pending = self._pending[max(0, len(self._pending) - len(new)) :]
            yield block, added

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
        event = {"type": kind, "sequence_number": self._exchange.num_events, **members}
        await self._exchange.send_event(msgspec.json.encode(event), kind)

    async def _send_begin(self) -> None:
        await self._send("response.created", response=self._response("in_progress"))
        await self._send("response.in_progress", response=self._response("in_progress"))

    async def _send_open(self, empty: Block) -> None:
        item = self._item(empty, "in_progress")
        if empty.kind != "call":
            item["content"] = []
        await self._send("response.output_item.added", output_index=empty.index, item=item)
        if empty.kind != "call":
            await self._send("response.content_part.added", **self._place(empty), part=self._part(empty))

    async def _send_added(self, block: Block, added: str) -> None:
        more: dict[str, Any] = {"logprobs": self._logprobs} if block.kind == "text" else {}
        await self._send(f"response.{_EVENTS[block.kind]}.delta", **self._place(block), delta=added, **more)

    async def _send_close(self, block: Block) -> None:
        done = f"response.{_EVENTS[block.kind]}.done"
        if block.kind == "call":
            await self._send(done, **self._place(block), arguments=block.text, name=self._tool_name(block).name)
        else:
            more: dict[str, Any] = {"logprobs": block.logprobs} if block.kind == "text" else {}
            await self._send(done, **self._place(block), text=block.text, **more)
            await self._send("response.content_part.done", **self._place(block), part=self._part(block))
        await self._send("response.output_item.done", output_index=block.index, item=self._item(block))

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    # Objects

    def _item_id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self._exchange.answer_id}_{block.index}"

    def _item(self, block: Block, status: str = "") -> dict[str, Any]:
        """`status` "": that of a block that has ended."""
        is_cut = self._finish.reason in _CUT and block is self._blocks[-1]
        status = status or ("incomplete" if is_cut else "completed")
        item_id = self._item_id(block)
        if block.kind == "call":
            namespace, name = self._tool_name(block)
            within = {"namespace": namespace} if namespace else {}
            called = {"call_id": block.call_id, "name": name, **within, "arguments": block.text}
            return {"type": "function_call", "id": item_id, **called, "status": status}
        if block.kind == "reasoning":
            thought = {"summary": [], "content": [self._part(block)]}
            return {"type": "reasoning", "id": item_id, **thought, "status": status}
        message = {"role": "assistant", "status": status, "content": [self._part(block)]}
        return {"type": "message", "id": item_id, **message}

    def _tool_name(self, block: Block) -> ToolName:
        """The model may call what is not among the tools."""
        return self._tool_names.get(block.name, ToolName("", block.name))

    def _part(self, block: Block) -> dict[str, Any]:
        """Of an item of reasoning or a message: its only one."""
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        more = {"logprobs": block.logprobs} if self._body.has_logprobs else {}
        return {"type": "output_text", "text": block.text, "annotations": [], **more}

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
            "tool_choice": body.model_dump(include={"tool_choice"}, exclude_unset=True).get("tool_choice", "auto"),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": self._usage() if is_last else None,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": self._finish.usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_thinking},
            "total_tokens": self._num_prompt + self._num_tokens,
        }


def _own(entries: Sequence[Mapping[str, Any]], text: str, *, is_first: bool) -> slice:
    """Which tokens are those of `text`, the next part of a text; one that is of it in part is its own. Before the first
    part are marks, reasoning and calls, behind each part calls and what is held back."""
    data, part = list(map(_data, entries)), text.encode()
    whole, ends = b"".join(data), list(accumulate(map(len, data)))
    begin = whole.rfind(_HEAD_END + part)
    if begin >= 0:  # a message in a channel
        begin, is_first = begin + len(_HEAD_END), True
    else:
        begin = _OTHERS.sub(lambda found: bytes(len(found[0])), whole).find(part)
    if begin < 0:  # what looks like a call may be text
        begin = whole.rfind(part)
    end = begin + len(part)
    if begin < 0:  # the texts of single tokens are not always those of the output
        begin, end = len(whole) - len(part), len(whole)
    return slice(bisect_right(ends, begin) if is_first and begin > 0 else 0, bisect_left(ends, end) + 1)


def _data(entry: Mapping[str, Any]) -> bytes:
    """A token's bytes, or those of its text where the vocabulary has none."""
    return entry["token"].encode() if entry["bytes"] is None else bytes(entry["bytes"])


_END = re.compile(b"%b|%b" % (THINK_END.encode(), re.escape(MESSAGE_END).encode()))
_HEAD_END, _CALL, _CALL_END = HEAD_END.encode(), HERMES.mark.encode(), HERMES.end.encode()
_OTHERS = re.compile(rb"\A.*?%b|(?:\A|%b)(?:(?!%b).)*?%b" % (THINK_END.encode(), _CALL, _CALL, _CALL_END), re.DOTALL)
"""Reasoning and calls, the first of which may have begun before."""
_STATUSES = {
    common_pb2.FINISH_REASON_STOP: "completed",
    common_pb2.FINISH_REASON_LENGTH: "incomplete",
    common_pb2.FINISH_REASON_ABORT: "cancelled",
}
_CUT = (common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_ABORT)
_EVENTS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
