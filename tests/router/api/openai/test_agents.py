"""Requests as agent frameworks send them: Claude Code, Codex, and openai-python with parsed answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from protos.tandem.v1 import generation_pb2
from router.api.openai.messages_api import CountTokensRequest, MessagesRequest
from router.api.openai.requests import Body, ChatBody
from router.api.openai.responses_api import ResponsesRequest
from router.request.validation import ServedModel
from tests.router.api.openai.conftest import HttpRig, RunHttp
from tests.router.api.openai.test_tools import ARGUMENTS, SCHEMA, TEXT, sent, writing

USER: dict[str, Any] = {"role": "user", "content": "How is it?"}
MESSAGES = "/v1/messages?beta=true"
COUNT = "/v1/messages/count_tokens?beta=true"
CLAUDE_CODE: dict[str, Any] = {
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "diagnostics": {"previous_message_id": None},
    "speed": "standard",
    "tools": [{"name": "get_weather", "input_schema": SCHEMA, "input_examples": [{"city": "Paris"}]}],
}
CODEX: dict[str, Any] = {
    "client_metadata": {"x-codex-installation-id": "u"},
    "access_programs": {"cyber": "standard"},
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "tools": [{"type": "web_search", "external_web_access": False, "search_content_types": ["text"]}],
}


async def accepted(http: HttpRig, path: str, **body: Any) -> Any:
    answer = await http.post(path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_claude_codes_options_change_no_prompt(run_http: RunHttp) -> None:
    async with run_http(**writing("ok")) as http:
        plain = {"messages": [USER], "tools": [{"name": "get_weather", "input_schema": SCHEMA}]}
        for path, more in ((MESSAGES, {"max_tokens": 4}), (COUNT, {})):
            full = await accepted(http, path, **plain | CLAUDE_CODE | more)
            bare = await accepted(http, path, **plain | more)
            assert full.get("usage", full) == bare.get("usage", bare)


def system_of_claude_code(number: int, *, in_one: bool) -> Any:
    """What Claude Code sends as `system` with request `number`: its first text is another one each time."""
    header = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={number:05x};"
    texts = [header, "You are Claude Code.\nBe brief."]
    return "\n".join(texts) if in_one else [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("in_one", [False, True], ids=["blocks", "a text"])
def test_each_prompt_of_claude_code_begins_alike(in_one: bool) -> None:
    """Otherwise no request would find the KV of the one before."""
    system = {"role": "system", "content": "You are Claude Code.\nBe brief."}
    for kind, more in ((MessagesRequest, {"max_tokens": 4}), (CountTokensRequest, {})):
        for number in range(2):
            body = {"messages": [USER], "system": system_of_claude_code(number, in_one=in_one), **more}
            assert kind.parse(json.dumps(body).encode()).chat()["messages"] == [system, USER]


@pytest.mark.parametrize(
    ("system", "left"),
    [
        ("x-anthropic-billing-header: cch=1;", []),
        ("See\nx-anthropic-billing-header: cch=1;", ["See\nx-anthropic-billing-header: cch=1;"]),
        ("x-anthropic-billing-headers", ["x-anthropic-billing-headers"]),
    ],
)
def test_only_the_line_of_the_billing_header_is_left_out(system: str, left: list[str]) -> None:
    body = MessagesRequest.model_validate({"messages": [USER], "system": system, "max_tokens": 4})
    assert [one["content"] for one in body.chat()["messages"]] == [*left, USER["content"]]


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
async def test_a_system_message_stays_where_it_is(run_http: RunHttp, model: ServedModel, content: object) -> None:
    async with run_http(**writing("ok")) as http:
        messages = [USER, {"role": "system", "content": content}]
        await accepted(http, MESSAGES, messages=messages, system="Be kind.", max_tokens=4)
        assert model.tokenizer is not None
        prompt = model.tokenizer.decode(sent(http).prompt_token_ids, skip_special_tokens=False)
        assert prompt == (
            "<turn>system: Be kind.<eos><turn>user: How is it?<eos><turn>system: Be brief.<eos><turn>assistant: "
        )


async def test_a_system_message_is_text(run_http: RunHttp) -> None:
    async with run_http() as http:
        system = {"role": "system", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
        answer = await http.post(MESSAGES, messages=[USER, system], max_tokens=4)
        assert answer.status_code == 400
        said = "messages[1].content[0].type: 'tool_result' is not supported; allowed: text"
        assert answer.json()["error"]["message"] == said


async def test_codexs_options_are_ignored(run_http: RunHttp) -> None:
    async with run_http(**writing("ok")) as http:
        response = await accepted(http, "/v1/responses", input="How is it?", **CODEX)
        assert response["output"][-1]["content"][0]["text"] == "ok"
        cache = {"prompt_cache_options": CODEX["prompt_cache_options"]}
        assert await accepted(http, "/v1/chat/completions", messages=[USER], **cache)


@pytest.mark.parametrize("namespace", ["mcp", "mcp__"])
async def test_functions_of_a_namespace_are_called_by_both_names(
    run_http: RunHttp, model: ServedModel, namespace: str
) -> None:
    """Codex sends the tools of an MCP server so."""
    weather = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    tools = [{"type": "namespace", "name": namespace, "description": "Of one server.", "tools": [weather]}, weather]
    calls = [{"name": name, "arguments": {"city": "Oslo"}} for name in ("mcp__get_weather", "get_weather", "other")]
    text = "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    async with run_http(**writing(text)) as http:
        response = await accepted(http, "/v1/responses", input="How is it?", tools=tools)
        called = [(call.get("namespace"), call["name"]) for call in response["output"]]
        assert called == [(namespace, "get_weather"), (None, "get_weather"), (None, "other")]
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in response["output"]
        ]
        items = [{"namespace": None, **call} for call in response["output"]]  # as openai-python's model_dump
        again = await accepted(http, "/v1/responses", input=[*items, *results], tools=tools)
        assert [tool["type"] for tool in again["tools"]] == ["namespace", "function"]
        assert model.tokenizer is not None
        prompt = model.tokenizer.decode(sent(http).prompt_token_ids, skip_special_tokens=False)
        assert [call["name"] for call in calls] == re.findall(r'"name": "(\w+)", "arguments"', prompt)
        chosen = {"type": "function", "namespace": namespace, "name": "get_weather"}
        choice = (await accepted(http, "/v1/responses", input="x", tools=tools, tool_choice=chosen))["tool_choice"]
        assert choice == chosen
        assert "mcp__get_weather" in sent(http).sampling.structural_tag


def prompt_of(http: HttpRig, model: ServedModel) -> str:
    """Of the last request."""
    assert model.tokenizer is not None
    return model.tokenizer.decode(sent(http).prompt_token_ids, skip_special_tokens=False)


async def test_text_behind_a_call_is_of_the_same_message_in_each_api(run_http: RunHttp, model: ServedModel) -> None:
    call = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS[0]}}}</tool_call>'
    function = {"name": "get_weather", "parameters": SCHEMA}
    async with run_http(**writing(f"Let me see.\n{call}\nI look.")) as http:
        tools: Any = [{"type": "function", "function": function}]
        [choice] = (await accepted(http, "/v1/chat/completions", messages=[USER], tools=tools))["choices"]
        result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "sun"}
        history = [USER, choice["message"], result]
        await accepted(http, "/v1/chat/completions", messages=history, tools=tools)
        expected = prompt_of(http, model)
        assert f"assistant: Let me see.\nI look.{call}<eos><turn>tool: sun" in expected

        tools = [{"type": "function", **function}]
        items = (await accepted(http, "/v1/responses", input=[USER], tools=tools))["output"]
        assert [item["type"] for item in items] == ["message", "function_call", "message"]
        result = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "sun"}
        await accepted(http, "/v1/responses", input=[USER, *items, result], tools=tools)
        assert prompt_of(http, model) == expected

        asked = {"tools": [{"name": "get_weather", "input_schema": SCHEMA}], "max_tokens": 200}
        blocks = (await accepted(http, MESSAGES, messages=[USER], **asked))["content"]
        assert [block["type"] for block in blocks] == ["text", "tool_use", "text"]
        result = {"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": "sun"}
        history = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        await accepted(http, MESSAGES, messages=history, **asked)
        assert prompt_of(http, model) == expected


async def test_a_parsed_answer_can_be_sent_back(run_http: RunHttp, model: ServedModel) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
    async with run_http(**writing(TEXT)) as http:
        parse = http.openai.chat.completions.parse
        asked: Any = {"model": "fake", "tools": [tool]}
        message = (await parse(messages=[USER], **asked)).choices[0].message
        assert message.tool_calls
        assert message.tool_calls[0].function.parsed_arguments == json.loads(ARGUMENTS[0])
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls]
        history = [USER, {**message.to_dict(exclude_unset=False), "parsed": {"a": 1}}, *results]
        for answered in (message, history[1]):
            await parse(messages=[USER, answered, *results], **asked)
            assert model.tokenizer is not None
            prompt = model.tokenizer.decode(sent(http).prompt_token_ids, skip_special_tokens=False)
            assert f'assistant: Let me see.<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS[0]}}}' in prompt


def test_what_litellm_adds_to_a_history_has_no_effect() -> None:
    more: dict[str, Any] = {"provider_specific_fields": {"refusal": None, "reasoning": "Hm."}}
    function = {"name": "add", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function}
    answer: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    forms = {"thinking_blocks": [{"type": "thinking", "thinking": "Hm."}], "reasoning_details": [{"text": "Hm."}]}
    full = {**answer, **forms, **more, "tool_calls": [{**call, **more, "function": {**function, **more}}]}
    made = []
    for one in ({**answer, "tool_calls": [call]}, full):
        messages = [USER, one, {"role": "tool", "tool_call_id": "c", "content": "5"}]
        made.append(ChatBody.parse(json.dumps({"messages": messages}).encode()).requests("label"))
    assert made[0] == made[1]


def wire_request(**body: Any) -> generation_pb2.GenerateRequest:
    """What a chat becomes."""
    [request] = ChatBody.parse(json.dumps(body).encode()).requests("label")
    return request


def test_a_prediction_of_the_answer_has_no_effect() -> None:
    """Editors and agents' libraries send the file that the answer will repeat."""
    prediction = {"type": "content", "content": [{"type": "text", "text": "def add():"}]}
    assert wire_request(messages=[USER], prediction=prediction) == wire_request(messages=[USER])


