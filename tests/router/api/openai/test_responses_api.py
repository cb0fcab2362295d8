"""/v1/responses as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest

from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai.responses_api import ResponsesBuilder, ResponsesRequest
from router.request.validation import ServedModel
from serving.errors import InvalidArgument
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.api.openai.conftest import HttpRig, RunHttp
from tests.router.api.openai.test_tools import ARGUMENTS, SCHEMA, TEXT, sent, writing
from tests.router.rig import SHORT, slow
from tests.waiting import until

TOOL: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}


async def respond(http: HttpRig, **options: Any) -> Any:
    return await http.openai.responses.create(**{"model": "fake", "input": "How is it?", "tools": [TOOL], **options})


async def test_text_and_calls_are_items(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        response = await respond(http)
        assert (response.status, response.output_text, response.object) == ("completed", "Let me see.", "response")
        message, *calls = response.output
        assert (message.type, message.role) == ("message", "assistant")
        assert [(call.type, call.name, call.arguments) for call in calls] == [
            ("function_call", "get_weather", arguments) for arguments in ARGUMENTS
        ]
        assert len({call.call_id for call in calls}) == 2
        assert response.usage.output_tokens == (len(TEXT) + 2) // 3
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


async def test_a_stream_of_events_makes_the_same_response(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        events = [event async for event in await respond(http, stream=True)]
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == "Let me see."
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.arguments for event in done] == ARGUMENTS
        parts = [event for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(event.delta for event in parts) == "".join(ARGUMENTS)
        assert [item.type for item in events[-1].response.output] == ["message", "function_call", "function_call"]
        async with http.openai.responses.stream(model="fake", input="How is it?", tools=[TOOL]) as stream:
            final = await stream.get_final_response()
        assert final.output_text == "Let me see."


async def test_an_error_in_mid_stream_is_openais_event_and_raises_in_its_client(run_http: RunHttp) -> None:
    async with run_http(prefill=0, decode=[FakeInstance("decode", behaviour=Behaviour(fail_at=3))]) as http:
        body = {"model": "fake", "input": "How is it?", "stream": True}
        text = (await http.http.post("/v1/responses", json=body)).text
        *events, last = text.removesuffix("\n\n").split("\n\n")
        name, data = last.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == "event: error"
        members = {"message": "internal error", "param": None, "code": None}
        error = {**members, "type": "server_error"}
        assert event == {**members, "type": "error", "sequence_number": len(events), "error": error}
        with pytest.raises(openai.APIError, match="internal error"):
            async for _ in await respond(http, stream=True):
                pass


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "text": {"format": {"type": "json_object"}}}, "text"),
    ],
)
def test_what_an_instance_cannot_compile_has_the_clients_name(options: dict[str, Any], name: str) -> None:
    body = ResponsesRequest.parse(json.dumps({"model": "fake", "input": "x", **options}).encode())
    assert body.client_names()["request.sampling"] == name


async def test_an_answer_that_is_cut_is_incomplete(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        response = await respond(http, tools=[], max_output_tokens=3)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [item.status for item in response.output] == ["incomplete"]


async def test_the_item_that_is_cut_is_incomplete(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        cut = (TEXT.index(ARGUMENTS[1]) + 6) // 3
        events = [event async for event in await respond(http, stream=True, max_output_tokens=cut)]
        done = [event.item.status for event in events if event.type == "response.output_item.done"]
        assert done == ["completed", "completed", "incomplete"]
        assert [item.status for item in events[-1].response.output] == done


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_is_cancelled(run_http: RunHttp, stream: bool) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    events: list[Any] = []
    async with run_http(prefill=0, decode=[decode]) as http:

        async def last() -> Any:
            options = {"tools": [], "max_output_tokens": 2000, "extra_headers": {"X-Request-Id": "mine"}}
            answer = await respond(http, stream=stream, **options)
            if not stream:
                return answer
            async for event in answer:
                events.append(event)
            return events[-1]

        answering = asyncio.create_task(last())
        await decode.until("token", 3)
        if stream:
            await until(lambda: any(event.type == "response.output_text.delta" for event in events))
        await http.rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["mine"]))
        answer = await answering
        if stream:
            assert answer.type == "response.failed"
            answer = answer.response
            assert answer.output_text
            assert answer.output[-1].status == "incomplete"
        assert (answer.status, answer.incomplete_details, answer.error) == ("cancelled", None, None)


async def test_earlier_items_become_messages(run_http: RunHttp, model: ServedModel) -> None:
    async with run_http(**writing(TEXT)) as http:
        first = await respond(http)
        call = first.output[1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        question = {"role": "user", "content": [{"type": "input_text", "text": "How is it?"}]}
        await respond(http, input=[question, *first.output[:2], result], instructions="Be brief.", tools=[])
        assert model.tokenizer is not None
        prompt = model.tokenizer.decode(sent(http).prompt_token_ids, skip_special_tokens=False)
        assert prompt == (
            "<turn>system: Be brief.<eos><turn>user: How is it?<eos><turn>assistant: Let me see."
            f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS[0]}}}</tool_call><eos>'
            "<turn>tool: sun (get_weather)<eos><turn>assistant: "
        )


async def test_a_text_format_and_a_tool_choice_are_constraints(run_http: RunHttp) -> None:
    async with run_http(**writing("{}")) as http:
        form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
        await respond(http, tools=[], text={"format": form})
        assert '"city"' in sent(http).sampling.json_schema
        await respond(http, tool_choice={"type": "function", "name": "get_weather"})
        assert '"stop_after_first": true' in sent(http).sampling.structural_tag
        chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
        response = await respond(http, tool_choice=chosen)
        assert '"stop_after_first": false' in sent(http).sampling.structural_tag
        assert response.tool_choice.tools == chosen["tools"]


SEARCH = {"type": "web_search", "external_web_access": False}


@pytest.mark.parametrize("search", [SEARCH, {"type": "web_search_preview"}], ids=lambda tool: tool["type"])
async def test_an_allowed_web_search_has_no_effect(run_http: RunHttp, search: dict[str, Any]) -> None:
    async with run_http(**writing("{}")) as http:
        function = {"type": "function", "name": "get_weather"}
        asked: dict[str, Any] = {"tools": [TOOL, {**TOOL, "name": "add"}, search]}
        allowed = {"type": "allowed_tools", "mode": "auto"}
        await respond(http, **asked, tool_choice={**allowed, "tools": [function]})
        alone = sent(http).prompt_token_ids
        for tools in ([function, search], [search, function]):
            response = await respond(http, **asked, tool_choice={**allowed, "tools": tools})
            assert sent(http).prompt_token_ids == alone
            assert [tool["type"] for tool in response.tool_choice.tools] == [tool["type"] for tool in tools]
        await respond(http, **asked, tool_choice={**allowed, "mode": "required", "tools": [search, function]})
        assert "get_weather" in sent(http).sampling.structural_tag
        assert '"add' not in sent(http).sampling.structural_tag


async def test_logprobs_are_those_of_a_texts_tokens(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        [text, *_] = (await respond(http, **asked)).output
        [part] = text.content
        assert part.text == "Let me see."
        assert len(part.logprobs) == 4, "the fake model writes three characters a token"
        assert all(len(entry.top_logprobs) == 1 for entry in part.logprobs)
        events = [event async for event in await respond(http, stream=True, **asked)]
        streamed = [entry for event in events if event.type.endswith("text.delta") for entry in event.logprobs]
        assert len(streamed) == 4
        [done] = [event for event in events if event.type == "response.output_text.done"]
        assert [entry.token for entry in done.logprobs] == [entry.token for entry in streamed]
        [plain, *_] = (await respond(http)).output
        assert plain.content[0].logprobs is None


async def test_what_changes_no_answer_is_accepted(run_http: RunHttp) -> None:
    async with run_http(**writing("ok")) as http:
        response = await respond(
            http, truncation="auto", store=True, prompt_cache_retention="24h", include=["reasoning.encrypted_content"],
            reasoning={"generate_summary": "auto"}, tools=[{**TOOL, "defer_loading": False}],
            input=[
                {"role": "user", "content": "How is it?"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot see."}]},
            ],
        )  # fmt: skip
        assert response.output_text == "ok"
        assert response.usage.input_tokens_details.cache_write_tokens == 0


def test_vllms_parameters_are_those_of_a_chat() -> None:
    sampling = {"seed": 7, "top_k": 5, "min_p": 0.5, "repetition_penalty": 1.5, "ignore_eos": True}
    texts = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    others = {"stop": "END", "cache_salt": "s", "priority": 3}
    body = ResponsesRequest.parse(json.dumps({"input": "hi", **sampling, **texts, **others}).encode())
    [request] = body.requests("r")
    for name, value in {**sampling, **texts}.items():
        assert getattr(request.sampling, name) == pytest.approx(value)
    assert (request.sampling.stop, request.cache_salt, request.priority) == (["END"], "s", -3)
    with pytest.raises(InvalidArgument, match=r"^top_k: "):
        ResponsesRequest.parse(b'{"input": "hi", "top_k": "many"}')


def test_what_newer_clients_add_changes_no_request() -> None:
    plain: dict[str, Any] = {"input": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    full: dict[str, Any] = {
        "input": [{"type": None, "role": "user", "content": "x"}],
        "tools": [{**TOOL, "allowed_callers": ["direct"], "output_schema": {"type": "string"}}],
        "reasoning": {"context": "auto", "mode": "standard"},
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    }
    bodies = [ResponsesRequest.parse(json.dumps(body).encode()) for body in (plain, full)]
    assert bodies[0].requests("label") == bodies[1].requests("label")


REFERENCE = "'item_reference' is not supported: nothing is stored; allowed: the item itself (of clients: the option "


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "is of type 'input_image'"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "'web_search_call' is not supported"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", REFERENCE),
        ({"input": [{"role": "user", "content": "x"}, {"id": "msg_1"}]}, "input[1].type", REFERENCE),
        ({"input": [{"type": None, "id": "msg_1"}]}, "input[0].type", REFERENCE),
        ({"input": [{"type": "message", "id": "msg_1"}]}, "input[0].role", "is not a string"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].arguments", "is not a string"),
        ({"instructions": "s", "input": [{"role": "user", "content": 5}]}, "input[0].content", "5 is not a string"),
        ({"instructions": "s", "input": [{"role": "owl", "content": "x"}]}, "input", "'owl'"),
        ({"input": [{"type": "function_call_output", "call_id": "", "output": "x"}]}, "input", "no tool_call_id"),
        (
            {"tools": [{"type": "file_search"}]},
            "tools",
            "'file_search' is no type of a supported tool; allowed: function",
        ),
        ({"tools": [{"type": ["function"]}]}, "tools", "is no type of a supported tool"),
        ({"tools": [TOOL, {"type": "function", "name": 5}]}, "tools[1].name", "should be a valid string"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]},
            "tools[0].tools[0].type",
            "'f",
        ),
        ({"tools": [{"type": "web_search"}, {**TOOL, "name": "bad name!"}]}, "tools", "bad name!"),
        ({"extra_body": {"<x>": 1}}, "<x>", "not permitted"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "'low', 'medium' or 'high'"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g' is not in tools"),
        ({"tool_choice": {"type": "function", "name": ""}}, "tool_choice", "is not supported; allowed: auto"),
        (
            {"tools": [TOOL, SEARCH], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]}},
            "tool_choice",
            "is not supported; allowed: auto",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            "tool_choice",
            "is not supported; allowed: auto",
        ),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "'auto' or 'current_turn'"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "'standard'"),
        ({"tools": [{**TOOL, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers[0]", "'direct'"),
        ({"input": ["x"]}, "input", "allowed: a text, or a list of items"),
        ({"temperature": 7}, "temperature", "0..2"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"extra_body": {"colour": 1}}, "colour", "not permitted"),
    ],
)
async def test_a_wrong_parameter_is_named(run_http: RunHttp, options: dict[str, Any], param: str, said: str) -> None:
    async with run_http() as http:
        with pytest.raises(openai.BadRequestError) as raised:
            await respond(http, **options)
        assert said in raised.value.message
        assert raised.value.param == param
        assert (await http.openai.completions.create(model="fake", prompt=SHORT, max_tokens=1)).choices


@pytest.mark.parametrize("mark", [[b"</", b"", b"think", b">"], [b"</think>"]])
def test_white_space_in_a_thought_is_not_read_again_with_each_token(mark: list[bytes]) -> None:
    data = dict(enumerate([b"a", *[b"\n"] * 1000, *mark, b"\n\n"]))
    texts: Any = SimpleNamespace(data_or_text=data.__getitem__)
    body = ResponsesRequest.parse(b'{"input": "x"}')
    builder: Any = ResponsesBuilder(cast(Any, SimpleNamespace(answer_id="x")), body, "fake", texts)
    for token_id in data:
        builder._num_tokens += 1
        builder._count_thinking(generation_pb2.GenerateResponse(tokens=common_pb2.TokenChunk(token_ids=[token_id])))
        assert len(builder._behind_thought) <= 65
        if builder._is_thought_over:
            break
    assert (builder._is_thought_over, builder._num_thinking) == (True, 1001 + len(mark))
