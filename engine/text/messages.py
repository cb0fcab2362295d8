"""Messages of a chat, from OpenAI's form to what chat templates read: content is a string, arguments are objects."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest, shown
from engine.text.tool_calls import MISTRAL, ToolFormat

MESSAGE_PARTS = ("text", "refusal")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SURROGATE = re.compile("[\ud800-\udfff]")


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
    """A call's arguments; the text itself if it is no JSON: what the model has written, and its client returns."""
    try:
        return loads_unicode(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def loads_unicode(text: str) -> Any:
    """The value of a JSON text, with U+FFFD for each half of a surrogate pair, which JSON can escape and UTF-8 cannot
    express. Raises as `json.loads`."""
    value = json.loads(text)
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
