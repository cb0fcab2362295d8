"""A model's chat template: renders messages as the text that the model was trained on.

    messages in OpenAI's form ─template_messages─▶ content is a string, arguments are objects ─ChatTemplate─▶ text

Rendered in jinja2's immutable sandbox with what templates of the Hugging Face hub use: `raise_exception`,
`strftime_now`, a `tojson` that leaves HTML characters alone, `break` and `continue`, and `{% generation %}`, which has
no effect. For a template that rejects messages of several calls, as Llama 3's does, or renders the first call alone, as
gpt-oss's, these become messages of one; system messages join the first where others than that are left out.
Templates come with the model and are trusted to terminate; messages and variables are not trusted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequest, UnsupportedModel, shown
from engine.text.chat_output import MISTRAL, ToolFormat

Messages = Sequence[Mapping[str, Any]]
"""In OpenAI's form: role, content (a string or a list of parts), tool_calls…"""
Tools = Sequence[Mapping[str, Any]]

_SINGLE_CALLS = "only supports single tool-calls at once"
"""In the error of a template that rejects a message of several calls."""
_THINKING = "message.thinking"
"""In a template that reads reasoning by this name."""
_TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
MESSAGE_PARTS = ("text", "refusal")
MAX_CONTAINERS = 100_000
"""Objects and lists of one JSON text. The parser keeps the GIL: a million would stop all other threads for a second."""
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, with which training tools mark the assistant's text: rendered as is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template, without state. `special_tokens` (bos_token, eos_token…) are variables for it. Some models
    have another one for chats with tools, `tool_source`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source, self.tool_source = source, source if tool_source is None else tool_source
        try:
            self._template, self._tool_template = map(environment.from_string, (self.source, self.tool_source))
        except jinja2.TemplateError as error:
            raise UnsupportedModel(f"the chat template does not compile: {shown(str(error))}") from error
        self.single_calls = _SINGLE_CALLS in self.tool_source
        """Whether a model with tools calls one at a time."""
        self._special_tokens = dict(special_tokens)
        renders = {bool(tools): partial(self._rendered, tools=tools) for tools in (None, [_PROBE_TOOL])}
        self._call_forms = {has_tools: _form_of_calls(render) for has_tools, render in renders.items()}
        """How messages without and with tools have calls; None: the template leaves them out."""
        self._one_call = {
            has_tools: form is not None and _is_left_out(renders[has_tools], form.applied(_SECOND_CALL))
            for has_tools, form in self._call_forms.items()
        }
        """Whether it renders only the first call of a message."""
        self._one_system = {has_tools: _is_left_out(render, _LATER_SYSTEM) for has_tools, render in renders.items()}
        """Whether it renders a system message only as the first one."""
        self.reserved_names = frozenset(
            {"messages", "tools", "add_generation_prompt", *special_tokens, *environment.globals}
        )
        """Names that are set here: a request's variables cannot have them."""

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `variables` are the template's own switches (enable_thinking…).

        Raises `InvalidRequest` for messages that the template rejects or fails on, and for reserved names.
        """
        if not messages:
            raise InvalidRequest("messages", "the list is empty", "at least one message")
        self._check(variables or {})
        source = self.tool_source if tools else self.source
        try:
            messages = _with_one_system(messages) if self._one_system[bool(tools)] else messages
            is_single = self._one_call[bool(tools)] or _SINGLE_CALLS in source
            messages = _with_single_calls(messages) if is_single else messages
            messages = list(map(_with_thinking, messages)) if _THINKING in source else messages
            return self._rendered(self._with_calls(messages, tools), tools, variables)
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest("messages", f"rejected by the chat template: {shown(str(error))}") from error
        except RecursionError:
            raise InvalidRequest("messages", "nested too deeply for the chat template") from None

    def _with_calls(self, messages: Messages, tools: Tools | None) -> Messages:
        form = self._call_forms[bool(tools)]
        if form is not None:
            return form.applied(messages)
        if any(_is_mere_call(message) for message in messages):
            problem = "the chat template leaves out tool calls without text beside them"
            raise InvalidRequest("messages", problem, "messages without tool_calls")
        return messages

    def _rendered(self, messages: Messages, tools: Tools | None, variables: Mapping[str, Any] | None = None) -> str:
        fixed = {"messages": messages, "tools": tools, "add_generation_prompt": True}
        template = self._tool_template if tools else self._template
        return template.render({**(variables or {}), **self._special_tokens, **fixed})

    def _check(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if not _VARIABLE.fullmatch(name) or name in self.reserved_names:
                problem = "reserved" if name in self.reserved_names else "not a variable name"
                raise InvalidRequest(
                    "template_variables",
                    f"{shown(name)} is {problem}",
                    f"1..64 of [A-Za-z0-9_], a letter first, and none of {', '.join(sorted(self.reserved_names))}",
                )


def _with_one_system(messages: Messages) -> Messages:
    """With the texts of all system messages in one, at the beginning."""
    systems = [one for one in messages if one.get("role") == "system"]
    texts = [one["content"] for one in systems if isinstance(one.get("content"), str)]
    if systems == [*messages[:1]] or not texts or len(texts) < len(systems):
        return messages
    return [
        {"role": "system", "content": "\n\n".join(texts)},
        *(one for one in messages if one.get("role") != "system"),
    ]


def _with_single_calls(messages: Messages) -> Messages:
    """Each message of several calls as one for each of them, with its result behind it."""
    single, at = list[Mapping[str, Any]](), 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or len(calls) < 2:
            single.append(message)
            continue
        end = next((i for i in range(at, len(messages)) if messages[i].get("role") != "tool"), len(messages))
        single += _pairs(message, calls, messages[at:end])
        at = end
    return single


def _pairs(message: Mapping[str, Any], calls: Sequence[Any], results: Messages) -> Iterator[Mapping[str, Any]]:
    """Text and reasoning stay with the first call; results of no call come last."""
    waiting = defaultdict[str, deque[Mapping[str, Any]]](deque)
    for result in results:
        waiting[str(result.get("tool_call_id"))].append(result)
    for call in calls:
        yield {**message, "tool_calls": [call]}
        message = {"role": message["role"], "content": ""}
        answers = waiting[str(call.get("id") if isinstance(call, Mapping) else None)]
        if answers:
            yield answers.popleft()
    yield from itertools.chain.from_iterable(waiting.values())


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the reasoning by gpt-oss's name too, but for a message of text and calls, which its template rejects."""
    thought = message.get("reasoning_content")
    if not thought or (message.get("tool_calls") and message.get("content")):
        return message
    return {"thinking": thought, **message}


