"""A chat: its tools and messages for the template, the constraint of its output, and its output divided again.

tools, tool_choice ─checked─┬─▶ the template's `tools`
                            ├─▶ SamplingParams.structural_tag, if calls are required or a tool is strict
                            └─▶ ChatOutput ─▶ a parser for each choice ─chunk by chunk─▶ GenerateResponse.delta

What a model thinks comes before its answer, so a constraint of the answer begins behind it.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import InvalidRequest, shown
from engine.sampling.constraints import CONSTRAINTS, MAX_CONSTRAINT_BYTES, check_constraint
from engine.sampling.json_schema import json_text, without_annotations
from engine.sampling.params import SamplingParams
from engine.sampling.structural_tag import CONTROL
from engine.text.channels import ChannelParser
from engine.text.chat_output import (
    HARMONY,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    THINK_BEGIN,
    THINK_END,
    THINK_GAP,
    ChatParser,
    ReasoningParser,
    ToolCallParser,
    ToolFormat,
)
from engine.text.chat_template import MAX_CONTAINERS, parsed_arguments, parsed_json, short_id, template_id
from protos.tandem.v1 import common_pb2, generation_pb2

MAX_TOOLS = 512
MAX_CALLS = 128
_SKIPPED_CHARS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_GAPS = ["".join(gap) for length in range(1, 5) for gap in itertools.product(" \n", repeat=length)]
_GAP: dict[str, Any] = {
    "type": "optional",
    "content": {"type": "or", "elements": [{"type": "const_string", "value": gap} for gap in _GAPS]},
}
"""Between the reasoning and JSON. Beside a regular expression the masks of JSON would be slow."""
_EXACT_GAP = {"type": "const_string", "value": THINK_GAP}
"""Before another constrained answer, which may begin with white space itself."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """A JSON schema; empty: any object."""
    is_strict: bool

    def for_template(self) -> dict[str, Any]:
        described = {"name": self.name, "description": self.description, "parameters": self.parameters or _ANY_OBJECT}
        return {"type": "function", "function": described}

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments, for a constraint: without its texts."""
        decides = {"type", "$ref", "anyOf", "oneOf", "allOf"}
        plain = without_annotations(self.parameters)
        return plain if decides & set(plain) else {**_ANY_OBJECT, **plain}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one chat, checked, and how they are to be used."""

    tools: tuple[Tool, ...]
    form: ToolFormat
    is_required: bool
    """The output is nothing but calls."""
    required_name: str
    """The one tool that may be called; empty: all."""
    is_single: bool

    @classmethod
    def of(cls, chat: generation_pb2.Chat, form: ToolFormat | None, *, single_calls: bool = False) -> Tools | None:
        """None if the chat has none, or none that may be called. `single_calls`: the model calls one at a time. Raises
        InvalidRequest."""
        if len(chat.tools) > MAX_TOOLS:
            raise InvalidRequest("chat.tools", f"{len(chat.tools)} tools", f"at most {MAX_TOOLS}")
        tools = tuple(_tool(tool, f"chat.tools[{index}]") for index, tool in enumerate(chat.tools))
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("chat.tools", "two tools have the same name", "a name for each")
        _check_choice(chat, names)
        if not tools or chat.tool_choice == generation_pb2.TOOL_CHOICE_NONE:
            return None
        if form is None:
            problem = "the model's chat template has no tools, or writes calls in a format that is not supported"
            raise InvalidRequest("chat.tools", problem, "no tools; or the router's setting router.tool_call_parser")
        is_named = bool(chat.required_tool)
        is_required = is_named or chat.tool_choice == generation_pb2.TOOL_CHOICE_REQUIRED
        is_single = chat.single_tool_call or is_named or single_calls
        return cls(tools, form, is_required, chat.required_tool, is_single)

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """`params` with the constraint that the tools require. Raises InvalidRequest."""
        params = msgspec.structs.replace(params, skip_special_tokens=False) if self.form.has_special_mark else params
        needs_constraint = self.is_required or any(tool.is_strict for tool in self.tools)
        if not needs_constraint and not params.is_constrained:
            return params
        tags = self._tags()
        calls = _calls(self.form, tags, is_single=self.is_single)
        if self.is_required:
            output = calls
        elif params.is_constrained:
            _check_beside_json(params)
            output = {"type": "or", "elements": [_as_format(params), calls]}
        else:
            output = _text_with_calls(self.form, tags, is_single=self.is_single)
        return _with_format(params, output)

    def _tags(self) -> list[dict[str, Any]]:
        """One for each tool that may be called. Raises InvalidRequest."""
        tags, num_bytes = list[dict[str, Any]](), len(_tag_text(_calls(self.form, [], is_single=self.is_single)))
        for index, tool in enumerate(self.tools):
            if self.required_name in ("", tool.name):
                tags.append(_tag(self.form, tool.name, self._schema(tool, index)))
                num_bytes += len(f"{json_text(tags[-1])}, ".encode())
            if num_bytes > MAX_CONSTRAINT_BYTES:
                problem = f"the constraint of the first {len(tags)} tools has more than {MAX_CONSTRAINT_BYTES} bytes"
                allowed = "fewer (tool_choice allowed_tools), or tool_choice auto without strict and response_format"
                raise InvalidRequest("chat.tools", problem, allowed)
        return tags

    def _schema(self, tool: Tool, index: int) -> dict[str, Any]:
        if not (tool.is_strict or self.is_required):
            return _ANY_OBJECT
        try:
            fields = {**dict.fromkeys(CONSTRAINTS), "json_object": False, "json_schema": json_text(tool.schema)}
            check_constraint(fields)
        except InvalidRequest as error:
            name = f"chat.tools[{index}].parameters"
            raise InvalidRequest(name, f"of {shown(tool.name)} {error.problem}", error.allowed) from None
        return tool.schema

    @property
    def names(self) -> set[str]:
        return {tool.name for tool in self.tools}

    @property
    def max_calls(self) -> int | None:
        return 1 if self.is_single else None

    def parser(self, *, is_constrained: bool) -> ChatParser:
        return ToolCallParser(
            self.form, self.names, max_calls=self.max_calls, is_forced=is_constrained, calls_only=self.is_required
        )


def _tool(tool: generation_pb2.Tool, field: str) -> Tool:
    if not _NAME.fullmatch(tool.name):
        raise InvalidRequest(f"{field}.name", f"{shown(tool.name)} is not a name", "1..128 of [A-Za-z0-9_.-]")
    try:
        parameters = parsed_json(tool.parameters) if tool.parameters else {}
    except (ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        problem = f"{shown(tool.parameters)} is not the JSON schema of an object"
        raise InvalidRequest(f"{field}.parameters", problem, f"at most {MAX_CONTAINERS} objects and lists in it")
    return Tool(tool.name, tool.description, parameters, tool.strict)


def _check_choice(chat: generation_pb2.Chat, names: list[str]) -> None:
    if chat.required_tool and chat.required_tool not in names:
        raise InvalidRequest("chat.required_tool", f"{shown(chat.required_tool)} is not in tools", ", ".join(names))
    if chat.required_tool and chat.tool_choice:
        raise InvalidRequest("chat.tool_choice", "is given together with required_tool", "one of them")
    if chat.tool_choice not in generation_pb2.ToolChoice.values():
        raise InvalidRequest("chat.tool_choice", f"{chat.tool_choice} is unknown", "0..3")
    if chat.tool_choice == generation_pb2.TOOL_CHOICE_REQUIRED and not names:
        raise InvalidRequest("chat.tool_choice", "requires a call, but there are no tools", "auto, none")


# Constraints: structural tags (engine/sampling/structural_tag.py)


_WRITTEN = {
    HERMES: ('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", "\n"),
    LLAMA3_JSON: ('{"name": "%s", "parameters": ', "}", "; "),
    MISTRAL: ('{"name": "%s", "arguments": ', "}", ", "),
    HARMONY: ('{"name": "%s", "parameters": ', "}", "; "),
}
"""What a constrained call has before and after its arguments, and between two calls."""


def _tag(form: ToolFormat, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    begin, end, _ = _WRITTEN[form]
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin % name, "content": content, "end": end}


def _calls(form: ToolFormat, tags: list[dict[str, Any]], *, is_single: bool) -> dict[str, Any]:
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": _WRITTEN[form][2],
        "at_least_one": True,
        "stop_after_first": is_single,
    }
    if not form.has_special_mark:
        return calls
    brackets = [{"type": "const_string", "value": value} for value in "[]"]
    return {"type": "sequence", "elements": [brackets[0], calls, brackets[1]]}


def _text_with_calls(form: ToolFormat, tags: list[dict[str, Any]], *, is_single: bool) -> dict[str, Any]:
    if form.has_special_mark or form.has_channels:
        problem = f"strict is not supported for calls in the format {form.name} that the model may make"
        raise InvalidRequest("chat.tools", problem, "strict=false, or tool_choice required or named")
    trigger = form.mark or _WRITTEN[form][0].partition("%s")[0]
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": is_single}


def _with_format(params: SamplingParams, form: dict[str, Any]) -> SamplingParams:
    """`params` with this constraint and no other."""
    unset = {**dict.fromkeys(CONSTRAINTS), "json_object": False}
    return msgspec.structs.replace(params, **{**unset, "structural_tag": _tag_text(form)})


def _tag_text(form: dict[str, Any]) -> str:
    return json_text({"type": "structural_tag", "format": form})


def _check_beside_json(params: SamplingParams) -> None:
    """What the compiled constraint would end in the middle. Structural tags have this check of their own."""
    for text in params.choice or ():
        if CONTROL.search(text):
            problem = f"{shown(text)} has control characters, which are excluded beside tools"
            raise InvalidRequest("choice", problem, "line feeds")


def _as_format(params: SamplingParams) -> dict[str, Any]:
    """The constraint of `params` as part of a structural tag, not yet translated for xgrammar: the tag is checked, too.
    Raises InvalidRequest."""
    constraint = params.constraint
    assert constraint is not None
    if constraint.kind == "json_schema":
        schema = _ANY_OBJECT if params.json_schema is None else json.loads(str(params.json_schema))
        return {"type": "json_schema", "json_schema": without_annotations(schema)}
    if constraint.kind == "structural_tag":
        other: dict[str, Any] = json.loads(str(params.structural_tag))["format"]
        return other
    if constraint.kind == "regex":
        return {"type": "regex", "pattern": params.regex}
    return {"type": "grammar", "grammar": constraint.source}


# The output


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """How the output of one chat is divided."""

    tools: Tools | None = None
    thinks: bool = False
    """Whether it may begin with reasoning."""
    is_thinking: bool = False
    """Whether the prompt ends in the middle of it."""
    is_exact: bool = False
    """Whether white space at the beginning of the answer belongs to it."""
    has_channels: bool = False
    """Whether it is messages in channels, unless it is constrained."""

    def __bool__(self) -> bool:
        return self.tools is not None or self.thinks or self.has_channels

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """`params` with the constraints that tools require, behind the reasoning. Raises InvalidRequest."""
        constrained = self._constrained(params)
        tag = constrained.structural_tag
        if isinstance(tag, str) and tag != params.structural_tag and (size := len(tag.encode())) > MAX_CONSTRAINT_BYTES:
            problem = f"has {size} bytes together with what tools and reasoning add to the constraint"
            raise InvalidRequest(self._constrained_by(params), problem, f"at most {MAX_CONSTRAINT_BYTES} bytes of both")
        return constrained

    def _constrained_by(self, params: SamplingParams) -> str:
        """The client's field in the constraint: of two the one that is not a tool's."""
        given = [name for name in CONSTRAINTS if getattr(params, name)]
        are_calls_alone = self.tools is not None and self.tools.is_required
        return given[0] if given and not are_calls_alone else "chat.tools"

    def _constrained(self, params: SamplingParams) -> SamplingParams:
        if self.tools is not None:
            params = self.tools.constrained(params)
        if self.has_channels and not params.is_constrained:
            return msgspec.structs.replace(params, skip_special_tokens=False)
        if not self.thinks or not params.is_constrained:
            return params
        begin = "" if self.is_thinking else THINK_BEGIN
        tag = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": THINK_END}
        reasoning = {"type": "sequence", "elements": [tag, _EXACT_GAP if self.is_exact else _GAP]}
        first = reasoning if self.is_thinking else {"type": "optional", "content": reasoning}
        return _with_format(params, {"type": "sequence", "elements": [first, _as_format(params)]})

    def parser(self, *, is_constrained: bool) -> ChatParser:
        if self.has_channels and (self.tools is None or not is_constrained):
            names, max_calls = ((), None) if self.tools is None else (self.tools.names, self.tools.max_calls)
            return ChannelParser(names, max_calls=max_calls, is_answer=is_constrained)
        rest = None if self.tools is None else self.tools.parser(is_constrained=is_constrained)
        if self.thinks:
            return ReasoningParser(rest, is_open=self.is_thinking, is_exact=self.is_exact)
        assert rest is not None, "a chat with neither tools nor reasoning is text"
        return rest


class ChatDeltas:
    """The deltas of one request's choices. Its caller passes each chunk once, in order."""

    def __init__(self, request_id: str, output: ChatOutput, *, is_constrained: bool) -> None:
        self._request_id = request_id
        self._output = output
        self._is_constrained = is_constrained
        self._parsers: dict[int, ChatParser] = {}

    def skip(self, choice: int, text: str) -> None:
        """The choice begins with `text`, whose deltas its client has already. In parts: a parser cuts mark by mark off
        what it holds, and a client can send the ids of as many marks as the context has."""
        for at in range(0, len(text), _SKIPPED_CHARS):
            self._parser(choice).push(text[at : at + _SKIPPED_CHARS], final=False)

    def of(self, chunk: common_pb2.TokenChunk) -> generation_pb2.ChatDelta:
        delta = self._parser(chunk.choice).push(chunk.text, final=chunk.HasField("finish"))
        message = generation_pb2.ChatDelta(content=delta.content, reasoning=delta.reasoning)
        for call in delta.tool_calls:
            # The request's own id is unguessable, and the same for all attempts.
            call_id = short_id(f"{self._request_id}/{chunk.choice}/{call.index}") if call.name else ""
            message.tool_calls.add(index=call.index, id=call_id, name=call.name, arguments=call.arguments)
        return message

    def _parser(self, choice: int) -> ChatParser:
        if choice not in self._parsers:
            self._parsers[choice] = self._output.parser(is_constrained=self._is_constrained)
        return self._parsers[choice]


