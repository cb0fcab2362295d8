"""Messages and tools in the body of a chat, rendered with the model's own template (engine/text/chat_template.py)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from engine.errors import shown
from engine.text import chat_template
from router.api.openai.strict_model import StrictModel
from router.request.validation import service_errors
from serving.errors import invalid_argument

_LITELLMS = "provider_specific_fields"
"""In each message and call of a history that LiteLLM sends again."""
_CACHE = "cache_control"
"""Anthropic's mark, which LiteLLM passes on: prefixes are always cached."""


def joined_parts(content: Any, field: str = "messages", kinds: Collection[str] = ("text",)) -> Any:
    """See engine.text.chat_template. Raises InvalidArgument."""
    with service_errors():
        return chat_template.joined_parts(content, field, kinds)


def text_member(item: Mapping[str, Any], name: str, field: str) -> str:
    """A string among an item's members; `field` names the item in the error."""
    if not isinstance(value := item.get(name), str):
        raise invalid_argument(f"{field}.{name}", f"{shown(value)} is not a string", "a string")
    return value


def _content(value: Any) -> Any:
    return joined_parts(value, kinds=chat_template.MESSAGE_PARTS)


class CalledFunction(StrictModel):
    ignored: ClassVar = frozenset({"parsed_arguments", _LITELLMS})  # parsed_arguments: by OpenAI's Python client

    name: str
    arguments: str = ""


class ToolCall(StrictModel):
    """A call in an assistant's message."""

    ignored: ClassVar = frozenset({"index", _LITELLMS})  # index: clients that assemble a stream leave it in

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(StrictModel):
    """One message of a chat."""

    ignored: ClassVar = frozenset({
        "annotations", "parsed", "reasoning_details", "thinking_blocks", "type", _CACHE, _LITELLMS,
    })  # fmt: skip
    """`parsed`: by OpenAI's Python client, out of the content. `reasoning_details` (OpenRouter) and `thinking_blocks`
    (LiteLLM) are the reasoning in another form. `type`: lm-eval up to 0.4.11 writes text there."""

    role: str
    content: Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[dict[str, str]])]
    name: str = ""
    tool_calls: list[ToolCall] = Field([])
    tool_call_id: str = ""
    reasoning_content: str = ""

    @classmethod
    def _supported(cls, members: dict[str, Any]) -> dict[str, Any]:
        for name in ("function_call", "audio"):
            if members.pop(name, None):
                raise invalid_argument("messages", f"{name} is not supported", "role, content and tool_calls")
        chat_template.rename_for_templates(members)
        is_answer = members.get("role") == "assistant"  # of vLLM's answers those of reasoning alone have no content
        return {"content": "", **members} if is_answer or members.get("tool_calls") else members

    @model_validator(mode="after")
    def _check_call(self) -> Self:
        if self.role == "tool" and not self.tool_call_id:
            raise invalid_argument("messages", "one of role 'tool' has no tool_call_id", "the id of the call")
        return self

    def on_wire(self) -> dict[str, Any]:
        """Of `name` templates read that of a tool alone."""
        calls = [{"id": call.id, **call.function.model_dump()} for call in self.tool_calls]
        name = self.name if self.role == "tool" else ""
        return {
            "role": self.role,
            "content": self.content,
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
            "name": name,
            "reasoning": self.reasoning_content,
        }


class Function(StrictModel):
    """A function that the model may call."""

    ignored: ClassVar = frozenset({_CACHE})

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field({})
    strict: bool = False

    def on_wire(self) -> dict[str, Any]:
        parameters = json.dumps(self.parameters) if self.parameters else ""
        return {**self.model_dump(exclude={"parameters"}), "parameters": parameters}


class Tool(StrictModel):
    ignored: ClassVar = frozenset({_CACHE})

    type: Literal["function"]
    function: Function


class NamedFunction(StrictModel):
    name: str = Field(min_length=1)


class NamedTool(StrictModel):
    """The tool to call."""

    type: Literal["function"]
    function: NamedFunction