@pytest.mark.parametrize("more", [{}, {"tool_calls": []}, {"reasoning_content": "Hm."}])
@pytest.mark.parametrize("nothing", [{}, {"content": None}])
def test_an_answer_without_content_can_be_sent_back(more: dict[str, Any], nothing: dict[str, Any]) -> None:
    """As vLLM accepts it, whose answers that end within the reasoning have null."""
    empty, absent = ({"role": "assistant", **more, **one} for one in ({"content": ""}, nothing))
    assert wire_request(messages=[USER, absent, USER]) == wire_request(messages=[USER, empty, USER])


def test_marks_of_other_apis_on_messages_and_tools_have_no_effect() -> None:
    """LiteLLM passes `cache_control` on to any server of OpenAI's API, lm-eval gives each message a type."""
    mark = {"cache_control": {"type": "ephemeral"}}
    function = {"name": "add", "parameters": {"type": "object"}}
    plain = wire_request(messages=[USER], tools=[{"type": "function", "function": function}])
    marked = {"type": "function", "function": {**function, **mark}, **mark}
    assert wire_request(messages=[{**USER, "type": "text", **mark}], tools=[marked]) == plain


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"messages": [USER], "verbosity": "low"}),
        (ResponsesRequest, {"input": "x", "text": {"verbosity": "low"}}),
    ],
)
def test_a_template_may_read_the_verbosity(kind: type[Body], body: dict[str, Any]) -> None:
    [request] = kind.model_validate(body).requests("r")
    assert json.loads(request.chat.template_variables) == {"verbosity": "low"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"messages": [USER], "reasoning_effort": "max"}),
        (ResponsesRequest, {"input": "x", "reasoning": {"effort": "max"}}),
        (MessagesRequest, {"messages": [USER], "max_tokens": 4, "output_config": {"effort": "max"}}),
    ],
)
def test_the_effort_max_is_xhigh_to_a_template(kind: type[Body], body: dict[str, Any]) -> None:
    [request] = kind.parse(json.dumps(body).encode()).requests("label")
    assert json.loads(request.chat.template_variables) == {"reasoning_effort": "xhigh"}