@dataclass(frozen=True, slots=True)
class _CallForm:
    """How messages with calls are given to a template. Most read the first form, DeepSeek-R1-Distill's the last."""

    has_null_content: bool = False
    """An empty content is None."""
    has_text_arguments: bool = False
    """Arguments are JSON text, not objects."""

    def applied(self, messages: Messages) -> Messages:
        if self == _FORMS[0]:
            return messages
        return [self._applied(one) if "tool_calls" in one else one for one in messages]

    def _applied(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        changed = dict(message)
        if self.has_null_content and _is_mere_call(message):
            changed["content"] = None
        if self.has_text_arguments:
            changed["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        return changed


_FORMS = tuple(_CallForm(is_null, is_text) for is_text in (False, True) for is_null in (False, True))


def _is_mere_call(message: Mapping[str, Any]) -> bool:
    """Whether the message has calls and no text."""
    return bool(message.get("tool_calls")) and not str(message.get("content") or "").strip()


def _with_text_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else _to_json(arguments)
    return {**call, "function": {**call["function"], "arguments": text}}


_PROBE_NAME = "name_of_a_probe"
_PROBE_TOOL = {"type": "function", "function": {"name": "other", "description": "", "parameters": {"type": "object"}}}
_PROBE_CALL = {"id": "c0ffee123", "type": "function", "function": {"name": _PROBE_NAME, "arguments": {"x": 1}}}
_PROBE: Messages = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "c0ffee123", "name": "other"},
]
_SECOND_CALL: Messages = [
    _PROBE[0],
    {**_PROBE[1], "tool_calls": [{**_PROBE_CALL, "function": {"name": "other", "arguments": {}}}, _PROBE_CALL]},
    _PROBE[2],
]
_LATER_SYSTEM: Messages = [
    {"role": role, "content": _PROBE_NAME if role == "system" else "x"}
    for role in ("user", "assistant", "system", "user")
]


def _is_left_out(render: Callable[[Messages], str], probe: Messages) -> bool:
    """Whether the template leaves out the probe's name, and that is no error."""
    with suppress(*_TEMPLATE_ERRORS, RecursionError):
        return _PROBE_NAME not in render(probe)
    return False


def _form_of_calls(render: Callable[[Messages], str]) -> _CallForm | None:
    """The first form whose calls are in the text; None if they are in none, and the first form is no error. A template
    that rejects results, as Gemma's does, is given none."""
    texts = _texts_of_forms(render, _PROBE) or _texts_of_forms(render, _PROBE[:-1])
    found = next((form for form, text in texts.items() if _PROBE_NAME in text), None)
    return found if found is not None or _FORMS[0] in texts else _FORMS[0]


