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


ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<{{ message.role }}>{{ message.content | trim }}{% endfor %}"
)
"""As Gemma's: it rejects results and leaves out calls."""
NAMED_RESULTS = (
    "{% for message in messages %}{% if message.content is none %}<call>{{ message.tool_calls[0].function.name }}"
    "{% elif message.role == 'tool' %}{{ '<result of ' + message.name + '>' + message.content }}"
    "{% else %}<{{ message.role }}>{{ message.content }}{% endif %}"
    "{% if loop.last and message.role == 'assistant' %}{{ raise_exception('a call without a result') }}{% endif %}"
    "{% endfor %}"
)


def test_a_template_that_rejects_results_leaves_out_no_calls_unseen() -> None:
    template = ChatTemplate(ALTERNATING, {})
    with pytest.raises(InvalidRequest, match="the chat template leaves out tool calls"):
        template.render([USER, calling(A), USER])
    assert template.render([USER, calling(A, content="I add."), USER]) == "<user>Add.<assistant>I add.<user>Add."
    shown = ChatTemplate(ALTERNATING.replace("<{{", "{{ message.tool_calls }}<{{"), {})
    assert "'A'" in shown.render([USER, calling(A), USER])


def test_results_have_names_when_the_form_of_calls_is_found() -> None:
    rendered = ChatTemplate(NAMED_RESULTS, {}).render([USER, calling(A), result("cA", "1") | {"name": "A"}])
    assert rendered == "<user>Add.<call>A<result of A>1"


@pytest.mark.parametrize("calls", [5, "ab", [5, 6], [{"id": []}, {}], None])
def test_calls_of_another_form_are_the_templates(calls: Any) -> None:
    with pytest.raises(InvalidRequest, match="rejected by the chat template"):
        ChatTemplate(ONE_CALL + "{{ raise_exception('seen') }}", {}).render(
            [calling() | {"tool_calls": calls}, result("cA", "1")]
        )


FIRST_ONES = (
    "{% set others = messages %}{% if messages[0].role == 'system' %}{% set others = messages[1:] %}"
    "<system>{{ messages[0].content }}{% endif %}"
    "{% for message in others %}{% if message.tool_calls %}{% if message.content and message.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "<thought>{{ message.content or message.thinking }}<call>{{ message.tool_calls[0].function.name }}"
    "{% elif message.role != 'system' %}<{{ message.role }}>{{ message.content }}{% endif %}{% endfor %}"
)
"""As gpt-oss's: it leaves out further calls of a message and system messages behind the first message."""


@pytest.mark.parametrize("name", HISTORIES)
def test_a_template_that_renders_the_first_call_alone_leaves_out_none(name: str) -> None:
    history, pairs = HISTORIES[name]
    template = ChatTemplate(FIRST_ONES, {})
    rendered = template.render([USER, *history])
    assert rendered == template.render([USER, *pairs])
    for message in history:
        assert all(f"<call>{one['function']['name']}" in rendered for one in message.get("tool_calls", ()))


@pytest.mark.parametrize("roles", [("system", "system", "user"), ("system", "user", "system"), ("user", "system")])
def test_system_messages_that_the_template_would_leave_out_join_the_first(roles: tuple[str, ...]) -> None:
    messages = [{"role": role, "content": f"{role} {number}."} for number, role in enumerate(roles)]
    systems = "\n\n".join(one["content"] for one in messages if one["role"] == "system")
    user = next(one["content"] for one in messages if one["role"] == "user")
    before = copy.deepcopy(messages)
    assert ChatTemplate(FIRST_ONES, {}).render(messages) == f"<system>{systems}<user>{user}"
    assert messages == before, "the caller's messages have changed"
    in_place = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    assert ChatTemplate(in_place, {}).render(messages) == "".join(
        f"<{one['role']}>{one['content']}" for one in messages
    )


def test_system_messages_of_parts_stay_where_they_are() -> None:
    template = "{% for message in messages %}{% for part in message.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    messages = [{"role": role, "content": [{"text": role}]} for role in ("system", "user", "system")]
    assert ChatTemplate(template, {}).render(messages) == "<system><user><system>"


def test_a_template_that_reads_thinking_gets_the_thought_before_a_call() -> None:
    template = ChatTemplate(FIRST_ONES, {})
    result_of_call = "<thought>Hm.<call>A<tool>1"
    assert template.render([calling(A, reasoning_content="Hm."), result("cA", "1")]) == result_of_call
    assert template.render([calling(A, **THOUGHT), result("cA", "1")]) == result_of_call.replace("Hm", "Well")
    given = calling(A, reasoning_content="Hm.", thinking="Well.")
    assert template.render([given, result("cA", "1")]) == result_of_call.replace("Hm", "Well")
    assert "thinking" not in ChatTemplate(ANY_CALLS, {}).render([calling(A, reasoning_content="Hm.")])