# The template's messages


def template_messages(chat: generation_pb2.Chat, form: ToolFormat | None) -> list[dict[str, Any]]:
    """The messages in OpenAI's form, with arguments as objects. Raises InvalidRequest."""
    names: dict[str, str] = {}
    return [_message(message, f"chat.messages[{index}]", form, names) for index, message in enumerate(chat.messages)]


def _message(
    message: generation_pb2.ChatMessage, field: str, form: ToolFormat | None, names: dict[str, str]
) -> dict[str, Any]:
    """`names`: the tools of earlier calls by their ids."""
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        rendered["reasoning_content"] = message.reasoning
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidRequest(f"{field}.tool_calls", f"in a message of {shown(message.role)}", "role assistant")
        if len(message.tool_calls) > MAX_CALLS:
            raise InvalidRequest(f"{field}.tool_calls", f"{len(message.tool_calls)} calls", f"at most {MAX_CALLS}")
        names.update({call.id: call.name for call in message.tool_calls if call.id})
        rendered["tool_calls"] = [_call(call, form) for call in message.tool_calls]
    if message.role == "tool":
        if name := message.name or names.get(message.tool_call_id):
            rendered["name"] = name
        rendered["tool_call_id"] = template_id(message.tool_call_id, form)
    return rendered


def _call(call: generation_pb2.ToolCall, form: ToolFormat | None) -> dict[str, Any]:
    function = {"name": call.name, "arguments": parsed_arguments(call.arguments)}
    return {"id": template_id(call.id, form), "type": "function", "function": function}
