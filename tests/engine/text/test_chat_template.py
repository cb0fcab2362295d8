"""Histories as templates take them that support one call in a message."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.text.chat_template import ChatTemplate

ONE_CALL = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{{ message.tool_calls[0].function | tojson }}{% endif %}{{ message.content }}{{ message.reasoning_content }}"
    "{% endfor %}"
)
ANY_CALLS = "{% for message in messages %}{{ message | tojson }}{% endfor %}"
USER = {"role": "user", "content": "Add."}


def call(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"a": name}}}


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [*calls], **more}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


A, B, C = (call(name, f"c{name}") for name in "ABC")
THOUGHT = {"content": "Well.", "reasoning_content": "Hm."}
HISTORIES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "in order": (
        [calling(A, B), result("cA", "1"), result("cB", "2"), USER],
        [calling(A), result("cA", "1"), calling(B), result("cB", "2"), USER],
    ),
    "in another order": (
        [calling(A, B, C), result("cC", "3"), result("cA", "1"), result("cB", "2")],
        [calling(A), result("cA", "1"), calling(B), result("cB", "2"), calling(C), result("cC", "3")],
    ),
    "with a text": (
        [calling(A, B, **THOUGHT), result("cA", "1"), result("cB", "2")],
        [calling(A, **THOUGHT), result("cA", "1"), calling(B), result("cB", "2")],
    ),
    "without results": ([calling(A, B), USER], [calling(A), calling(B), USER]),
    "with results of no call": (
        [calling(A, B), result("cX", "9"), result("cB", "2"), USER, result("cA", "1")],
        [calling(A), calling(B), result("cB", "2"), result("cX", "9"), USER, result("cA", "1")],
    ),
    "with equal ids": (
        [calling(A, A), result("cA", "1"), result("cA", "2")],
        [calling(A), result("cA", "1"), calling(A), result("cA", "2")],
    ),
    "with one call": ([calling(A), result("cA", "1")], [calling(A), result("cA", "1")]),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_parallel_calls_become_pairs_of_call_and_result(name: str) -> None:
    history, pairs = HISTORIES[name]
    before = copy.deepcopy(history)
    template = ChatTemplate(ONE_CALL, {})
    assert template.render([USER, *history]) == template.render([USER, *pairs])
    assert history == before, "the caller's messages have changed"


@pytest.mark.parametrize("name", HISTORIES)
def test_and_stay_where_the_template_supports_them(name: str) -> None:
    template = ChatTemplate(ANY_CALLS, {})
    rendered = [template.render([one]) for one in HISTORIES[name][0]]
    assert template.render(HISTORIES[name][0]) == "".join(rendered)


def test_the_template_that_is_rendered_decides() -> None:
    template = ChatTemplate(ANY_CALLS, {}, ONE_CALL)
    history, pairs = HISTORIES["in order"]
    tools = [{"type": "function", "function": {"name": "A"}}]
    assert template.render(history) != template.render(pairs)
    assert template.render(history, tools=tools) == template.render(pairs, tools=tools)


@pytest.mark.parametrize("calls", [5, "ab", [5, 6], [{"id": []}, {}], None])
def test_calls_of_another_form_are_the_templates(calls: Any) -> None:
    with pytest.raises(InvalidRequest, match="rejected by the chat template"):
        ChatTemplate(ONE_CALL + "{{ raise_exception('seen') }}", {}).render(
            [calling() | {"tool_calls": calls}, result("cA", "1")]
        )
