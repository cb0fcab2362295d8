"""Both clients against a real gRPC server with scripted answers."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

import tandem
from engine.text.tokenizer import Tokenizer
from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tandem import AsyncClient, Client, Completion, Piece, Route, StreamError, TandemError, ToolCall
from tandem.cli import main
from tandem.client import registry
from tandem.client.completion import TokenLogprob
from tandem.client.request import RequestOptions, Sampling, generate_request
from tandem.demo import MODEL_DIR
from tests.waiting import until

ROUTE = (
    ("tandem-prefill", "p-0"),
    ("tandem-decode", "d-0,d-1"),
    ("tandem-disaggregated", "yes,no"),
    ("tandem-reason", "prompts are short"),
)
TEXTS = ["Once", " upon", " a", " time"]


class ScriptedRouter(generation_pb2_grpc.GenerationServiceServicer):
    """Answers with TEXTS, one token each; the prompt's text selects the fault."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.cancelled = threading.Event()

    def Generate(self, request: Any, context: Any) -> Iterator[generation_pb2.GenerateResponse]:  # type: ignore[override]
        self.requests.append(request)
        context.add_callback(self.cancelled.set)
        context.set_trailing_metadata(ROUTE)
        if request.text == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature: is 9; allowed: 0..2")
        offset = 0
        for index, text in enumerate(TEXTS):
            last = index == len(TEXTS) - 1
            chunk = common_pb2.TokenChunk(token_index=index, token_ids=[index], text=text, text_offset=offset)
            if request.sampling.HasField("logprobs"):
                chunk.logprobs.add().candidates.extend(
                    common_pb2.Logprob(token_id=index + more, logprob=-0.5 - more, rank=1 + more)
                    for more in range(max(1, request.sampling.logprobs))
                )
            if request.text == "skip" and index == 2:
                continue
            if last and request.text == "endless":
                self.cancelled.wait(60)
                return
            if last:
                chunk.finish.reason = common_pb2.FINISH_REASON_LENGTH
            yield generation_pb2.GenerateResponse(tokens=chunk, prompt_tokens=1, seed=3, model="scripted")
            offset += len(text)


@pytest.fixture
def router() -> Iterator[tuple[ScriptedRouter, str]]:
    servicer = ScriptedRouter()
    server: Any = grpc.server(ThreadPoolExecutor(4))  # the stubs are typed for asyncio alone
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_generate_returns_the_whole_answer(router: tuple[ScriptedRouter, str]) -> None:
    with Client(router[1]) as client:
        completion = client.generate("go", max_tokens=4, temperature=0.0, stop="###", request_id="mine")
    assert completion.text == "Once upon a time"
    assert completion.token_ids == (0, 1, 2, 3)
    assert completion.finish_reason == "length"
    request = router[0].requests[0]
    assert (request.text, request.request_id, request.sampling.max_tokens) == ("go", "mine", 4)
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert list(request.sampling.stop) == ["###"]


def test_options_of_a_request_are_fields_of_its_message(router: tuple[ScriptedRouter, str]) -> None:
    options: Any = {"model": "scripted", "priority": 3, "cache_salt": "s", "lora": "poet", "session": "customer-7"}
    with Client(router[1]) as client:
        client.generate("go", **options)
    assert {name: getattr(router[0].requests[0], name) for name in options} == options


def test_an_option_that_is_none_counts_as_absent(router: tuple[ScriptedRouter, str]) -> None:
    with Client(router[1]) as client:
        absent: Any = dict.fromkeys(RequestOptions.__annotations__)
        assert client.generate("hi", **absent).text
        assert client.generate("hi", temperature=None, stop=None, n=None, tools=None, timeout_s=None).text


def test_every_sampling_parameter_of_the_wire_is_an_option() -> None:
    assert set(Sampling.__annotations__) == set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def test_two_constraints_exclude_each_other(router: tuple[ScriptedRouter, str]) -> None:
    """The last one would win."""
    with Client(router[1]) as client, pytest.raises(ValueError, match="json_object and regex exclude each other"):
        client.generate("hi", regex="a", json_object=True)
    result = CliRunner().invoke(main, ("generate", "go", "--regex", "a", "--choice", "b", "--address", router[1]))
    assert result.output == "Error: regex and choice exclude each other: give one of them\n"


