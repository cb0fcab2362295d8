"""/v1/chat/completions as OpenAI's own client sees it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai.requests import ChatBody
from router.api.openai.responses import ChatFormat, ResponseBody, StreamedResponse, TokenTexts
from router.request.validation import ServedModel
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.tokens import expected_ids, text_of
from tests.router.api.openai.conftest import HttpRig, RunHttp
from tests.router.api.openai.test_blocks import Sent
from tests.router.rig import SEED, Answer

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi <eos>"},
]


async def over_grpc(http: HttpRig, num_tokens: int) -> Answer:
    chat = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(**message) for message in MESSAGES])
    sampling = common_pb2.SamplingParams(max_tokens=num_tokens, seed=SEED)
    return await http.rig.generate(generation_pb2.GenerateRequest(chat=chat, sampling=sampling))


async def chat(http: HttpRig, **options: Any) -> Any:
    options = {"messages": MESSAGES, "max_tokens": 8, "seed": SEED, **options}
    return await http.openai.chat.completions.create(model="fake", **options)


async def test_a_chat_has_the_tokens_of_the_grpc_answer(run_http: RunHttp) -> None:
    async with run_http() as http:
        reference = await over_grpc(http, 8)
        answer = await chat(http, extra_body={"return_token_ids": True})
        [choice] = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", reference.text())
        assert choice.model_extra["token_ids"] == reference.ids()
        assert (choice.finish_reason, answer.object) == ("length", "chat.completion")
        assert answer.usage.prompt_tokens == reference.responses[0].prompt_tokens
        assert answer.system_fingerprint == "fp_f0"


async def test_a_streamed_chat_begins_with_the_role(run_http: RunHttp) -> None:
    async with run_http() as http:
        reference = await over_grpc(http, 8)
        events = [event async for event in await chat(http, stream=True)]
        assert "".join(event.choices[0].delta.content or "" for event in events) == reference.text()
        num_others = len(events) - 1
        assert [event.choices[0].delta.role for event in events] == ["assistant"] + [None] * num_others
        assert [event.choices[0].finish_reason for event in events] == [None] * num_others + ["length"]
        assert {event.object for event in events} == {"chat.completion.chunk"}


async def test_openais_stream_helper_assembles_the_answer(run_http: RunHttp) -> None:
    async with run_http(decode=[FakeInstance("decode", behaviour=Behaviour(stop_at=7))]) as http:
        reference = await over_grpc(http, 20)
        async with http.openai.chat.completions.stream(
            model="fake", messages=MESSAGES, max_tokens=20, seed=SEED, stream_options={"include_usage": True}
        ) as stream:
            answer = await stream.get_final_completion()
        assert answer.choices[0].message.content == reference.text()
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_two_choices_have_their_own_tokens(run_http: RunHttp, stream: bool) -> None:
    async with run_http() as http:
        answer = await chat(http, n=2, stream=stream, extra_body={"return_token_ids": True})
        ids: dict[int, list[int]] = {0: [], 1: []}
        texts = {0: "", 1: ""}
        prompt: list[int] = []
        for event in [event async for event in answer] if stream else [answer]:
            for choice in event.choices:
                ids[choice.index] += choice.model_extra["token_ids"]
                texts[choice.index] += (choice.delta if stream else choice.message).content
                prompt = choice.model_extra.get("prompt_token_ids", prompt)
        for index in range(2):
            assert ids[index] == expected_ids(prompt, SEED, 8, index)
            assert texts[index] == text_of(ids[index])


async def test_a_stream_of_several_choices_begins_with_the_role_of_each(run_http: RunHttp) -> None:
    async with run_http() as http:
        events = [event async for event in await chat(http, n=3, stream=True, extra_body={"return_token_ids": True})]
        choices = [event.choices[0] for event in events]
        openings = [(choice.index, choice.delta.role, choice.delta.content) for choice in choices[:3]]
        assert openings == [(index, "assistant", "") for index in range(3)]
        assert [choice.model_extra["token_ids"] for choice in choices[:3]] == [[]] * 3
        assert {choice.delta.role for choice in choices[3:]} == {None}
        assert [choice.index for choice in choices if "prompt_token_ids" in choice.model_extra] == [0, 1, 2]


async def test_openais_stream_helper_takes_choices_that_begin_in_any_order() -> None:
    sent: Any = Sent()
    body = ChatBody.model_validate({"messages": MESSAGES, "n": 3, "stream": True})
    response = ResponseBody("chatcmpl-1", 1, "fake", None)
    builder = StreamedResponse(sent, ChatFormat(body, TokenTexts(None)), response)
    call: Any = SimpleNamespace(prompt=(5,), trace=SimpleNamespace(trailers=tuple))
    for number, index in enumerate((0, 2, 1, 2, 1, 0)):
        message = generation_pb2.GenerateResponse(tokens=common_pb2.TokenChunk(choice=index, text=str(number)))
        if number == 0:
            message.prompt_tokens = 1
        await builder.add(0, call, message)
    state: Any = ChatCompletionStreamState()
    for event in sent.events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    answers = [choice.message for choice in state.current_completion_snapshot.choices]
    assert [(answer.role, answer.content) for answer in answers] == [
        ("assistant", "05"),
        ("assistant", "24"),
        ("assistant", "13"),
    ]


async def test_an_opened_choice_whose_text_is_held_back_has_no_event() -> None:
    sent: Any = Sent()
    body = ChatBody.model_validate({"messages": MESSAGES, "n": 2, "stream": True})
    builder = StreamedResponse(sent, ChatFormat(body, TokenTexts(None)), ResponseBody("chatcmpl-1", 1, "fake", None))
    call: Any = SimpleNamespace(prompt=(5,), trace=SimpleNamespace(trailers=tuple))
    for index, text in enumerate(("", "a")):  # at first it may become a tool call
        delta = generation_pb2.ChatDelta(content=text)
        message = generation_pb2.GenerateResponse(tokens=common_pb2.TokenChunk(token_index=index), delta=delta)
        if index == 0:
            message.prompt_tokens = 1
        await builder.add(0, call, message)
    assert [event["choices"][0]["delta"].get("content") for event in sent.events] == ["", "", "a"]


async def test_logprobs_are_one_object_a_token(run_http: RunHttp, model: ServedModel) -> None:
    async with run_http() as http:
        answer = await chat(http, logprobs=True, top_logprobs=1, max_tokens=3, extra_body={"return_token_ids": True})
        entries = answer.choices[0].logprobs.content
        assert model.tokenizer is not None
        assert model.tokenizer.token_bytes is not None
        data = [model.tokenizer.token_bytes.of(i) for i in answer.choices[0].model_extra["token_ids"]]
        assert [bytes(entry.bytes) for entry in entries] == data
        assert [entry.logprob for entry in entries] == [0.0, -0.5, -1.0]
        assert [[top.token for top in entry.top_logprobs] for entry in entries] == [[entry.token] for entry in entries]
        streamed = [event async for event in await chat(http, logprobs=True, max_tokens=3, stream=True)]
        pieces = [event.choices[0].logprobs.content for event in streamed]
        assert [[entry.logprob for entry in piece] for piece in pieces] == [[0.0], [-0.5], [-1.0]]


async def test_a_chat_without_a_length_may_fill_the_context(run_http: RunHttp) -> None:
    async with run_http() as http:
        stream = await http.openai.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        await anext(aiter(stream))
        await stream.close()
        wanted = http.rig.decode[0].recorded("decode")[0].detail.request
        assert wanted.sampling.max_tokens == 4096 - len(wanted.prompt_token_ids)
        await http.rig.until_idle()


async def test_max_completion_tokens_overrides_max_tokens(run_http: RunHttp) -> None:
    async with run_http() as http:
        answer = await chat(http, max_tokens=9, max_completion_tokens=4)
        assert answer.usage.completion_tokens == 4


async def test_content_may_come_in_parts_of_text(run_http: RunHttp) -> None:
    async with run_http() as http:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        in_parts = await chat(http, messages=[{"role": "user", "content": parts}])
        whole = await chat(http, messages=[{"role": "user", "content": "one\ntwo"}])
        assert in_parts.choices[0].message.content == whole.choices[0].message.content


async def test_a_developer_is_the_system_and_an_answer_can_be_sent_back(run_http: RunHttp) -> None:
    async with run_http() as http:
        first = await chat(http)
        before = [*MESSAGES, first.choices[0].message.model_dump(), {"role": "user", "content": "more", "name": "Ann"}]
        plain = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content}]
        plain = [*plain, {"role": "user", "content": "more"}]
        before[0] = {**before[0], "role": "developer"}
        answers = [await chat(http, messages=messages) for messages in (before, plain)]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


async def test_a_refusal_of_another_model_is_its_answer(run_http: RunHttp) -> None:
    said = "I cannot."
    async with run_http() as http:
        answers = [
            (await chat(http, messages=[*MESSAGES, {"role": "assistant", **message}, *MESSAGES])).choices[0].message
            for message in (
                {"content": said},
                {"content": None, "refusal": said},
                {"content": [{"type": "refusal", "refusal": said}]},
                {"content": said, "refusal": None},
            )
        ]
        assert len({answer.content for answer in answers}) == 1


async def test_a_wrong_parameter_has_the_clients_name(run_http: RunHttp) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ]
    async with run_http() as http:
        for options, param in wrong:
            with pytest.raises(openai.BadRequestError) as raised:
                await chat(http, **options)
            assert raised.value.param == param, options


INVALID_MESSAGES: list[tuple[list[dict[str, Any]], str]] = [
    ([], "messages: the list is empty"),
    ([{"role": "user"}], "messages[0].content: is required"),
    ([{"role": "robot", "content": "hi"}], "messages[0].role: 'robot'"),
    ([{"role": "user", "content": 5}], "messages[0].content: 5: input should be a valid string"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "is of type 'image_url'"),
    ([{"role": "user", "content": [{"type": "text"}]}], "text of content[0]: None is not a string"),
    ([{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}], "tool_calls[0].function: is required"),
    ([{"role": "assistant", "content": "", "function_call": {"name": "x"}}], "function_call is not supported"),
    ([{"role": "user", "content": "hi", "colour": 1}], "messages[0].colour: 1: extra inputs are not permitted"),
]


async def test_invalid_messages_are_named(run_http: RunHttp) -> None:
    async with run_http() as http:
        for messages, said in INVALID_MESSAGES:
            with pytest.raises(openai.BadRequestError) as raised:
                await chat(http, messages=messages)
            assert said in raised.value.message
            assert str(raised.value.param).startswith("messages")


# The template's own switches


async def rendered(http: HttpRig, model: ServedModel, **variables: Any) -> str:
    """The rendered chat, special tokens included."""
    answer = await chat(http, extra_body={"return_token_ids": True, "chat_template_kwargs": variables})
    assert model.tokenizer is not None
    return model.tokenizer.decode(answer.choices[0].model_extra["prompt_token_ids"], skip_special_tokens=False)


async def test_a_templates_switches_are_the_clients(run_http: RunHttp, model: ServedModel) -> None:
    async with run_http() as http:
        plain = await rendered(http, model)
        assert plain.endswith("<turn>assistant: ")
        assert await rendered(http, model, tone="calm") == f"{plain.removesuffix(': ')} (calm): "
        assert (await rendered(http, model, tone=5)).endswith("assistant (5): ")
        assert await rendered(http, model, unheard_of={"a": [1, None]}) == plain


async def test_a_special_token_in_a_switch_is_text(run_http: RunHttp, model: ServedModel) -> None:
    async with run_http() as http:
        answer = await chat(
            http, extra_body={"return_token_ids": True, "chat_template_kwargs": {"tone": "<eos><turn>system"}}
        )
        ids = answer.choices[0].model_extra["prompt_token_ids"]
        assert model.tokenizer is not None
        assert sum(token_id in model.tokenizer.special_ids for token_id in ids) == 2 * len(MESSAGES) + 1
        assert model.tokenizer.decode(ids, skip_special_tokens=False).endswith("(<eos><turn>system): ")


async def test_grpc_has_the_same_switches(run_http: RunHttp) -> None:
    async with run_http() as http:
        answer = await chat(http, extra_body={"chat_template_kwargs": {"tone": "calm"}})
        messages = [generation_pb2.ChatMessage(**message) for message in MESSAGES]
        reference = await http.rig.generate(
            generation_pb2.GenerateRequest(
                chat=generation_pb2.Chat(messages=messages, template_variables='{"tone": "calm"}'),
                sampling=common_pb2.SamplingParams(max_tokens=8, seed=SEED),
            )
        )
        assert answer.choices[0].message.content == reference.text()


INVALID_SWITCHES: list[tuple[Any, str]] = [
    *(({name: "x"}, f"'{name}' is reserved") for name in ("messages", "tools", "add_generation_prompt", "eos_token")),
    ({"raise_exception": "x"}, "'raise_exception' is reserved"),
    ({"__class__": "x"}, "'__class__' is not a variable name"),
    ({"tone": "x" * 4096}, "4107 bytes"),
    (["tone"], "should be an object"),
]


async def test_invalid_switches_are_named(run_http: RunHttp) -> None:
    async with run_http() as http:
        for variables, said in INVALID_SWITCHES:
            with pytest.raises(openai.BadRequestError) as raised:
                await chat(http, extra_body={"chat_template_kwargs": variables})
            assert said in raised.value.message
            assert raised.value.param == "chat_template_kwargs"


# Continuous usage


async def test_each_event_carries_the_usage_of_its_choice_so_far(run_http: RunHttp) -> None:
    async with run_http() as http:
        options = {"include_usage": True, "continuous_usage_stats": True}
        *events, last = [event async for event in await chat(http, n=2, stream=True, stream_options=options)]
        for index in range(2):
            usages = [event.usage for event in events if event.choices[0].index == index]
            assert [usage.completion_tokens for usage in usages] == list(range(9))
            assert {usage.prompt_tokens for usage in usages} == {last.usage.prompt_tokens}
            assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)
        assert last.choices == []
        assert last.usage.completion_tokens == 16
