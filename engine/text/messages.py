"""Messages of a chat, from OpenAI's form to what chat templates read: content is a string, arguments are objects."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest, shown

MESSAGE_PARTS = ("text", "refusal")
_SURROGATE = re.compile("[\ud800-\udfff]")


def template_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of one chat, without the members that are None. Raises InvalidRequest."""
    names: dict[str, Any] = {}
    return [_template_message(message, f"messages[{index}]", names) for index, message in enumerate(messages)]


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


def _template_message(message: Any, field: str, names: dict[str, Any]) -> dict[str, Any]:
    """`names`: the tools of earlier calls by their ids."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, f"{shown(message)} is not a message", '{"role": …, "content": …}')
    members = {name: value for name, value in message.items() if value is not None}
    rename_for_templates(members)
    content = members["content"] = joined_parts(members.get("content", ""), field, MESSAGE_PARTS)
    if not isinstance(content, str):
        raise InvalidRequest(field, f"content {shown(content)} is not a string", "a string, or a list of parts")
    if isinstance(calls := members.get("tool_calls"), list | tuple):
        members["tool_calls"] = [_template_call(call, names) for call in calls]
        if not calls:
            del members["tool_calls"]
    given = members.pop("name", None)
    if members.get("role") == "tool" and (name := given or names.get(str(members.get("tool_call_id")))):
        members["name"] = name
    return members


def _template_call(call: Any, names: dict[str, Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    names[str(call.get("id"))] = function.get("name")
    arguments = function.get("arguments") or ""
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
