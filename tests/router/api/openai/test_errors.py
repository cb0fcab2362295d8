"""Errors: OpenAI's format and statuses, hints when to retry, and the parameter's own name."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx
import msgspec
import openai
import pytest

from router.api.openai.exchange import body_of, headers_of, status_of
from router.api.openai.messages_api import MessagesRequest
from router.api.openai.requests import Body, ChatBody, CompletionBody
from router.resilience.poison_requests import PoisonRequestRejected
from serving import errors
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.api.openai.conftest import HttpRig, RunHttp
from tests.router.rig import SHORT, slow

GOOD: dict[str, Any] = {"prompt": SHORT, "max_tokens": 4}


async def test_an_unknown_model_is_not_found(run_http: RunHttp) -> None:
    async with run_http() as http:
        with pytest.raises(openai.NotFoundError) as raised:
            await http.openai.completions.create(model="gpt-9", prompt="x")
        assert (raised.value.param, raised.value.code) == ("model", "model_not_found")
        problem = "model: 'gpt-9' is not served; served: 'fake'"
        assert problem in raised.value.message
        by_name = await http.http.get("/v1/models/gpt-9")
        assert by_name.json()["error"]["message"] == problem


async def test_no_instance_is_unavailable_with_a_retry_hint(run_http: RunHttp) -> None:
    async with run_http(prefill=0, decode=0) as http:
        response = await http.post(**GOOD)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "service_unavailable_error"


async def test_an_overload_is_a_429_with_a_retry_hint(run_http: RunHttp) -> None:
    decode = [FakeInstance("decode", behaviour=slow(0.05))]
    async with run_http(prefill=0, decode=decode, admission={"max_requests": 1, "max_queued": 0}) as http:
        running = asyncio.create_task(http.post(**GOOD | {"max_tokens": 30}))
        await decode[0].until("token")
        with pytest.raises(openai.RateLimitError) as raised:
            await http.openai.completions.create(model="fake", **GOOD)
        headers = raised.value.response.headers
        assert int(headers["retry-after"]) >= 1
        assert 0 < int(headers["retry-after-ms"]) <= int(headers["retry-after"]) * 1000
        assert headers["x-should-retry"] == "true"
        assert raised.value.code == "rate_limit_exceeded"
        # The client's own retries get an answer later.
        patient = http.openai.with_options(max_retries=8)
        assert (await patient.completions.create(model="fake", **GOOD)).choices[0].finish_reason == "length"
        assert (await running).status_code == 200


async def test_the_longest_deadline_ends_an_answer(run_http: RunHttp) -> None:
    decode = [FakeInstance("decode", behaviour=slow(0.05))]
    async with run_http(prefill=0, decode=decode, server={"max_deadline_s": 0.4}) as http:
        response = await http.post(**GOOD | {"max_tokens": 400})
        assert response.status_code == 408
        assert response.headers["x-should-retry"] == "false"
        assert "connection" not in response.headers, "the body was read, and the connection may be kept"
        await http.rig.until_idle()


async def test_an_error_in_mid_stream_is_an_event(run_http: RunHttp) -> None:
    decode = FakeInstance("decode", behaviour=Behaviour(fail_at=3))
    async with run_http(prefill=0, decode=[decode]) as http:
        stream = aiter(await http.openai.completions.create(model="fake", **GOOD | {"max_tokens": 9}, stream=True))
        for _ in range(3):
            assert (await anext(stream)).choices
        with pytest.raises(openai.APIError, match="internal error") as raised:
            await anext(stream)
        assert raised.value.type == "server_error"
        await http.rig.until_router_is_idle()


async def test_an_internal_error_reveals_no_internals(run_http: RunHttp) -> None:
    async with run_http(prefill=0, decode=[FakeInstance("decode", behaviour=Behaviour(fail_at=0))]) as http:
        response = await http.post(**GOOD)
        assert response.status_code == 500
        error = response.json()["error"]
        assert error == {"message": "internal error", "type": "server_error", "param": None, "code": None}


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 3}, "temperature", "0..2"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "(0,1]"),
    ({"repetition_penalty": 1e-45}, "repetition_penalty", "1e-45 is out of range; allowed: [1e-09,2]"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens >= 1"),
    ({"max_tokens": 2**70}, "max_tokens", "less than or equal"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": "4"}, "max_tokens", "integer"),
    ({"n": 0}, "n", "1..8"),
    ({"n": 9}, "n", "1..8"),
    ({"n": 2, "temperature": 0}, "n", "temperature"),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"logprobs": 21}, "logprobs", "0..20"),
    ({"stop": 5}, "stop", "is 5; allowed: a text, or an array of texts"),
    ({"stop": [""]}, "stop", "is empty"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "[-100,100]"),
    ({"priority": 101}, "priority", "100"),
    ({"cache_salt": "x" * 257}, "cache_salt", "257 bytes"),
    ({"prompt_cache_key": "x" * 129}, "prompt_cache_key", "129 bytes"),
    ({"prompt": []}, "prompt", "0 prompts"),
    ({"prompt": [[]]}, "prompt", "prompt is empty"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": ["x"] * 33}, "prompt", "33 prompts"),
    ({"prompt": [1, "x"]}, "prompt", "prompt[1]='x' is not a token id"),
    ({"prompt": [1, True]}, "prompt", "prompt[1]=True is not a token id"),
    ({"prompt": [300]}, "prompt", "out of range"),
    ({"prompt": [2**80]}, "prompt", "is not a token id"),
    ({"prompt": {"text": "x"}}, "prompt", "is not a prompt"),
    ({"prompt": list(range(20, 200)) * 30}, "prompt", "limit 4095"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "requires stream=true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not permitted"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "requires include_usage=true",
    ),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "is not supported; omit it"),
    ({"tools": [{"type": "function"}]}, "tools", "is not supported; omit it or pass []"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema belongs to type json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
        "at /: not is not supported",
    ),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "guided_regex",
        "is given together with response_format",
    ),
    (
        {"structured_outputs": {"json": {}, "regex": "a"}},
        "structured_outputs",
        "structured_outputs: json_schema and regex",
    ),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "at /: is not a structural tag"),
    ({"kv_transfer_params": {"remote_host": "10.0.0.1"}}, "kv_transfer_params", "is not supported; omit it"),
    ({"guided_json": "{"}, "guided_json", "is not JSON"),
    ({"guided_regex": "["}, "guided_regex", "at position 0"),
    ({"guided_choice": []}, "guided_choice", "is not a list of texts"),
    ({"guided_grammar": ""}, "guided_grammar", "0 bytes"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"best_of": 3}, "best_of", "not supported"),
    ({"model": 5}, "model", "valid string"),
]


async def test_no_unsupported_parameter_is_suggested(run_http: RunHttp) -> None:
    async with run_http() as http:
        response = await http.post("/v1/chat/completions", messages=[], prompt="x")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "prompt: unknown parameter 'prompt'")


LONG = "word " * 4096


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": list(range(20, 200)) * 30}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": SHORT, "max_tokens": 4096}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 4096}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4096}),
    ],
)
async def test_what_exceeds_the_context_has_openais_code(run_http: RunHttp, path: str, body: dict[str, Any]) -> None:
    """At it agents shorten the conversation, and LangChain raises a ContextOverflowError."""
    async with run_http() as http:
        response = await http.post(path, **body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded", response.text


async def test_agents_recognise_a_prompt_that_is_too_long(run_http: RunHttp) -> None:
    """LiteLLM and Claude Code search for these words, which are Anthropic's."""
    messages = [{"role": "user", "content": LONG}]
    async with run_http() as http:
        for path in ("/v1/chat/completions", "/v1/messages"):
            response = await http.post(path, messages=messages, max_tokens=4)
            assert "prompt is too long: " in response.json()["error"]["message"]