def _texts_of_forms(render: Callable[[Messages], str], probe: Messages) -> dict[_CallForm, str]:
    """The text of `probe` in each form that is no error."""
    texts = {}
    for form in _FORMS:
        with suppress(*_TEMPLATE_ERRORS, RecursionError):
            texts[form] = render(form.applied(probe))
    return texts


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# Messages, from OpenAI's form to what templates read


def template_messages(messages: Sequence[Any], form: ToolFormat | None = None) -> list[dict[str, Any]]:
    """The messages of one chat, without the members that are None; `form`: of the model's calls. Raises
    InvalidRequest."""
    names: dict[str, Any] = {}
    return [_template_message(message, f"messages[{index}]", form, names) for index, message in enumerate(messages)]


def joined_parts(content: Any, field: str = "messages", kinds: Collection[str] = ("text",)) -> Any:
    """The text of a list of parts of these kinds; anything else as it is. Raises InvalidRequest."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            problem = f"content[{index}] is of type {shown(kind)}"
            raise InvalidRequest(field, problem, f"text, or parts of type {' or '.join(kinds)}")
        member = "refusal" if kind == "refusal" else "text"
        if not isinstance(text := part.get(member), str):
            raise InvalidRequest(field, f"{member} of content[{index}]: {shown(text)} is not a string", "a string")
        texts.append(text)
    return "\n".join(texts)


def rename_for_templates(members: dict[str, Any]) -> None:
    """Gives the members of a message, none of them None, the names and values that templates know."""
    if members.get("role") == "developer":  # OpenAI's newer name of the role
        members["role"] = "system"
    if (refusal := members.pop("refusal", None)) is not None:  # of another model: its text in place of an answer
        members.setdefault("content", refusal)
    if "reasoning" in members:  # OpenRouter's and newer vLLM's name
        members.setdefault("reasoning_content", members.pop("reasoning"))


def parsed_arguments(arguments: str) -> Any:
    """A call's arguments; the text itself if it is no JSON, or too much: what the model has written, and its client
    returns."""
    try:
        return loads_unicode(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def parsed_json(text: str) -> Any:
    """The value of a JSON text. Raises RecursionError, and ValueError also where it may have more than
    MAX_CONTAINERS."""
    if text.count("[") + text.count("{") > MAX_CONTAINERS:
        raise ValueError(f"more than {MAX_CONTAINERS} objects and lists")
    return json.loads(text)


def loads_unicode(text: str) -> Any:
    """The value of a JSON text, with U+FFFD for each half of a surrogate pair, which JSON can escape and UTF-8 cannot
    express. Raises as `parsed_json`."""
    value = parsed_json(text)
    if "\\u" not in text:
        return value
    plain = json.dumps(value, ensure_ascii=False)
    return json.loads(_SURROGATE.sub("\ufffd", plain)) if _SURROGATE.search(plain) else value


def template_id(call_id: str, form: ToolFormat | None) -> str:
    """Mistral's templates reject all but nine letters and digits."""
    return short_id(call_id) if form is MISTRAL and not _SHORT_ID.fullmatch(call_id) else call_id


def short_id(source: str) -> str:
    """Nine letters and digits, a function of `source`."""
    number = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big")
    return "".join(_DIGITS[number // len(_DIGITS) ** place % len(_DIGITS)] for place in range(9))


def _template_message(message: Any, field: str, form: ToolFormat | None, names: dict[str, Any]) -> dict[str, Any]:
    """`names`: the tools of earlier calls by their ids."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, f"{shown(message)} is not a message", '{"role": …, "content": …}')
    members = {name: value for name, value in message.items() if value is not None}
    rename_for_templates(members)
    content = members["content"] = joined_parts(members.get("content", ""), field, MESSAGE_PARTS)
    if not isinstance(content, str):
        raise InvalidRequest(field, f"content {shown(content)} is not a string", "a string, or a list of parts")
    if isinstance(calls := members.get("tool_calls"), list | tuple):
        members["tool_calls"] = [_template_call(call, form, names) for call in calls]
        if not calls:
            del members["tool_calls"]
    given, call_id = members.pop("name", None), members.get("tool_call_id")
    if members.get("role") == "tool" and (name := given or names.get(str(call_id))):
        members["name"] = name
    if isinstance(call_id, str):
        members["tool_call_id"] = template_id(call_id, form)
    return members


def _template_call(call: Any, form: ToolFormat | None, names: dict[str, Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments") or ""
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    made = {**call, "function": {**function, "arguments": arguments}}
    if (call_id := call.get("id")) not in (None, ""):
        names[str(call_id)] = function.get("name")
    if isinstance(call_id, str):
        made["id"] = template_id(call_id, form)
    return made
