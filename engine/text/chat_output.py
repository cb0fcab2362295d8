"""What a model's output to a chat is divided into, piece by piece: reasoning, content and tool calls.

What a model thinks before it answers is the text between <think> and </think> at the beginning of its output:

    start ─<think>, or the prompt ends with it─▶ thinking ─</think>─▶ rest, for the parser of tool calls if there is one
      └─anything else──────────────────────────────────────────────▶ rest

White space around both marks is dropped; before an exact answer, whose own white space counts, THINK_GAP alone.

Families of models write tool calls in their own ways:

    text ─mark─▶ head ─name known─▶ arguments ─their object closes─▶ rest of the call ─▶ tail ─┬─separator─▶ head
     ▲            ├─another object─▶ whole call, parsed at the next mark, or content          ├─ max_calls ─▶ done
     │            └─anything else─▶ content                                                   │
     └────────────────────────────────────────────────────────────────────────────────────────┘

    hermes        <tool_call>{"name": "f", "arguments": {…}}</tool_call>, text around it     Hermes, Qwen
    llama3_json   {"name": "f", "parameters": {…}}; {…}, with nothing before it              Llama 3
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {…}}, …] or [TOOL_CALLS]f{…}        Mistral
    harmony       messages in channels, see engine/text/channels.py                          gpt-oss

The result is a function of the text alone, however it is divided into pieces: an instance that continues the output of
another one continues its reasoning and its calls. Arguments are delivered as they are written, valid or not. What
begins like a call and is none is content; white space between calls is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

THINK_BEGIN, THINK_END = "<think>", "</think>"
THINK_GAP = "\n\n"
"""What models write between THINK_END and the answer."""
_MAX_NAME_CHARS = 256
SPACE = r"\s{0,64}"
_OBJECT = r"(?=\{)"


class Pattern:
    """A regular expression in pieces, which also recognises the beginnings of its matches."""

    def __init__(self, *pieces: str) -> None:
        self._whole = re.compile("".join(pieces))
        beginning = ""
        for piece in reversed(pieces):
            beginning = f"(?:{piece}{beginning})?"
        self._beginning = re.compile(beginning)

    def match(self, text: str) -> re.Match[str] | None:
        return self._whole.match(text)

    def may_match(self, text: str) -> bool:
        """Whether `text` may become a match with more text."""
        return self._beginning.fullmatch(text) is not None


def literal(text: str) -> tuple[str, ...]:
    """The pieces of a `Pattern` that match this text."""
    return tuple(re.escape(char) for char in text)


def _member(name: str) -> tuple[str, ...]:
    return (*literal(f'"{name}"'), SPACE, ":", SPACE)


def _head(arguments: str, *, before: str = "", kind: tuple[str, ...] = ()) -> Pattern:
    """The beginning of a call's object, up to its arguments."""
    name = (*_member("name"), '"', rf'(?P<name>[^"\\]{{1,{_MAX_NAME_CHARS}}})', '"', SPACE, ",", SPACE)
    return Pattern(SPACE, *literal(before), SPACE, r"\{", SPACE, *kind, *name, *_member(arguments), _OBJECT)


def _bare_head(*after: str) -> Pattern:
    """A name, and behind it the arguments."""
    return Pattern(SPACE, rf"(?P<bare>[\w.-]{{1,{_MAX_NAME_CHARS}}})", *after, SPACE, _OBJECT)


@dataclass(frozen=True, slots=True, eq=False)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: str
    mark: str
    """Before the first call; "": calls are the beginning of the output."""
    arguments: str
    """The member of a call that has its arguments."""
    heads: tuple[Pattern, ...]
    tails: tuple[Pattern, ...]
    """What may follow a call: a separator, with which the next call begins, or an end."""
    end: str = ""
    """The mark after each call."""
    has_special_mark: bool = False
    """`mark` is a special token: without text by default, and excluded by every constraint."""
    has_channels: bool = False
    """Calls are messages of their own (engine/text/channels.py). Only where a constraint requires calls are they
    objects as here."""


_KIND = (*_member("type"), *literal('"function"'), SPACE, ",", SPACE)
_ARGS = literal("[ARGS]")
HERMES = ToolFormat(
    "hermes", "<tool_call>", "arguments", (_head("arguments"),), (Pattern(SPACE, *literal("</tool_call>")),),
    end="</tool_call>",
)  # fmt: skip
LLAMA3_JSON = ToolFormat(
    "llama3_json", "", "parameters", (_head("parameters"), _head("parameters", kind=_KIND)),
    (Pattern(SPACE, "(?P<separator>;)", SPACE, _OBJECT),),
)  # fmt: skip
MISTRAL = ToolFormat(
    "mistral", "[TOOL_CALLS]", "arguments",
    (_head("arguments", before="["), _head("arguments"), _bare_head(), _bare_head(*_ARGS),
     _bare_head(*literal("[CALL_ID]"), r"\w{1,64}", *_ARGS)),
    (Pattern(SPACE, "(?P<separator>,)", SPACE, _OBJECT), Pattern(SPACE, r"\]")),
    has_special_mark=True,
)  # fmt: skip
HARMONY = ToolFormat(
    "harmony", "", "parameters", LLAMA3_JSON.heads, LLAMA3_JSON.tails, has_channels=True,
)  # fmt: skip
TOOL_FORMATS = {one.name: one for one in (HERMES, LLAMA3_JSON, MISTRAL, HARMONY)}
CHAT_MARKS = frozenset({THINK_BEGIN, THINK_END, HERMES.mark, HERMES.end})
"""Text in every output, and allowed by constraints, also where a tokenizer lists them as special tokens."""

