"""/v1/messages as Anthropic's own client sees it. It is imported late: in seconds, and in one worker alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from protos.tandem.v1 import generation_pb2
from router.api.openai.messages_api import MessagesRequest
from router.request.validation import ServedModel
from tests.fakes.instance import FakeInstance
from tests.router.api.openai.conftest import NO_TLS, HttpRig, RunHttp
from tests.router.api.openai.test_tools import ARGUMENTS, CALLS, FIRST_END, SCHEMA, TEXT, sent, writing
from tests.router.api.test_security import ALICE, write_tokens
from tests.router.rig import TIMEOUT_S, slow

if TYPE_CHECKING:
    import anthropic

TOOL: dict[str, Any] = {"name": "get_weather", "description": "Looks out.", "input_schema": SCHEMA}
USER: dict[str, Any] = {"role": "user", "content": "How is it?"}
RESULT_5 = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": 5}]}


@asynccontextmanager
async def client_of(http: HttpRig, token: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    options: dict[str, Any] = {"http_client": anthropic.DefaultAsyncHttpxClient(verify=NO_TLS), "max_retries": 0}
    async with anthropic.AsyncAnthropic(base_url=http.url, api_key=token, timeout=TIMEOUT_S, **options) as client:
        yield client


def asking(**options: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [USER], "max_tokens": 300, "tools": [TOOL], **options}


async def test_text_and_calls_are_content_blocks(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http, client_of(http) as client:
        message = await client.messages.create(**asking())
        text, *calls = message.content
        assert (text.text, message.stop_reason, message.role) == ("Let me see.", "tool_use", "assistant")
        assert [(call.type, call.name, call.input) for call in calls] == [
            ("tool_use", "get_weather", json.loads(arguments)) for arguments in ARGUMENTS
        ]
        assert message.usage.output_tokens == (len(TEXT) + 2) // 3
        plain = await client.messages.create(**asking(tools=[]))
        assert (plain.content[0].text, plain.stop_reason) == (TEXT, "end_turn")


async def test_a_stream_makes_the_same_message(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http, client_of(http) as client:
        async with client.messages.stream(**asking()) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        assert [block.input for block in message.content[1:]] == [json.loads(one) for one in ARGUMENTS]
        assert message.stop_reason == "tool_use"
        assert message.usage.input_tokens > 0


async def test_arguments_that_max_tokens_cuts_are_marked(run_http: RunHttp) -> None:
    async with run_http(**writing(CALLS)) as http, client_of(http) as client:
        message = await client.messages.create(**asking(max_tokens=20))
        assert message.stop_reason == "max_tokens"
        [call] = message.content
        assert ARGUMENTS[0].startswith(call.input["INVALID_JSON"])


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
async def test_arguments_with_numbers_that_json_lacks_are_marked(run_http: RunHttp, value: str) -> None:
    """As numbers they would be null."""
    arguments = f'{{"city": {value}}}'
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    async with run_http(**writing(text)) as http, client_of(http) as client:
        [call] = (await client.messages.create(**asking())).content
        assert call.input == {"INVALID_JSON": arguments}


@pytest.mark.parametrize(
    ("num_chars", "ending"), [(FIRST_END - 3, ("stop_sequence", "a stop")), (FIRST_END, ("tool_use", None))]
)
async def test_a_stop_sequence_behind_a_call_leaves_it_to_be_run(
    run_http: RunHttp, num_chars: int, ending: tuple[str, str | None]
) -> None:
    """As in chats: an agent runs the tool only for this reason. A call that it cuts is none to run."""
    fleet = writing(CALLS, stop_at=-(-num_chars // 3) - 1)
    fleet["decode"][1].behaviour.num_waiting = 50  # the first one gets the request
    async with run_http(**fleet) as http, client_of(http) as client:
        options = asking(stop_sequences=["a stop"])
        message = await client.messages.create(**options)
        assert [block.type for block in message.content] == ["tool_use"]
        assert (message.stop_reason, message.stop_sequence) == ending
        async with client.messages.stream(**options) as stream:
            message = await stream.get_final_message()
        assert (message.stop_reason, message.stop_sequence) == ending


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_is_an_error(run_http: RunHttp, stream: bool) -> None:
    from anthropic import APIStatusError

    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run_http(prefill=0, decode=[decode]) as http, client_of(http) as client:
        kinds = list[str]()

        async def read() -> None:
            options = asking(max_tokens=2000, tools=[], extra_headers={"X-Request-Id": "mine"})
            answer = await client.messages.create(stream=stream, **options)
            assert stream, "a whole answer is an error"
            async for event in answer:
                kinds.append(event.type)

        reading = asyncio.create_task(read())
        await decode.until("token", 3)
        await http.rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["mine"]))
        with pytest.raises(APIStatusError) as raised:
            await reading
        body: Any = raised.value.body
        assert (body["type"], body["request_id"]) == ("error", "mine")
        assert "aborted" in body["error"]["message"]
        assert stream or raised.value.status_code == 409
        assert "message_stop" not in kinds


async def test_earlier_blocks_become_messages(run_http: RunHttp, model: ServedModel) -> None:
    async with run_http(**writing(TEXT)) as http, client_of(http) as client:
        first = await client.messages.create(**asking())
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sun"}]}
            for block in first.content[1:]
        ]
        answered = {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]}
        history = [USER, {"role": "assistant", "content": first.content}, answered]
        await client.messages.create(**asking(messages=history, system="Be brief.", tools=[]))
        assert model.tokenizer is not None
        prompt = model.tokenizer.decode(sent(http).prompt_token_ids, skip_special_tokens=False)
        calls = "".join(
            f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>' for arguments in ARGUMENTS
        )
        assert prompt == (
            f"<turn>system: Be brief.<eos><turn>user: How is it?<eos><turn>assistant: Let me see.{calls}<eos>"
            + "<turn>tool: sun (get_weather)<eos>" * 2
            + "<turn>user: So?<eos><turn>assistant: "
        )


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"content": [{"type": "text", "text": "no such city"}], "is_error": True}, "Error: no such city"),
        ({"content": "Error: no such city", "is_error": True}, "Error: no such city"),
        ({"is_error": True}, "Error"),
        ({"content": "sun", "is_error": False}, "sun"),
        ({"content": "sun", "is_error": None}, "sun"),
        ({}, ""),
    ],
)
def test_the_result_of_a_tool_that_failed_says_so(result: dict[str, Any], text: str) -> None:
    call = {"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}
    answered = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", **result}]}
    history = [USER, {"role": "assistant", "content": [call]}, answered]
    body = MessagesRequest.parse(json.dumps(asking(messages=history)).encode())
    assert body.chat()["messages"][-1] == {"role": "tool", "tool_call_id": "t", "content": text}


async def test_a_tool_choice_is_a_constraint(run_http: RunHttp) -> None:
    async with run_http(**writing("ok")) as http, client_of(http) as client:
        for choice, is_single in (({"type": "any"}, False), ({"type": "tool", "name": "get_weather"}, True)):
            await client.messages.create(**asking(tool_choice=choice))
            tag = json.loads(sent(http).sampling.structural_tag)["format"]
            assert (tag["type"], tag["stop_after_first"]) == ("tags_with_separator", is_single)


async def test_an_output_format_is_a_constraint(run_http: RunHttp) -> None:
    async with run_http(**writing("{}")) as http, client_of(http) as client:
        form = {"type": "json_schema", "schema": SCHEMA}
        await client.messages.create(**asking(tools=[], output_config={"format": form}))
        assert '"city"' in sent(http).sampling.json_schema


@pytest.mark.parametrize(("effort", "variable"), [("low", "low"), ("max", "xhigh")])
def test_an_effort_is_a_variable_of_the_template(effort: str, variable: str) -> None:
    body = MessagesRequest.parse(json.dumps(asking(output_config={"effort": effort})).encode())
    [request] = body.requests("label")
    assert json.loads(request.chat.template_variables) == {"reasoning_effort": variable}


async def test_what_changes_no_answer_is_accepted(run_http: RunHttp) -> None:
    async with run_http(**writing("ok")) as http, client_of(http) as client:
        tool = {**TOOL, "eager_input_streaming": True, "defer_loading": False, "allowed_callers": ["direct"]}
        options = asking(tools=[tool], extra_body={"cache_control": {"type": "ephemeral"}})
        message = await client.messages.create(**options)
        assert message.content
        assert message._request_id


async def test_a_client_of_threads_learns_that_there_are_none(run_http: RunHttp) -> None:
    """Its library sends whole conversations when it reads this code."""
    from anthropic import BadRequestError

    async with run_http() as http, client_of(http) as client:
        with pytest.raises(BadRequestError) as raised:
            await client.messages.create(**asking(extra_body={"thread": {"type": "create"}}))
        body: Any = raised.value.body
        assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_tokens_are_counted(run_http: RunHttp) -> None:
    async with run_http(**writing("ok")) as http, client_of(http) as client:
        prompt = {name: value for name, value in asking(system="Be brief.").items() if name != "max_tokens"}
        counted = await client.messages.count_tokens(**prompt)
        message = await client.messages.create(**asking(system="Be brief."))
        used = message.usage
        assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


async def test_a_key_is_a_token(run_http: RunHttp, tmp_path: Path) -> None:
    from anthropic import AuthenticationError

    tokens = write_tokens(tmp_path / "tokens", alice=[ALICE])
    async with run_http(auth={"tokens_file": tokens}, **writing("ok")) as http:
        async with client_of(http, ALICE) as client:
            assert (await client.messages.create(**asking())).content
        async with client_of(http, "unknown") as client:
            with pytest.raises(AuthenticationError):
                await client.messages.create(**asking())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "max_tokens >= 1"),
        ({"extra_body": {"temperature": 7}}, "temperature: "),
        ({"system": [{"type": "refusal", "refusal": "no"}]}, "system: content[0] is of type 'refusal'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type: 'image'"),
        ({"system": "s", "messages": [RESULT_5]}, "messages[0].content[0].content: 5 is not a string"),
        (
            {"messages": [USER, {"role": "assistant", "content": "It is"}]},
            "messages: the last one is of role assistant",
        ),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice: 'g' is not in tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: belongs to type tool"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice: requires a call, but there are no tools"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format: "),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name: 'a b' is not a name"),
        ({"extra_body": {"colour": 1}}, "colour: 1: extra inputs are not permitted"),
    ],
)
async def test_a_wrong_parameter_is_named(run_http: RunHttp, options: dict[str, Any], said: str) -> None:
    from anthropic import BadRequestError, NotFoundError

    async with run_http() as http, client_of(http) as client:
        with pytest.raises(BadRequestError) as raised:
            await client.messages.create(**asking(**options))
        body: Any = raised.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert said in body["error"]["message"]
        with pytest.raises(NotFoundError):
            await client.messages.create(**{**asking(), "model": "gpt-9"})
