"""Tools in OpenAI's Responses API, and as those of a chat.

A chat has functions alone. Those of a namespace are the functions `namespace__name` there; calls have both parts again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator

from engine.errors import shown
from router.api.openai.strict_model import FUNCTION, NAMESPACE, WEB_SEARCH, StrictModel
from serving.errors import invalid_argument

_TOOL_CHOICE_FORMS = (
    'auto, none, required, {"type": "function", "name": "one of tools"}, '
    'or {"type": "allowed_tools", "mode": "auto", "tools": [some of tools, at least one function]}'
)


class ToolName(NamedTuple):
    """A function of a namespace, or of none, ""."""

    namespace: str
    name: str

    def in_chat(self) -> str:
        return f"{self.namespace.removesuffix('__')}__{self.name}" if self.namespace else self.name


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(min_length=1)] | None = None
    """The model alone calls it, and no program of the model."""
    output_schema: dict[str, Any] | None = None
    """Has no effect: the model does not see it."""


class NamespaceTool(StrictModel):
    """Functions under a common name, such as those of one MCP server. The model does not see its description."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: list[FunctionTool]


class WebSearchTool(StrictModel):
    """Runs on OpenAI's servers. The model does not see it; agents send it with every request."""

    ignored: ClassVar = frozenset({
        "external_web_access", "filters", "index_gated_web_access", "indexed_web_access", "search_content_types",
        "search_context_size", "user_location",
    })  # fmt: skip

    type: Literal["web_search", "web_search_preview"]


_TYPES = ("function", "namespace", "web_search", "web_search_preview")


def _class_of(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in _TYPES:
        raise invalid_argument("tools", f"{shown(kind)} is no type of a supported tool", ", ".join(_TYPES))
    return {"function": FUNCTION, "namespace": NAMESPACE}.get(kind, WEB_SEARCH)


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag(FUNCTION)]
    | Annotated[NamespaceTool, Tag(NAMESPACE)]
    | Annotated[WebSearchTool, Tag(WEB_SEARCH)],
    Discriminator(_class_of),
]


def functions_of(tools: Iterable[ResponsesTool]) -> Iterator[tuple[ToolName, FunctionTool]]:
    for tool in tools:
        if isinstance(tool, FunctionTool):
            yield ToolName("", tool.name), tool
        elif isinstance(tool, NamespaceTool):
            yield from ((ToolName(tool.name, function.name), function) for function in tool.tools)


def tools_in_chat(tools: Iterable[ResponsesTool]) -> list[dict[str, Any]]:
    """The tools of a chat."""
    members = {"description", "parameters", "strict"}
    functions = [{"name": name.in_chat(), **tool.model_dump(include=members)} for name, tool in functions_of(tools)]
    return [{"type": "function", "function": function} for function in functions]


class ChosenFunction(StrictModel):
    type: Literal["function"]
    name: str = Field(min_length=1)
    namespace: str = ""

    def in_chat(self) -> dict[str, Any]:
        """The tool choice of a chat."""
        return {"type": "function", "function": {"name": ToolName(self.namespace, self.name).in_chat()}}


class ChosenFunctions(StrictModel):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Annotated[ChosenFunction | WebSearchTool, Discriminator("type")]]

    @model_validator(mode="after")
    def _check_functions(self) -> Self:
        if not self._functions:
            raise ValueError("tools has no function")
        return self

    @property
    def _functions(self) -> list[ChosenFunction]:
        return [tool for tool in self.tools if isinstance(tool, ChosenFunction)]

    def in_chat(self) -> dict[str, Any]:
        """The tool choice of a chat."""
        allowed = {"mode": self.mode, "tools": [function.in_chat() for function in self._functions]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


def _tool_choice(value: Any) -> Any:
    if value in ("auto", "none", "required"):
        return value
    with contextlib.suppress(ValidationError):
        form = ChosenFunctions if isinstance(value, dict) and "tools" in value else ChosenFunction
        return form.model_validate(value)
    raise invalid_argument("tool_choice", f"{shown(value)} is not supported", _TOOL_CHOICE_FORMS)


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | ChosenFunction | ChosenFunctions, BeforeValidator(_tool_choice)
]
