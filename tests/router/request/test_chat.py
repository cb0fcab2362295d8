"""What tools make of a chat's parameters, and the deltas of an answer, also where it continues at another router."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.sampling.constraints import MAX_CONSTRAINT_BYTES
from engine.sampling.params import SamplingParams
from engine.text.chat_output import HARMONY, HERMES, LLAMA3_JSON, MISTRAL, ToolFormat
from engine.text.chat_template import MAX_CONTAINERS
from protos.tandem.v1 import common_pb2, generation_pb2
from router.request.chat import ChatDeltas, ChatOutput, Tool, Tools, template_messages

REQUIRED = generation_pb2.TOOL_CHOICE_REQUIRED
PATH = {"type": "object", "properties": {"description": {"type": "string"}}, "required": ["description"]}


def schema(text: str) -> dict[str, Any]:
    """`PATH`, described by `text`."""
    described = {"type": "string", "title": text, "description": text, "default": text, "examples": [text]}
    return {**PATH, "title": text, "description": text, "properties": {"description": described}}


def chat(num_tools: int, parameters: dict[str, Any]) -> generation_pb2.Chat:
    """In which a call is required."""
    tools = [generation_pb2.Tool(name=f"f{i}", parameters=json.dumps(parameters)) for i in range(num_tools)]
    return generation_pb2.Chat(tools=tools, tool_choice=REQUIRED)


def constraint_of(chat: generation_pb2.Chat, *, thinks: bool = False) -> str:
    """What instances get. Raises InvalidRequest, also for what they would reject."""
    params = ChatOutput(Tools.of(chat, HERMES), thinks=thinks).constrained(SamplingParams())
    assert params.constraint is not None
    return str(params.structural_tag)


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("text", ["x" * 300, "漢" * 300])
def test_descriptions_are_no_part_of_a_constraint(text: str, thinks: bool) -> None:
    """They alone would be larger than one may be."""
    many = chat(150, schema(text))
    assert len(many.tools[0].parameters.encode()) * 150 > MAX_CONSTRAINT_BYTES
    assert constraint_of(many, thinks=thinks) == constraint_of(chat(150, PATH), thinks=thinks)


def test_a_described_schema_fits_behind_reasoning() -> None:
    largest = json.dumps(schema("漢" * (MAX_CONSTRAINT_BYTES // 20)), ensure_ascii=False)
    params = SamplingParams(json_schema=largest)
    assert params.constraint is not None
    constrained = ChatOutput(thinks=True).constrained(params)
    assert constrained.constraint is not None
    assert (
        constrained.structural_tag
        == ChatOutput(thinks=True).constrained(SamplingParams(json_schema=PATH)).structural_tag
    )


def test_chinese_text_counts_as_the_bytes_that_it_is() -> None:
    values = ["漢" * 50 + str(index) for index in range(300)]
    constraint = constraint_of(chat(1, {"type": "object", "properties": {"a": {"enum": values}}}))
    assert values[-1] in constraint


def test_a_lone_surrogate_stays_an_escape() -> None:
    surrogate = {"type": "object", "properties": {"a": {"const": "\ud83c"}}}
    assert r"\ud83c" in constraint_of(chat(1, surrogate))


def test_schemas_that_are_too_large_together_are_rejected_as_such() -> None:
    enum = {"type": "object", "properties": {"a": {"enum": ["x" * 1000]}}}
    with pytest.raises(InvalidRequest) as raised:
        constraint_of(chat(500, enum))
    assert raised.value.field == "chat.tools"
    said = re.fullmatch(r"the constraint of the first (\d+) tools has more than 65536 bytes", raised.value.problem)
    assert said is not None
    assert constraint_of(chat(int(said[1]) - 1, enum))
    allowed = "fewer (tool_choice allowed_tools), or tool_choice auto without strict and response_format"
    assert raised.value.allowed == allowed


def schema_of(num_bytes: int) -> dict[str, Any]:
    """A JSON schema whose text has so many bytes."""
    values = ["x" * 1000] * (num_bytes // 1100)
    rest = num_bytes - len(json.dumps({"enum": [*values, ""]}))
    return {"enum": [*values, "x" * rest]}


def test_a_schema_that_fits_alone_and_not_behind_reasoning_is_rejected_by_its_own_field() -> None:
    params = SamplingParams(json_schema=schema_of(MAX_CONSTRAINT_BYTES))
    assert params.constraint is not None
    assert ChatOutput().constrained(params) == params
    with pytest.raises(InvalidRequest) as raised:
        ChatOutput(thinks=True).constrained(params)
    assert raised.value.field == "json_schema"
    said = re.match(r"has (\d+) bytes together with what tools and reasoning add", raised.value.problem)
    assert said is not None
    num_added = int(said[1]) - MAX_CONSTRAINT_BYTES
    fits = SamplingParams(json_schema=schema_of(MAX_CONSTRAINT_BYTES - num_added))
    assert ChatOutput(thinks=True).constrained(fits).constraint is not None


def test_tools_that_fit_alone_and_not_behind_reasoning_are_rejected_as_such() -> None:
    required = chat(1, {"type": "object", "properties": {"a": schema_of(MAX_CONSTRAINT_BYTES - 500)}})
    assert constraint_of(required)
    with pytest.raises(InvalidRequest) as raised:
        constraint_of(required, thinks=True)
    assert raised.value.field == "chat.tools"


TEXTS = [
    "No call. \n",
    'Let me see.\n\n<tool_call>\n{"name": "add", "arguments": {"a": [1, {"x": "}<"}]}}\n</tool_call>\n and <tool_',
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n<tool_call>{"name": "add", "arguments": {"b": 2}}',
    '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]',
    '{"name": "add", "parameters": {"a": "é🚲"}}; {"name": "add", "parameters": {}}',
    "<think>\nShould I? </thin </think>\n\nYes.",
    '<think>Yes.</think>\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1}<|call|>',
]
FORMS = [HERMES, MISTRAL, LLAMA3_JSON, HARMONY]


def output_of(form: ToolFormat, *, thinks: bool) -> ChatOutput:
    tools = Tools((Tool("add", "", {}, False),), form, False, "", False)
    return ChatOutput(tools, thinks=thinks, has_channels=form.has_channels)


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


@pytest.mark.parametrize("text", ["<tool_call>", "<tool_call>{"])
def test_the_time_to_skip_an_answer_is_proportional_to_its_marks(text: str) -> None:
    def skipping_s(number: int) -> float:
        router, began_s = ChatDeltas("one", output_of(HERMES, thinks=False), is_constrained=False), time.thread_time()
        router.skip(0, text * number)
        return time.thread_time() - began_s

    assert skipping_s(32_000) < 16 * skipping_s(4_000)


@pytest.mark.parametrize("num_lists", [MAX_CONTAINERS, MAX_CONTAINERS + 1])
def test_json_with_too_many_lists_is_not_parsed(num_lists: int) -> None:
    is_parsed = num_lists <= MAX_CONTAINERS
    lists = "[" + ",".join(["[]"] * (num_lists - 1)) + "]"
    call = generation_pb2.ToolCall(id="a", name="f", arguments=lists)
    asked = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="assistant", tool_calls=[call])])
    arguments = template_messages(asked, HERMES)[0]["tool_calls"][0]["function"]["arguments"]
    assert arguments == ([[]] * (num_lists - 1) if is_parsed else lists)
    parameters = f'{{"x": {"[" + lists[4:] if is_parsed else lists}}}'
    described = generation_pb2.Chat(tools=[generation_pb2.Tool(name="f", parameters=parameters)])
    if is_parsed:
        assert Tools.of(described, HERMES) is not None
        return
    with pytest.raises(InvalidRequest, match=r"chat\.tools\[0\]\.parameters: .*at most 100000 objects and lists"):
        Tools.of(described, HERMES)