_LLAMA_CALL = re.compile(r'\{"name": [^{}]{1,60}"parameters":')


def tool_format_of(template: str) -> ToolFormat | None:
    """The format that a chat template describes; None if it has no tools or another format."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|channel|>" in template:
        return HARMONY
    if "<tool_call>" in template:
        writes_xml = "<function=" in template or "<arg_key>" in template
        return None if writes_xml else HERMES
    return LLAMA3_JSON if _LLAMA_CALL.search(template) else None


@dataclass(slots=True)
class ToolCallDelta:
    """The next part of one call."""

    index: int
    name: str = ""
    """On the call's first part."""
    arguments: str = ""


@dataclass(slots=True)
class ChatDelta:
    """What a piece of text adds to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def add_arguments(self, index: int, arguments: str) -> None:
        if not arguments:
            return
        if not self.tool_calls or self.tool_calls[-1].index != index:
            self.tool_calls.append(ToolCallDelta(index))
        self.tool_calls[-1].arguments += arguments


class ChatParser(Protocol):
    """Divides the text of one choice. One caller at a time."""

    def push(self, text: str, *, final: bool = False) -> ChatDelta:
        """Take the next text, the last one with `final`; return what is certain."""


class StateParser:
    """A `ChatParser` of states: each takes from the buffer what is certain, and returns whether the next can go on."""

    _buffer: str
    _state: Callable[[ChatDelta, bool], bool]

    def push(self, text: str, *, final: bool = False) -> ChatDelta:
        """See `ChatParser.push`."""
        delta = ChatDelta()
        self._buffer += text
        while self._state(delta, final):
            pass
        return delta


class ReasoningParser(StateParser):
    """Divides the text of one choice into reasoning and the rest."""

    def __init__(self, rest: ChatParser | None, *, is_open: bool, is_exact: bool = False) -> None:
        """`is_open`: the prompt ends with <think>. Without `rest` all that follows is content. `is_exact`: a constraint
        lets the answer begin behind THINK_GAP."""
        self._rest = rest
        self._is_exact = is_exact
        self._buffer = ""
        self._state = self._thinking if is_open else self._start
        self._is_blank = True

    def _start(self, delta: ChatDelta, final: bool) -> bool:
        text = self._buffer.lstrip()
        if THINK_BEGIN.startswith(text) and text != THINK_BEGIN and not final:
            return False
        is_thought = text.startswith(THINK_BEGIN)
        if is_thought:
            self._buffer = text[len(THINK_BEGIN) :]
        self._state = self._thinking if is_thought else self._others
        return True

    def _thinking(self, delta: ChatDelta, final: bool) -> bool:
        if self._is_blank:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(THINK_END)
        text = self._buffer if at < 0 else self._buffer[:at]
        certain = text if final or at >= 0 else text[: len(text) - overlap(text, THINK_END)]
        certain = certain.rstrip()
        delta.reasoning += certain
        self._is_blank = self._is_blank and not certain
        self._buffer = self._buffer[len(certain) :] if at < 0 else self._buffer[at + len(THINK_END) :]
        self._state = self._thinking if at < 0 else self._gap
        return at >= 0

    def _gap(self, delta: ChatDelta, final: bool) -> bool:
        is_over = not THINK_GAP.startswith(self._buffer) if self._is_exact else bool(self._buffer.strip())
        if not (is_over or final):
            return False
        answer = self._buffer.removeprefix(THINK_GAP) if self._is_exact else self._buffer.lstrip()
        self._buffer = answer if is_over else ""
        self._state = self._others
        return True

    def _others(self, delta: ChatDelta, final: bool) -> bool:
        text, self._buffer = self._buffer, ""
        if self._rest is None:
            delta.content += text
        else:
            rest = self._rest.push(text, final=final)
            delta.content += rest.content
            delta.tool_calls += rest.tool_calls
        return False


class Brackets:
    """How far a JSON object reaches. Sees each character once."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = self._escaped = False

    def find_end(self, text: str, depth: int, stop: str) -> int | None:
        """The index behind the bracket that returns to `depth`, or that of `stop`, which no JSON has outside of its
        strings; None: not in this text."""
        for index, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == depth:
                    return index + 1
            elif char == stop:
                self.depth = depth
                return index
        return None


