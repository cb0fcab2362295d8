"""Tools in /v1/chat/completions, as OpenAI's own client sees them, and in gRPC's Chat."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from engine.sampling.params import SamplingParams
from protos.tandem.v1 import common_pb2, generation_pb2
from router.request.chat import template_messages
from router.request.validation import ServedModel
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.api.openai.conftest import HttpRig, RunHttp
from tests.router.rig import SEED

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Looks out.", "parameters": SCHEMA},
}
ADD = {"type": "function", "function": {"name": "add"}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
ARGUMENTS = ['{"city": "Köln"}', '{"city": "Oslo}"}']
CALLS = "".join(f'\n<tool_call>\n{{"name": "get_weather", "arguments": {one}}}\n</tool_call>' for one in ARGUMENTS)
TEXT = f"Let me see.{CALLS}"
USER: Any = {"role": "user", "content": "How is it?"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def writing(text: str, **behaviour: Any) -> dict[str, list[FakeInstance]]:
    """Two pairs of instances whose model writes `text`; the first decode instance behaves as given."""
    return {
        "prefill": [FakeInstance("prefill", behaviour=Behaviour(writes=text))],
        "decode": [
            FakeInstance("decode", "decode-0", behaviour=Behaviour(writes=text, **behaviour)),
            FakeInstance("decode", "decode-1", behaviour=Behaviour(writes=text)),
        ],
    }


async def chat(http: HttpRig, **options: Any) -> Any:
    options = {"messages": [USER], "tools": [WEATHER, ADD], "seed": SEED, **options}
    return await http.openai.chat.completions.create(model="fake", **options)


async def streamed(http: HttpRig, **options: Any) -> tuple[str, list[list[str]], str]:
    """Content, id, name and arguments of each call, and the finish reason."""
    content, calls, reason = "", list[list[str]](), ""
    async for event in await chat(http, stream=True, **options):
        [choice] = event.choices
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            if part.id:
                assert part.index == len(calls)
                calls.append([part.id, part.function.name, ""])
            calls[part.index][2] += part.function.arguments
        reason = choice.finish_reason or reason
    return content, calls, reason


def sent(http: HttpRig) -> common_pb2.InstanceRequest:
    """The last request that an instance got."""
    records = [record for fake in http.rig.decode for record in fake.recorded("decode")]
    request: common_pb2.InstanceRequest = max(records, key=lambda record: record.at_s).detail.request
    return request


async def test_calls_are_part_of_the_message(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        [choice] = (await chat(http)).choices
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert [call.function.arguments for call in choice.message.tool_calls] == ARGUMENTS
        assert {call.function.name for call in choice.message.tool_calls} == {"get_weather"}
        assert len({call.id for call in choice.message.tool_calls}) == 2
        assert all(re.fullmatch("[A-Za-z0-9]{9}", call.id) for call in choice.message.tool_calls)
        assert not sent(http).sampling.WhichOneof("constraint"), "auto, and no tool is strict"
        [choice] = (await chat(http, messages=[USER, choice.message, answer_to(choice.message.tool_calls[0])])).choices
        [choice] = (await chat(http, tools=None)).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (TEXT, None, "stop")


def answer_to(call: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": "sun"}


async def test_a_message_of_calls_alone_has_no_content(run_http: RunHttp) -> None:
    async with run_http(**writing(CALLS)) as http:
        [choice] = (await chat(http)).choices
        assert (choice.message.content, len(choice.message.tool_calls)) == (None, 2)


async def test_a_stream_has_the_same_calls_in_parts(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        content, calls, reason = await streamed(http)
        assert (content, [call[1:] for call in calls]) == ("Let me see.", [["get_weather", one] for one in ARGUMENTS])
        assert reason == "tool_calls"
        events = [event async for event in await chat(http, stream=True)]
        parts = [part for event in events for part in event.choices[0].delta.tool_calls or ()]
        assert len(parts) > 6, "arguments come as they are written"
        assert len(events) < len(TEXT) / 3, "what is held back has no event"
        async with http.openai.chat.completions.stream(
            model="fake",
            messages=[USER],
            tools=[WEATHER],
            seed=SEED,
        ) as stream:
            whole = await stream.get_final_completion()
        assert [call.function.arguments for call in whole.choices[0].message.tool_calls or ()] == ARGUMENTS


@pytest.mark.parametrize("died_at", [5, 14, 26, 40])
async def test_a_stream_that_another_instance_continues_has_the_same_calls(run_http: RunHttp, died_at: int) -> None:
    fleet = writing(TEXT, die_at=died_at)
    fleet["decode"][1].behaviour.num_waiting = 50  # the first one gets the request
    async with run_http(**fleet) as http:
        content, calls, reason = await streamed(http)
        assert http.rig.decode[0].recorded("died")
        assert (content, [call[1:] for call in calls]) == ("Let me see.", [["get_weather", one] for one in ARGUMENTS])
        assert reason == "tool_calls"


async def test_each_choice_has_calls_of_its_own(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        answer = await chat(http, n=2, temperature=1)
        ids = {call.id for choice in answer.choices for call in choice.message.tool_calls}
        assert len(ids) == 4


async def test_max_tokens_in_the_middle_of_a_call_is_length(run_http: RunHttp) -> None:
    async with run_http(**writing(CALLS)) as http:
        [choice] = (await chat(http, max_tokens=20)).choices
        assert choice.finish_reason == "length"
        [call] = choice.message.tool_calls
        assert ARGUMENTS[0].startswith(call.function.arguments)
        assert call.function.arguments != ARGUMENTS[0]


FIRST_END = CALLS.index(ARGUMENTS[0]) + len(ARGUMENTS[0])
SECOND = CALLS.index(ARGUMENTS[1])


@pytest.mark.parametrize("options", [{"stop": ["a stop"]}, {"extra_body": {"stop_token_ids": [7]}}, {}])
@pytest.mark.parametrize(
    ("num_chars", "num_calls", "reason"),
    [
        (FIRST_END - 3, 1, "stop"),
        (FIRST_END, 1, "tool_calls"),
        (SECOND - 30, 1, "tool_calls"),
        (SECOND + 6, 2, "stop"),
        (len(CALLS), 2, "tool_calls"),
    ],
)
async def test_a_stop_string_in_the_middle_of_a_call_is_stop(
    run_http: RunHttp, num_chars: int, num_calls: int, reason: str, options: dict[str, Any]
) -> None:
    """Without one the model itself ended the answer there, and its client reads the call and rejects it."""
    expected = reason if options else "tool_calls"
    fleet = writing(CALLS, stop_at=-(-num_chars // 3) - 1)
    fleet["decode"][1].behaviour.num_waiting = 50  # the first one gets the request
    async with run_http(**fleet) as http:
        [choice] = (await chat(http, **options)).choices
        assert (len(choice.message.tool_calls), choice.finish_reason) == (num_calls, expected)
        assert (await streamed(http, **options))[2] == expected


async def test_without_parallel_calls_there_is_one(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        _, calls, reason = await streamed(http, parallel_tool_calls=False)
        assert ([call[2] for call in calls], reason) == (ARGUMENTS[:1], "tool_calls")


async def test_grpc_has_the_calls_beside_the_text(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        chat = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(**USER)])
        chat.tools.add(name="get_weather", parameters=json.dumps(SCHEMA))
        answer = await http.rig.generate(generation_pb2.GenerateRequest(chat=chat))
        assert answer.text() == TEXT
        assert "".join(response.delta.content for response in answer.responses) == "Let me see."
        parts = [part for response in answer.responses for part in response.delta.tool_calls]
        for index, expected in enumerate(ARGUMENTS):
            assert "".join(part.arguments for part in parts if part.index == index) == expected
        plain = await http.rig.generate(
            generation_pb2.GenerateRequest(chat=generation_pb2.Chat(messages=chat.messages))
        )
        assert not any(response.HasField("delta") for response in plain.responses)


# What the template and the instances get


async def prompt_of(http: HttpRig, model: ServedModel, **options: Any) -> str:
    answer = await chat(http, extra_body={"return_token_ids": True}, **options)
    assert model.tokenizer is not None
    return model.tokenizer.decode(answer.choices[0].model_extra["prompt_token_ids"], skip_special_tokens=False)


async def test_the_template_gets_tools_calls_and_results(run_http: RunHttp, model: ServedModel) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "<eos>"}'}}
    async with run_http(**writing("ok")) as http:
        history = [USER, {"role": "assistant", "tool_calls": [called]}]
        history += [{"role": "tool", "tool_call_id": "c1", "content": "5"}]
        prompt = await prompt_of(http, model, messages=history)
        assert prompt.startswith('<turn>tools: {"name": "get_weather", "description": "Looks out.", "parameters": {')
        assert '<tool_call>{"name": "add", "arguments": {"a": "<eos>"}}</tool_call><eos>' in prompt
        assert "<turn>tool: 5 (add)<eos>" in prompt, "a result has the name of its tool"
        assert "<turn>tools" not in await prompt_of(http, model, tool_choice="none")


def test_a_result_without_an_id_has_the_name_of_no_call() -> None:
    chat = generation_pb2.Chat()
    chat.messages.add(role="assistant").tool_calls.add(name="add", arguments="{}")
    chat.messages.add(role="tool", content="5")
    assert "name" not in template_messages(chat, None)[1]


def call_of(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    begin = f'<tool_call>\n{{"name": "{name}", "arguments": '
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"}


ANY = {"type": "object"}
REQUIRED = {"type": "tags_with_separator", "separator": "\n", "at_least_one": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"tool_choice": "required"},
            {**REQUIRED, "tags": [call_of("get_weather", SCHEMA), call_of("add", ANY)], "stop_after_first": False},
        ),
        (
            {"tool_choice": NAMED, "tools": [ADD, WEATHER]},
            {**REQUIRED, "tags": [call_of("get_weather", SCHEMA)], "stop_after_first": True},
        ),
        (
            {"tools": [STRICT, ADD], "parallel_tool_calls": False},
            {
                **{"type": "triggered_tags", "triggers": ["<tool_call>"], "stop_after_first": True},
                "tags": [call_of("get_weather", SCHEMA), call_of("add", ANY)],
            },
        ),
        (
            {"tools": [ADD], "response_format": {"type": "json_object"}},
            {
                "type": "or",
                "elements": [
                    {"type": "json_schema", "json_schema": ANY},
                    {**REQUIRED, "tags": [call_of("add", ANY)], "stop_after_first": False},
                ],
            },
        ),
    ],
    ids=["required", "named", "strict", "with response_format"],
)
async def test_calls_are_constrained(run_http: RunHttp, options: dict[str, Any], expected: dict[str, Any]) -> None:
    async with run_http(**writing("ok")) as http:
        await chat(http, **options)
        assert json.loads(sent(http).sampling.structural_tag) == {"type": "structural_tag", "format": expected}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_a_prompt_has_the_allowed_tools_alone(run_http: RunHttp) -> None:
    async with run_http(**writing("ok")) as http:
        await chat(http, tool_choice=allowed("add"))
        some = sent(http).prompt_token_ids
        await chat(http, tools=[ADD])
        assert sent(http).prompt_token_ids == some
        await chat(http, tool_choice=allowed("add", mode="required"))
        assert "get_weather" not in sent(http).sampling.structural_tag
        assert '"stop_after_first"' in sent(http).sampling.structural_tag


async def test_agents_may_send_hundreds_of_tools_with_long_names(run_http: RunHttp) -> None:
    """As Claude Code does those of MCP servers; Anthropic allows 128 characters."""
    names = [f"{index:03}".ljust(128, "x") for index in range(512)]
    call = json.dumps({"name": names[-1], "arguments": {}})
    writes = Behaviour(writes=f"<tool_call>{call}</tool_call>")
    async with run_http(prefill=0, decode=[FakeInstance("decode", max_model_len=2**18, behaviour=writes)]) as http:
        [choice] = (await chat(http, tools=[tool(name=name) for name in names])).choices
        assert [call.function.name for call in choice.message.tool_calls] == names[-1:]
        tools = [{"name": name, "input_schema": {"type": "object"}} for name in names]
        answer = await http.post("/v1/messages", messages=[USER], max_tokens=300, tools=tools)
        assert [block["name"] for block in answer.json()["content"]] == names[-1:]


async def test_a_required_call_that_is_cut_before_its_arguments_is_no_content(run_http: RunHttp) -> None:
    async with run_http(**writing('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')) as http:
        for max_tokens in range(1, 18):
            [choice] = (await chat(http, tool_choice="required", max_tokens=max_tokens)).choices
            assert not choice.message.content


def called(**call: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f"}, **call}]}]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [tool(name="a b")]}, "tools[0].name", "'a b' is not a name; allowed: 1..128 of"),
    ({"tools": [tool(), tool()]}, "tools", "two tools have the same name"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].parameters", "is not the JSON schema of an object"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "should be 'function'"),
    ({"tools": [tool(name="f" * 129)]}, "tools[0].name", "is not a name; allowed: 1..128 of"),
    ({"tools": [tool(name=f"f{i}") for i in range(513)]}, "tools", "513 tools; allowed: at most 512"),
    ({"tools": [tool(strict=True, parameters={"not": {}})]}, "tools[0].parameters", "at /: not is not supported"),
    ({"tools": [tool(parameters={"not": {}})], "tool_choice": "required"}, "tools[0].parameters", "not is not"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "requires a call, but there are no tools"),
    ({"tool_choice": "always"}, "tool_choice", "'always' is not supported; allowed: auto, none, required, {"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "is not supported; allowed: auto"),
    ({"tool_choice": {"type": "function", "function": {"name": ""}}}, "tool_choice", "is not supported"),
    ({"extra_body": {"structured_outputs": {"choice": ["a\n", "b\tc"]}}}, "structured_outputs", r"'b\tc' has control"),
    ({"tool_choice": allowed("g")}, "tool_choice", "'g' is not in tools; allowed: get_weather, add"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g' is not in tools"),
    ({"messages": called(function={"arguments": "{}"})}, "messages[1].tool_calls[0].function.name", "is required"),
    ({"messages": [USER, {"role": "tool", "content": "5"}]}, "messages", "no tool_call_id"),
    ({"messages": [{**called()[1], "role": "user", "content": "x"}]}, "messages[0].tool_calls", "role assistant"),
]  # fmt: skip


async def test_invalid_tools_are_named(run_http: RunHttp) -> None:
    async with run_http() as http:
        for options, param, said in WRONG:
            with pytest.raises(openai.BadRequestError) as raised:
                await chat(http, **options)
            assert (raised.value.param, said in raised.value.message) == (param, True), raised.value


async def test_a_required_call_never_reaches_an_instance_that_would_ignore_its_constraint(run_http: RunHttp) -> None:
    async with run_http(**writing(CALLS, constraints=["json_schema"])) as http:
        for _ in range(8):
            await chat(http, tool_choice="required")
        old, new = (len(fake.recorded("decode")) for fake in http.rig.decode)
        assert (old, new) == (0, 8)
    fleet = writing(CALLS, constraints=["json_schema"])
    async with run_http(prefill=fleet["prefill"], decode=fleet["decode"][:1]) as http:
        with pytest.raises(openai.InternalServerError, match="no decode instance supports structural_tag"):
            await chat(http, tool_choice="required")
        await chat(http)


@pytest.mark.parametrize(
    "fields",
    [
        {"json_object": True},
        {"json": {"type": "object", "properties": {"at": {"type": "string", "pattern": r"\d+(\.\d+)?"}}}},
        {"regex": "a.b"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_calls_beside_a_constraint_are_one_that_instances_take(run_http: RunHttp, fields: dict[str, Any]) -> None:
    async with run_http(**writing(CALLS)) as http:
        await chat(http, extra_body={"structured_outputs": fields})
        constraint = SamplingParams(structural_tag=sent(http).sampling.structural_tag).constraint
        assert constraint is not None
        assert constraint.kind == "structural_tag"
