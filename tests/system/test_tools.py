"""Tools on a real stack: calls that a constraint requires of the demo model, by OpenAI's own client, and an agent."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.system.stacks import Stack, on_stack

pytestmark = [on_stack("demo"), pytest.mark.usefixtures("shared_stack")]


class Calculate(pydantic.BaseModel):
    """Computes with two numbers."""

    operation: Literal["add", "multiply"]
    a: int = pydantic.Field(ge=0, le=99)
    b: int = pydantic.Field(ge=0, le=99)


TOOL: Any = openai.pydantic_function_tool(Calculate, name="calculate")
OPERATIONS = {"add": operator.add, "multiply": operator.mul}
ASK: list[Any] = [{"role": "user", "content": "What is 17 plus 25?"}]


@pytest.fixture
def client(shared_stack: Stack) -> Iterator[openai.OpenAI]:
    url = f"http://{shared_stack.rig.stack.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as client:
        yield client


def result_of(arguments: str) -> str:
    call = Calculate.model_validate_json(arguments)
    return str(OPERATIONS[call.operation](call.a, call.b))


def test_an_agent_calls_its_tool_three_times_and_answers(client: openai.OpenAI) -> None:
    messages = list(ASK)
    for _ in range(3):
        answer = client.chat.completions.create(
            model="demo", messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, seed=5
        )
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        messages.append(choice.message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call.function.arguments)})
    answer = client.chat.completions.create(model="demo", messages=messages, tools=[TOOL], max_tokens=20)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 100, "the tools and their results are part of the prompt"


Digits = Annotated[int, pydantic.Field(ge=0, le=99)]


class Report(pydantic.BaseModel):
    """The answer to the question."""

    total: int


async def test_pydantic_ais_agent_runs_its_tool_until_it_reports(shared_stack: Stack) -> None:
    """Its loop, its schemas and its parsing. It requires a call in each turn; the hooks leave it one tool."""
    # Here, since it takes half a second: not in every process that collects the tests.
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    computed: list[int] = []

    async def before_the_third(_: Any, tools: list[Any]) -> list[Any]:
        return tools if len(computed) < 3 else []

    async def after_the_third(_: Any, tools: list[Any]) -> list[Any]:
        return tools if len(computed) >= 3 else []

    provider = OpenAIProvider(base_url=f"http://{shared_stack.rig.stack.http_address}/v1", api_key="none")
    agent = Agent(
        OpenAIChatModel("demo", provider=provider),
        output_type=ToolOutput(Report, name="report"),
        model_settings={"seed": 5, "max_tokens": 300, "parallel_tool_calls": False},
        capabilities=[PrepareTools(before_the_third), PrepareOutputTools(after_the_third)],
    )

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def calculate(operation: Literal["add", "multiply"], a: Digits, b: Digits) -> int:
        """Computes with two numbers."""
        computed.append(OPERATIONS[operation](a, b))
        return computed[-1]

    result = await agent.run("What is 17 plus 25?")
    await provider.client.close()
    assert isinstance(result.output, Report)
    parts = [part for message in result.all_messages() for part in message.parts]
    assert [part.content for part in parts if part.part_kind == "tool-return"][:3] == computed
    assert len(computed) == 3


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "calculate"}}])
def test_openais_helpers_stream_and_parse_a_required_call(client: openai.OpenAI, choice: Any) -> None:
    with client.chat.completions.stream(
        model="demo", messages=ASK, tools=[TOOL], tool_choice=choice, seed=3, parallel_tool_calls=False
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    whole = client.chat.completions.parse(
        model="demo", messages=ASK, tools=[TOOL], tool_choice=choice, seed=3, parallel_tool_calls=False
    )
    parsed = whole.choices[0].message.tool_calls
    assert streamed
    assert parsed
    assert [call.function.arguments for call in streamed] == [call.function.arguments for call in parsed]
    assert all(isinstance(call.function.parsed_arguments, Calculate) for call in parsed)


def test_a_tool_that_is_not_called_leaves_the_answer_text(client: openai.OpenAI) -> None:
    """The demo model makes no calls of its own."""
    answer = client.chat.completions.create(model="demo", messages=ASK, tools=[TOOL], max_tokens=30, temperature=0)
    [choice] = answer.choices
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert choice.finish_reason != "tool_calls"


def test_references_in_a_required_tools_schema_are_followed(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "$defs": {"point": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}},
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
    }
    tool: Any = {"type": "function", "function": {"name": "move", "parameters": schema}}
    answer = client.chat.completions.create(
        model="demo", messages=ASK, tools=[tool, TOOL], tool_choice="required", parallel_tool_calls=False, seed=1
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    if call.function.name == "move":
        jsonschema.validate(json.loads(call.function.arguments), schema)
    else:
        assert result_of(call.function.arguments)