class ToolCallParser(StateParser):
    """Divides the text of one choice into content and calls."""

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        *,
        max_calls: int | None = None,
        is_forced: bool = False,
        calls_only: bool = False,
    ) -> None:
        """`names`: of the tools; what has no mark and another name is content. The output ends with `max_calls` calls:
        what follows is dropped. `is_forced`: a constraint lets the output begin behind a mark that is special.
        `calls_only`: a constraint allows calls and nothing else: what is none, as a call that `max_tokens` cuts before
        its arguments, is dropped."""
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._calls_only = calls_only
        self._buffer = ""
        self._raw = ""
        """What was read since the last content or call: content, unless a call follows."""
        self._brackets = Brackets()
        self._depth = 0
        """Of the brackets around the arguments."""
        self.num_calls = 0
        begins_with_call = not form.mark or (is_forced and form.has_special_mark)
        self._state = self._head if begins_with_call else self._text

    def push(self, text: str, *, final: bool = False) -> ChatDelta:
        delta = super().push(text, final=final)
        if self._calls_only:
            delta.content = ""
        return delta

    def _text(self, delta: ChatDelta, final: bool) -> bool:
        mark = self._form.mark
        at = self._buffer.find(mark) if mark else -1
        text = self._buffer if at < 0 else self._buffer[:at]
        certain = text if final or at >= 0 else text[: len(text) - overlap(text, mark)]
        if at >= 0 or not final or self.num_calls:
            certain = certain.rstrip()
        delta.content += certain
        if at < 0:
            self._buffer = "" if final else text[len(certain) :]
            return False
        self._raw = text[len(certain) :]
        self._take(at + len(mark), at)
        self._state = self._head
        return True

    def _head(self, delta: ChatDelta, final: bool) -> bool:
        found = next((match for head in self._form.heads if (match := head.match(self._buffer))), None)
        if found is None:
            if not final and any(head.may_match(self._buffer) for head in self._form.heads):
                return False
            return self._other_head(delta, final)
        groups = found.groupdict()
        name = groups.get("name") or groups["bare"]
        if not self._form.mark and name not in self._names:
            return self._is_content(delta)
        self._take(found.end())
        self._begin_call(delta, name)
        self._depth = self._brackets.depth = 0 if groups.get("name") is None else 1
        self._state = self._arguments
        return True

    def _other_head(self, delta: ChatDelta, final: bool) -> bool:
        """An object that begins otherwise may be a call as well; anything else behind a mark is content."""
        text = self._buffer.lstrip()
        if self._form.end and not text and not final:
            return False
        if not self._form.end or not text.startswith("{"):
            return self._is_content(delta)
        self._state = self._whole
        return True

    def _arguments(self, delta: ChatDelta, final: bool) -> bool:
        end = self._find_end(self._depth)
        delta.add_arguments(self.num_calls - 1, self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        self._state = self._arguments if end is None else self._rest if self._depth else self._tail
        return end is not None

    def _rest(self, delta: ChatDelta, final: bool) -> bool:
        """Other members behind the arguments are ignored."""
        end = self._find_end(0)
        self._buffer = "" if end is None else self._buffer[end:]
        self._state = self._rest if end is None else self._tail
        return end is not None

    def _tail(self, delta: ChatDelta, final: bool) -> bool:
        if self.num_calls == self._max_calls:
            self._buffer = ""
            return False
        found = next((match for tail in self._form.tails if (match := tail.match(self._buffer))), None)
        if found is None and any(tail.may_match(self._buffer) for tail in self._form.tails):
            self._buffer = "" if final else self._buffer  # an end that is cut is no content
            return False
        is_separator = found is not None and found.groupdict().get("separator") is not None
        self._state = self._head if is_separator else self._text
        if found is not None:
            self._take(found.end())
            self._raw = self._raw if is_separator else ""
        return True

    def _whole(self, delta: ChatDelta, final: bool) -> bool:
        """A call with its members in another order, or none: then the next mark may begin one."""
        before, next_mark, _ = self._buffer.partition(self._form.mark)
        text, end, _ = before.partition(self._form.end)
        if not (next_mark or end or final):
            return False
        if (call := _call_in(text)) is None:
            return self._is_content(delta)
        self._take(len(text))
        self._begin_call(delta, call[0])
        delta.add_arguments(self.num_calls - 1, call[1])
        self._state = self._tail
        return True

    def _is_content(self, delta: ChatDelta) -> bool:
        delta.content += self._raw
        self._raw = ""
        self._state = self._text
        return True

    def _begin_call(self, delta: ChatDelta, name: str) -> None:
        self._raw = ""
        delta.tool_calls.append(ToolCallDelta(self.num_calls, name))
        self.num_calls += 1

    def _take(self, end: int, start: int = 0) -> None:
        self._raw += self._buffer[start:end]
        self._buffer = self._buffer[end:]

    def _find_end(self, depth: int) -> int | None:
        return self._brackets.find_end(self._buffer, depth, self._form.end[:1])


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` with which `mark` begins."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)


def _call_in(text: str) -> tuple[str, str] | None:
    """Name and arguments of the call in `text`."""
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    if not name or name != _utf8(name):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    return name, _utf8(arguments)


def _utf8(text: str) -> str:
    """`text` with each half of a surrogate pair as JSON escapes it: UTF-8 cannot express it."""
    return text.encode(errors="backslashreplace").decode()
