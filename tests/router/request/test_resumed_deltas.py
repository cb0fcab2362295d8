"""The deltas of a chat's answer that continues at another router: together they are those of an answer that did not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.chat_output import HERMES, LLAMA3_JSON, MISTRAL, ToolFormat
from protos.tandem.v1 import common_pb2, generation_pb2
from router.request.chat import ChatDeltas, ChatOutput, Tool, Tools

TEXTS = [
    "No call. \n",
    'Let me see.\n\n<tool_call>\n{"name": "add", "arguments": {"a": [1, {"x": "}<"}]}}\n</tool_call>\n and <tool_',
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n<tool_call>{"name": "add", "arguments": {"b": 2}}',
    '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]',
    '{"name": "add", "parameters": {"a": "é🚲"}}; {"name": "add", "parameters": {}}',
    "<think>\nShould I? </thin </think>\n\nYes.",
    '<think>Yes.</think>\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
]
FORMS = [HERMES, MISTRAL, LLAMA3_JSON]


def output_of(form: ToolFormat, *, thinks: bool) -> ChatOutput:
    tools = Tools((Tool("add", "", {}, False),), form, False, "", False)
    return ChatOutput(tools, thinks=thinks)


def deltas(router: ChatDeltas, pieces: Sequence[str], *, ends: bool) -> list[generation_pb2.ChatDelta]:
    found = []
    for number, piece in enumerate(pieces, 1):
        chunk = common_pb2.TokenChunk(text=piece)
        if ends and number == len(pieces):
            chunk.finish.reason = common_pb2.FINISH_REASON_STOP
        found.append(router.of(chunk))
    return found


def whole(parts: Sequence[generation_pb2.ChatDelta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and name and arguments of each call."""
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        for call in part.tool_calls:
            assert bool(call.id) == bool(call.name)
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + call.name, arguments + call.arguments)
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), [*calls.values()]


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("text", TEXTS)
def test_wherever_the_routers_change_the_deltas_are_the_same(text: str, form: ToolFormat, thinks: bool) -> None:
    output = output_of(form, thinks=thinks)
    expected = whole(deltas(ChatDeltas("one", output, is_constrained=False), [text], ends=True))
    for cut in range(len(text) + 1):
        before, after = (ChatDeltas(name, output, is_constrained=False) for name in ("one", "other"))
        after.skip(0, text[:cut])
        parts = deltas(before, [text[:cut]], ends=False) + deltas(after, [text[cut:]], ends=True)
        assert whole(parts) == expected, f"cut after {text[:cut]!r}"


@given(st.data())
def test_and_however_the_text_was_divided_before(data: st.DataObject) -> None:
    text, form = data.draw(st.sampled_from(TEXTS)), data.draw(st.sampled_from(FORMS))
    output = output_of(form, thinks=data.draw(st.booleans()))
    expected = whole(deltas(ChatDeltas("one", output, is_constrained=False), [text], ends=True))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=3, max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    at = data.draw(st.integers(0, len(pieces) - 1))
    before, after = (ChatDeltas(name, output, is_constrained=False) for name in ("one", "other"))
    after.skip(0, "".join(pieces[:at]))
    parts = deltas(before, pieces[:at], ends=False) + deltas(after, pieces[at:], ends=True)
    assert whole(parts) == expected


def test_calls_of_the_next_router_have_ids_of_their_own() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    output = output_of(HERMES, thinks=False)
    before, after = (ChatDeltas(name, output, is_constrained=False) for name in ("one", "other"))
    after.skip(0, call)
    parts = deltas(before, [call], ends=False) + deltas(after, [f"\n{call}"], ends=True)
    ids = [part.id for delta in parts for part in delta.tool_calls if part.id]
    assert len(set(ids)) == len(ids) == 2