def test_logprobs_come_with_each_piece_and_with_the_whole(router: tuple[ScriptedRouter, str]) -> None:
    with Client(router[1]) as client:
        pieces = list(client.stream("go", logprobs=2))
        completion = client.generate("go", logprobs=2, presence_penalty=1.0, logit_bias={3: -1.0})
        without = client.generate("go")
    expected = tuple((TokenLogprob(index, -0.5, 1), TokenLogprob(index + 1, -1.5, 2)) for index in range(4))
    assert tuple(piece.logprobs[0] for piece in pieces) == completion.choices[0].logprobs == expected
    assert without.choices[0].logprobs == ()
    sampling = router[0].requests[1].sampling
    assert (sampling.logprobs, sampling.presence_penalty, dict(sampling.logit_bias)) == (2, 1.0, {3: -1.0})


def test_the_command_lists_logprobs_after_the_text(router: tuple[ScriptedRouter, str]) -> None:
    result = CliRunner().invoke(main, ("generate", "go", "--logprobs", "2", "--address", router[1]))
    assert result.exit_code == 0, result.output
    assert result.stdout == "Once upon a time\n"
    lines = result.stderr.splitlines()
    assert lines[0].split() == ["0", "token", "0", "-0.5000", "rank", "1", "|", "1", "-1.5000"]
    assert len(lines) == 4