async def test_wrong_parameters_are_named(run_http: RunHttp) -> None:
    async with run_http() as http:
        answers = [(wrong, param, said, await http.post(**GOOD | wrong)) for wrong, param, said in INVALID]
    for wrong, param, said, response in answers:
        assert response.status_code == 400, wrong
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error", wrong
        assert (error["param"], said in error["message"]) == (param, True), (wrong, error)
        assert len(error["message"]) <= 512, wrong


NEUTRAL: list[dict[str, Any]] = [
    {"tools": []},
    {"response_format": {"type": "text"}},
    {"user": "a-user", "metadata": {"a": "b"}, "service_tier": "auto"},
    {"store": True, "parallel_tool_calls": True, "prompt_cache_retention": "24h", "verbosity": "medium"},
    {"stream": True, "stream_options": {"include_obfuscation": True}},
    {"use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True},
    {"best_of": 1},
]


async def test_values_without_effect_are_ignored(run_http: RunHttp) -> None:
    async with run_http() as http:
        for neutral in NEUTRAL:
            assert (await http.post(**GOOD | neutral)).status_code == 200, neutral


def test_a_tool_that_an_instance_rejects_has_the_clients_name() -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    bodies: list[tuple[type[Body], dict[str, Any], str]] = [
        (ChatBody, {"tools": tools}, "tools"),
        (ChatBody, {"tools": tools, "guided_regex": "a"}, "guided_regex"),
        (ChatBody, {}, "request.sampling"),
        (MessagesRequest, {"max_tokens": 5}, "tools"),
    ]
    for kind, options, name in bodies:
        message = {"role": "user", "content": "x"}
        body = kind.parse(msgspec.json.encode({"model": "fake", "messages": [message], **options}))
        assert body.client_names().get("request.sampling", "request.sampling") == name


def test_a_constraint_that_an_instance_rejects_has_the_clients_name() -> None:
    body = CompletionBody.parse(b'{"prompt": "x", "structured_outputs": {"regex": "(a"}}')
    error = errors.invalid_argument("request.sampling", "regex: xgrammar cannot compile it")
    assert body_of(error, body.client_names())["error"]["param"] == "structured_outputs"


async def rejected(http: HttpRig, status_code: int, **request: Any) -> httpx.Response:
    request = {"headers": {"content-type": "application/json"}, **request}
    response = await http.http.post("/v1/completions", **request)
    assert response.status_code == status_code, (request, response.text)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response


INVALID_BODIES = [
    b"",
    b"{",
    b"[1]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b'{"prompt": "a\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    b'{"prompt": "x", "logit_bias": {"' + b"1" * 5000 + b'": 1}}',
]


async def test_invalid_bodies_are_a_400(run_http: RunHttp) -> None:
    async with run_http() as http:
        for body in INVALID_BODIES:
            await rejected(http, 400, content=body)


async def test_a_body_of_another_type_is_rejected(run_http: RunHttp) -> None:
    async with run_http() as http:
        body = json.dumps(GOOD).encode()
        form = await rejected(http, 415, content=body, headers={"content-type": "application/x-www-form-urlencoded"})
        assert "-H 'Content-Type: application/json'" in form.json()["error"]["message"]
        await rejected(
            http, 415, content=body, headers={"content-type": "application/json", "content-encoding": "gzip"}
        )


async def test_unknown_paths_and_methods_are_rejected(run_http: RunHttp) -> None:
    async with run_http() as http:
        for method, path, status_code in (
            ("GET", "/v1/nothing", 404),
            ("GET", "/v1/completions", 405),
            ("GET", "/v1/models/other", 404),
        ):
            response = await http.http.request(method, path)
            assert response.status_code == status_code
            assert response.json()["error"]["message"]
            assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("error", "status_code", "retry_after"),
    [
        (errors.InvalidArgument("x"), 400, None),
        (errors.FailedPrecondition("x"), 400, None),
        (errors.Unsupported("x"), 400, None),
        (errors.Unauthenticated("x"), 401, None),
        (errors.PermissionDenied("x"), 403, None),
        (errors.NotFound("x"), 404, None),
        (errors.DeadlineExceeded("x"), 408, None),
        (errors.AlreadyExists("x"), 409, None),
        (errors.Aborted("x"), 409, None),
        (errors.Overloaded("x", 1.2), 429, "2"),
        (errors.Overloaded("x", None), 429, None),
        (errors.InternalError("x"), 500, None),
        (PoisonRequestRejected(240.0), 500, None),
        (errors.Unavailable("x", 0.25), 503, "1"),
        (errors.Crashed("x"), 503, "1"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_error_has_a_status(error: errors.ServiceError, status_code: int, retry_after: str | None) -> None:
    assert status_of(error) == status_code
    assert headers_of(error).get("retry-after") == retry_after
    assert set(body_of(error, {})["error"]) == {"message", "type", "param", "code"}
    if isinstance(error, errors.Aborted):
        assert headers_of(error) == {"x-should-retry": "false"}  # as its client wanted
    if isinstance(error, errors.Overloaded) and error.retry_after_s is None:
        assert headers_of(error) == {"x-should-retry": "false"}  # a quota is used up
    if isinstance(error, PoisonRequestRejected):
        assert headers_of(error) == {"x-should-retry": "false"}  # for minutes
        assert body_of(error, {})["error"]["code"] == "quarantined"


@pytest.mark.parametrize("retry_after_s", [math.nan, math.inf])
def test_a_hint_that_is_no_time_is_left_out(retry_after_s: float) -> None:
    assert headers_of(errors.Overloaded("x", retry_after_s)) == headers_of(errors.Unavailable("x", retry_after_s)) == {}
