r"""Calls whose arguments have half of a surrogate pair, "\ud83c": legal JSON that no UTF-8 can express."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.text.chat_template import parsed_arguments
from router.request.validation import ServedModel
from tests.router.api.openai.conftest import HttpRig, RunHttp
from tests.router.api.openai.test_tools import USER, WEATHER, answer_to, chat, prompt_of, sent, streamed, writing

WRITTEN = r'{"city": "Köln \ud83c"}'
READ = {"city": "Köln \ufffd"}
IN_ORDER = f'<tool_call>{{"name": "get_weather", "arguments": {WRITTEN}}}</tool_call>'
REVERSED = f'<tool_call>{{"arguments": {WRITTEN}, "name": "get_weather"}}</tool_call>'
AS_TEXT = f'<tool_call>{{"arguments": {json.dumps(WRITTEN, ensure_ascii=False)}, "name": "get_weather"}}</tool_call>'
TWICE = r'<tool_call>{"arguments": "{\"city\": \"Köln \ud83c\"}", "name": "get_weather"}</tool_call>'
EACH = pytest.mark.parametrize("text", [IN_ORDER, REVERSED, AS_TEXT, TWICE], ids=["", "reversed", "text", "escaped"])


@EACH
async def test_a_chat_has_the_call_and_goes_on(run_http: RunHttp, model: ServedModel, text: str) -> None:
    async with run_http(**writing(text)) as http:
        [choice] = (await chat(http)).choices
        [call] = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", WRITTEN)
        _, [streamed_call], reason = await streamed(http)
        assert (streamed_call[2], reason) == (WRITTEN, "tool_calls")
        prompt = await prompt_of(http, model, messages=[USER, choice.message, answer_to(call)])
        assert json.dumps(READ, ensure_ascii=False) in prompt


@EACH
async def test_a_response_has_the_call_and_goes_on(run_http: RunHttp, model: ServedModel, text: str) -> None:
    async with run_http(**writing(text)) as http:
        tool: Any = {"type": "function", **WEATHER["function"]}
        body: dict[str, Any] = {"model": "fake", "input": [USER], "tools": [tool]}
        [call] = (await http.openai.responses.create(**body)).output
        assert call.arguments == WRITTEN
        events = [event async for event in await http.openai.responses.create(**body, stream=True)]
        assert events[-1].response.output[0].arguments == WRITTEN
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        await http.openai.responses.create(**{**body, "input": [USER, call.to_dict(), output]})
        assert json.dumps(READ, ensure_ascii=False) in prompt_sent(http, model)


@EACH
async def test_a_message_has_the_call_and_goes_on(run_http: RunHttp, model: ServedModel, text: str) -> None:
    async with run_http(**writing(text)) as http:
        tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
        body: dict[str, Any] = {"model": "fake", "messages": [USER], "max_tokens": 200, "tools": [tool]}
        whole = await http.post("/v1/messages", **body)
        assert whole.status_code == 200, whole.text
        [call] = whole.json()["content"]
        assert call["input"] == READ
        lines = (await http.post("/v1/messages", **body, stream=True)).text.splitlines()
        deltas = [json.loads(line[6:]).get("delta", {}) for line in lines if line.startswith("data: ")]
        assert "".join(delta.get("partial_json", "") for delta in deltas) == WRITTEN
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sun"}
        turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        assert (await http.post("/v1/messages", **{**body, "messages": turns})).status_code == 200
        assert json.dumps(READ, ensure_ascii=False) in prompt_sent(http, model)


def prompt_sent(http: HttpRig, model: ServedModel) -> str:
    assert model.tokenizer is not None
    return model.tokenizer.decode(sent(http).prompt_token_ids, skip_special_tokens=False)


async def test_a_name_with_half_a_pair_is_no_call(run_http: RunHttp) -> None:
    text = r'<tool_call>{"arguments": {}, "name": "get_\ud83c"}</tool_call>'
    async with run_http(**writing(text)) as http:
        [choice] = (await chat(http)).choices
        assert (choice.message.content, choice.message.tool_calls) == (text, None)


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        (r'{"\udc00": ["\ud83c", "\\ud83c"]}', {"\ufffd": ["\ufffd", r"\ud83c"]}),
        (r'{"a": "\ud83d\ude00"}', {"a": "\U0001f600"}),
        (r'{"a": "\ud83c', r'{"a": "\ud83c'),
    ],
    ids=["half", "pair", "cut"],
)
def test_half_a_pair_is_a_replacement_character_for_templates(arguments: str, parsed: Any) -> None:
    assert parsed_arguments(arguments) == parsed