def test_the_command_lists_the_texts_of_a_local_stacks_tokens(
    router: tuple[ScriptedRouter, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = registry.StackFolder()
    registry.announce(
        registry.RunningStack(router[1], str(folder.path), 1, "demo", {}, 0.0, model_folder=str(MODEL_DIR))
    )
    result = CliRunner().invoke(main, ("generate", "go", "--logprobs", "2", "--address", router[1]))
    folder.remove()
    tokenizer = Tokenizer.from_folder(MODEL_DIR)
    texts = [repr(tokenizer.decode([token_id], skip_special_tokens=False)) for token_id in (0, 1)]
    line = result.stderr.splitlines()[0]
    assert f"token 0 {texts[0]}  -0.5000" in line
    assert f"| 1 {texts[1]} -1.5000" in line


def test_stream_yields_pieces_as_they_come_and_leaving_it_cancels_the_call(router: tuple[ScriptedRouter, str]) -> None:
    with Client(router[1]) as client:
        pieces = client.stream("endless")
        assert [next(pieces).text for _ in range(3)] == TEXTS[:3]
        assert not router[0].cancelled.is_set()
        pieces.close()
        assert router[0].cancelled.wait(20)


def test_a_completion_names_the_instances_that_answered(router: tuple[ScriptedRouter, str]) -> None:
    completions: list[Completion] = []

    def pieces(client: Client) -> Iterator[Piece]:
        completions.append((yield from client.stream("go")))

    with Client(router[1]) as client:
        assert [piece.text for piece in pieces(client)] == TEXTS
        completions.append(client.generate("go"))
    assert completions[0] == completions[1]
    assert completions[0].route == Route(("p-0",), ("d-0", "d-1"), False, "prompts are short")


async def test_the_async_client_names_them_too(router: tuple[ScriptedRouter, str]) -> None:
    async with AsyncClient(router[1]) as client:
        assert (await client.generate("go")).route.decode == ("d-0", "d-1")


def test_a_server_that_names_no_instance_gives_an_empty_route() -> None:
    assert Route.from_trailers([("grpc-status-details-bin", b"")]) == Route()


def test_a_missing_token_raises_instead_of_giving_wrong_text(router: tuple[ScriptedRouter, str]) -> None:
    with Client(router[1]) as client, pytest.raises(StreamError, match="token_index 3 where 2 was expected"):
        client.generate("skip")


def test_an_error_carries_status_and_message(router: tuple[ScriptedRouter, str]) -> None:
    with Client(router[1]) as client, pytest.raises(TandemError) as caught:
        client.generate("refuse")
    assert caught.value.status == "INVALID_ARGUMENT"
    assert "sampling.temperature" in caught.value.message


def test_a_deadline_ends_the_call(router: tuple[ScriptedRouter, str]) -> None:
    with Client(router[1]) as client, pytest.raises(TandemError) as caught:
        client.generate("endless", timeout_s=0.2)
    assert caught.value.status == "DEADLINE_EXCEEDED"


def test_a_call_without_a_limit_is_answered(router: tuple[ScriptedRouter, str]) -> None:
    async def ask() -> str:
        async with AsyncClient(router[1], timeout_s=1e20) as client:
            return (await client.generate("go", timeout_s=math.inf)).text

    with Client(router[1], timeout_s=math.inf) as client:
        assert client.generate("go").text == client.generate("go", timeout_s=1e20).text == "Once upon a time"
        with pytest.raises(TandemError, match="UNIMPLEMENTED"):
            client.model_info()
        with pytest.raises(ValueError, match="timeout_s: is nan"):
            client.generate("go", timeout_s=math.nan)
    assert asyncio.run(ask()) == "Once upon a time"
    with pytest.raises(ValueError, match="timeout_s: is nan"):
        Client(router[1], timeout_s=math.nan)


def test_a_router_that_is_not_there_is_named() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TandemError, match=r"no router answers at 127\.0\.0\.1:1"):
        client.generate("go", timeout_s=5)


async def test_async_client_streams_and_generates(router: tuple[ScriptedRouter, str]) -> None:
    async with AsyncClient(router[1]) as client:
        assert (await client.generate([1, 2, 3])).text == "Once upon a time"
        assert [piece.text async for piece in client.stream("go")] == TEXTS
    assert list(router[0].requests[0].token_ids.ids) == [1, 2, 3]


async def test_leaving_an_async_stream_cancels_the_call(router: tuple[ScriptedRouter, str]) -> None:
    async with AsyncClient(router[1]) as client:
        async with aclosing(client.stream("endless")) as pieces:
            async for _ in pieces:
                break
        assert await asyncio.to_thread(router[0].cancelled.wait, 20)


async def test_closing_an_async_client_cancels_its_streams(router: tuple[ScriptedRouter, str]) -> None:
    """Two wait for the router, another one for its reader."""
    client = AsyncClient(router[1])
    read, unread = client.stream("endless"), client.stream("endless")
    for _ in TEXTS[:-1]:
        await anext(read)
    await anext(unread)
    waiting = [asyncio.ensure_future(anext(read)), asyncio.create_task(client.generate("endless"))]
    await until(lambda: len(router[0].requests) == 3)
    await client.close()
    for ended in (*waiting, anext(unread)):
        with pytest.raises(TandemError, match="CANCELLED: the client has been closed"):
            await ended
    assert router[0].cancelled.wait(20)


async def test_async_errors_are_the_same(router: tuple[ScriptedRouter, str]) -> None:
    async with AsyncClient(router[1]) as client:
        with pytest.raises(StreamError):
            await client.generate("skip")
        with pytest.raises(TandemError, match="INVALID_ARGUMENT"):
            await client.generate("refuse")


def test_without_a_running_stack_the_error_gives_the_command() -> None:
    with pytest.raises(TandemError, match="tandem up"):
        Client()


def test_three_kinds_of_prompt() -> None:
    assert generate_request("hi", {}).text == "hi"
    assert list(generate_request([5, 6], {}).token_ids.ids) == [5, 6]
    chat = generate_request([{"role": "user", "content": "hi"}], {}).chat
    assert chat.messages[0].content == "hi"
    assert generate_request([], {}).HasField("token_ids"), "an empty prompt is the router's to refuse"
    with pytest.raises(TypeError, match="has the key content"):
        generate_request([{"role": "user"}], {})
    with pytest.raises(TypeError, match="not 'colour'"):
        generate_request([{"role": "user", "content": "x", "colour": 1}], {})
    with pytest.raises(TypeError, match="a prompt is"):
        generate_request([1, "two"], {})  # type: ignore[arg-type]


WEATHER = {"name": "get_weather", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.parametrize("tool", [WEATHER, {"type": "function", "function": WEATHER}])
def test_tools_and_their_calls_find_their_fields(tool: dict[str, Any]) -> None:
    calls = [ToolCall("c1", "get_weather", "{}"), {"id": "c2", "function": {"name": "get_weather", "arguments": "{}"}}]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": calls, "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    switches = {"enable_thinking": False}
    options = {"tools": [tool], "parallel_tool_calls": False, "template_variables": switches}
    chat = generate_request(messages, options).chat
    assert [(call.id, call.name, call.arguments) for call in chat.messages[0].tool_calls] == [
        ("c1", "get_weather", "{}"),
        ("c2", "get_weather", "{}"),
    ]
    assert (chat.messages[0].reasoning, chat.messages[1].tool_call_id) == ("Hm.", "c1")
    assert (chat.tools[0].name, chat.tools[0].parameters, chat.tools[0].strict) == (
        "get_weather",
        '{"type": "object"}',
        True,
    )
    assert (chat.single_tool_call, chat.template_variables) == (True, '{"enable_thinking": false}')
    required = generate_request(messages, {"tools": [tool], "tool_choice": "required"}).chat
    assert required.tool_choice == generation_pb2.TOOL_CHOICE_REQUIRED
    assert generate_request(messages, {"tools": [tool], "tool_choice": "get_weather"}).chat.required_tool
    with pytest.raises(TypeError, match="a tool has name, description, parameters and strict"):
        generate_request(messages, {"tools": [{"nome": "x"}]})
    with pytest.raises(TypeError, match="a tool call has id, name and arguments; this one has no 'arguments'"):
        generate_request([{"role": "assistant", "tool_calls": [{"id": "c1", "name": "get_weather"}]}], {})
    with pytest.raises(TypeError, match="tools goes with the messages of a chat"):
        generate_request("hi", {"tools": [tool]})


@pytest.mark.parametrize(("parameters", "sent"), [({}, "{}"), (None, ""), ('{"type": "object"}', '{"type": "object"}')])
def test_a_tools_parameters_may_be_empty(parameters: object, sent: str) -> None:
    messages = [{"role": "user", "content": "What time is it?"}]
    [tool] = generate_request(messages, {"tools": [{"name": "now", "parameters": parameters}]}).chat.tools
    assert (tool.name, tool.parameters) == ("now", sent)


@pytest.mark.parametrize("name", ["stop", "regex", "grammar", "json_schema", "session", "lora", "model"])
def test_an_option_that_is_no_valid_unicode_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*surrogates not allowed") as raised:
        generate_request("hi", {name: "a\ud800"})
    assert type(raised.value) is ValueError


def test_lists_in_options_find_their_fields() -> None:
    options = {"allowed_token_ids": [], "bad_words": ["a"], "bad_word_ids": [[1], (2, 3)], "logit_bias": {4: -1}}
    sampling = generate_request("hi", options).sampling
    assert sampling.HasField("allowed_token_ids")
    assert list(sampling.bad_words) == ["a"]
    assert [list(sequence.ids) for sequence in sampling.bad_word_ids] == [[1], [2, 3]]
    assert dict(sampling.logit_bias) == {4: -1.0}


@pytest.mark.parametrize(("name", "value"), [("session", 42), ("lora", ["sql"]), ("priority", "high")])
def test_an_option_of_another_type_is_named(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"^{name}: "):
        generate_request("hi", {name: value})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tools": WEATHER}, "tools: .* is dict, not a list"),
        ({"tools": "x"}, r"tools\[0\]: 'x' is str"),
        ({"tools": [WEATHER, 1]}, r"tools\[1\]: 1 is int"),
        ({"tools": [{"type": "function", "function": "x"}]}, r"tools\[0\]: function: 'x' is str"),
        ({"tools": [{"name": 5}]}, r"tools\[0\]: name: 5 is int, not a string"),
        ({"tool_choice": {"type": "function"}}, "tool_choice: .* is dict, not auto, none, required or the name"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls: 'no' is str, not true or false"),
        ({"template_variables": ["x"]}, r"template_variables: \['x'\] is list"),
        ({"template_variables": {"x": {1}}}, "template_variables: .*not JSON"),
    ],
)
def test_an_option_of_a_chat_of_another_type_is_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError, match=f"^{problem}"):
        generate_request([{"role": "user", "content": "hi"}], options)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "hi"}]}, "content: .* is list, not a string"),
        ({"role": 5, "content": "hi"}, "role: 5 is int"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls: 5 is int"),
        ({"role": "assistant", "tool_calls": [5]}, "tool_calls: 5 is int, not a call"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "function": "f"}]}, "function: 'f' is str"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "arguments": {}}]}, "arguments: {} is dict"),
    ],
)
def test_a_message_of_another_type_is_named(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError, match=rf"^messages\[1\]: {problem}"):
        generate_request([{"role": "user", "content": "hi"}, message], {})


