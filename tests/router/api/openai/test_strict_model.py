"""Null members of a JSON object mean that they are not given, however deep the object lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from router.api.live.endpoints import DrainBody, ResizeBody
from router.api.openai.api import DetokenizeBody, TokenizeBody
from router.api.openai.messages_api import CountTokensRequest, MessagesRequest
from router.api.openai.requests import ChatBody, CompletionBody
from router.api.openai.responses_api import ResponsesRequest
from router.api.openai.strict_model import StrictModel
from serving.errors import InvalidArgument

USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "const": None}
FUNCTION = {"name": "f", "parameters": SCHEMA}
BODIES: list[tuple[type[StrictModel], dict[str, Any]]] = [
    (CompletionBody, {"prompt": "x"}),
    (CompletionBody, {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}),
    (CompletionBody, {"prompt": "x", "structured_outputs": {"choice": ["a"]}}),
    (ChatBody, {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]}),
    (ChatBody, {"messages": [USER], "chat_template_kwargs": {"a": None}}),
    (
        ChatBody,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
            ]
        },
    ),
    (
        ChatBody,
        {
            "messages": [USER],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        },
    ),
    (
        ChatBody,
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
    (MessagesRequest, {"messages": [USER], "max_tokens": 4, "tools": [{"name": "f", "input_schema": SCHEMA}]}),
    (MessagesRequest, {"messages": [USER], "max_tokens": 4, "thinking": {"type": "adaptive"}, "output_config": {}}),
    (CountTokensRequest, {"messages": [USER], "tool_choice": {"type": "auto"}}),
    (ResponsesRequest, {"input": "x", "text": {"format": {"type": "text"}}, "reasoning": {}}),
    (ResponsesRequest, {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}),
    (TokenizeBody, {"prompt": "x"}),
    (TokenizeBody, {"messages": [USER]}),
    (DetokenizeBody, {"tokens": [1]}),
    (ResizeBody, {"prefill": 1}),
    (DrainBody, {"instance": "decode-0"}),
]


def objects(
    model: StrictModel, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], StrictModel]]:
    """Every object in what was parsed, with its place."""
    yield path, model
    for name, field in type(model).model_fields.items():
        value, here = getattr(model, name), (*path, field.alias or name)
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, StrictModel):
                yield from objects(item, (*here, index) if isinstance(value, list) else here)


def with_nulls(body: dict[str, Any], parsed: StrictModel) -> tuple[dict[str, Any], int]:
    """`body` with null for each member that it leaves out, and how many those are."""
    full, num_nulls = json.loads(json.dumps(body)), 0
    for path, model in objects(parsed):
        given: Any = full
        for step in path:
            given = given.get(step) if isinstance(given, dict) else given[step]
            if given is None:
                break
        else:
            for name, field in type(model).model_fields.items():
                num_nulls += given.setdefault(field.alias or name, None) is None
    return full, num_nulls


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_a_null_is_not_given(kind: type[StrictModel], body: dict[str, Any]) -> None:
    plain = kind.parse(json.dumps(body).encode())
    full, num_nulls = with_nulls(body, plain)
    assert num_nulls > 0
    assert kind.parse(json.dumps(full).encode()) == plain


def test_a_null_in_a_clients_own_object_stays() -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": [USER], "tools": tools, "chat_template_kwargs": {"a": None}}
    [request] = ChatBody.parse(json.dumps(body).encode()).requests("label")
    assert json.loads(request.chat.tools[0].parameters) == SCHEMA
    assert json.loads(request.chat.template_variables) == {"a": None}


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [
        (DetokenizeBody, {"tokens": None}, "tokens"),
        (CompletionBody, {"prompt": None}, "prompt"),
        (ChatBody, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (ChatBody, {"messages": [{"role": "tool", "tool_call_id": "c", "content": None}]}, "messages[0].content"),
        (MessagesRequest, {"messages": [{"role": "user", "content": None}], "max_tokens": 4}, "messages[0].content"),
    ],
)
def test_a_required_member_that_is_null_is_missing(kind: type[StrictModel], body: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match="is required") as raised:
        kind.parse(json.dumps(body).encode())
    assert raised.value.violations[0].field == name
