"""What tools make of a chat's parameters."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.sampling.constraints import MAX_CONSTRAINT_BYTES
from engine.sampling.params import SamplingParams
from engine.text.chat_output import HERMES
from protos.tandem.v1 import generation_pb2
from router.request.chat import ChatOutput, Tools

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