def test_a_prompt_that_is_no_valid_unicode_is_named() -> None:
    with pytest.raises(ValueError, match=r"^prompt: .*surrogates not allowed"):
        generate_request("a\ud800", {})


@pytest.mark.parametrize("name", ["choice", "bad_words"])
def test_a_string_is_no_list_of_them(name: str) -> None:
    """It would be the list of its letters."""
    with pytest.raises(TypeError, match=f"{name}: 'red' is a string; give a list of strings"):
        generate_request("hi", {name: "red"})


@pytest.mark.parametrize("prompt", [5, None, b"Once", [b"Once"]])
def test_what_is_no_prompt_is_named(prompt: Any) -> None:
    with pytest.raises(TypeError, match="a prompt is text, a list of token ids, or a list of"):
        generate_request(prompt, {})


def test_a_mistyped_option_gets_a_suggestion() -> None:
    with pytest.raises(TypeError, match="did you mean temperature"):
        generate_request("hi", {"temprature": 1})
    with pytest.raises(TypeError, match=r"known: .*cache_salt.*temperature.*timeout_s.*tools"):
        generate_request("hi", {"xyz": 1})
    with pytest.raises(TypeError, match="max_tokens"):
        generate_request("hi", {"max_tokens": "many"})


def test_the_package_exports_lazily_what_it_promises() -> None:
    for name in tandem.__all__:
        assert getattr(tandem, name).__name__ == name
    with pytest.raises(AttributeError):
        tandem.Clinet  # noqa: B018
