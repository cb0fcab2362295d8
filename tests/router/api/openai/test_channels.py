"""Models that write into channels: reasoning, content and calls of their messages, and constrained answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.text.channels import ANSWER_HEAD
from engine.text.chat_output import HARMONY
from protos.tandem.v1 import generation_pb2
from router.request.validation import ServedModel
from tests.fakes.model_folder import write_model_folder
from tests.router.api.openai.conftest import RunHttp
from tests.router.api.openai.test_reasoning import USER, chat, prompt_of, writing

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "<|start|>assistant{# <|channel|> #}"
)
THOUGHT = "<|channel|>analysis<|message|>Two threes.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 3}<|call|>'
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("channels"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return ServedModel.from_folder(model_folder, "fake")


async def test_an_answer_is_divided_and_its_marks_are_asked_for(run_http: RunHttp) -> None:
    async with run_http(**writing(f"{THOUGHT}<|channel|>final<|message|>Six.<|return|>")) as http:
        message = (await chat(http)).choices[0].message
        assert (message.reasoning_content, message.content) == ("Two threes.", "Six.")
        events = [event async for event in await chat(http, stream=True)]
        deltas = [event.choices[0].delta for event in events]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Two threes."
        assert "".join(delta.content or "" for delta in deltas) == "Six."
        assert not http.rig.decode[0].recorded("decode")[0].detail.request.sampling.skip_special_tokens


async def test_a_call_is_found_and_cannot_be_strict(run_http: RunHttp) -> None:
    async with run_http(**writing(f"{THOUGHT}{CALL}")) as http:
        [choice] = (await chat(http, tools=[ADD])).choices
        [call] = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 3}')
        assert (choice.finish_reason, choice.message.reasoning_content) == ("tool_calls", "Two threes.")
        strict = {**ADD, "function": {**ADD["function"], "strict": True}}
        with pytest.raises(openai.BadRequestError, match="strict is not supported for calls in the format harmony"):
            await chat(http, tools=[strict])


async def test_a_constrained_answer_begins_behind_its_head(run_http: RunHttp, model: ServedModel) -> None:
    async with run_http(**writing('{"a": 3}')) as http:
        answer = await chat(http, response_format={"type": "json_object"})
        assert answer.choices[0].message.content == '{"a": 3}'
        assert prompt_of(model, answer).endswith(f"<|start|>assistant{ANSWER_HEAD}")
        assert prompt_of(model, await chat(http)).endswith("<|start|>assistant")


async def test_a_required_call_is_constrained_to_be_an_object(run_http: RunHttp, model: ServedModel) -> None:
    async with run_http(**writing('{"name": "add", "parameters": {"a": 3}}')) as http:
        answer = await chat(http, tools=[ADD], tool_choice="required")
        [call] = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 3}')
        assert prompt_of(model, answer).endswith(ANSWER_HEAD)
        sampling = http.rig.decode[0].recorded("decode")[0].detail.request.sampling
        assert json.loads(sampling.structural_tag)["format"]["tags"][0]["begin"] == '{"name": "add", "parameters": '


async def test_the_head_of_a_constrained_answer_is_counted_and_no_other_has_one(
    run_http: RunHttp, model: ServedModel
) -> None:
    async with run_http(**writing('{"name": "add", "parameters": {"a": 3}}')) as http:
        tool = {"name": "add", "input_schema": {"type": "object"}}
        asked = {"messages": [USER], "tools": [tool], "tool_choice": {"type": "any"}}
        counted = (await http.post("/v1/messages/count_tokens", **asked)).json()["input_tokens"]
        usage = (await http.post("/v1/messages", max_tokens=64, **asked)).json()["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
        with_false = generation_pb2.GenerateRequest(chat={"messages": [USER]}, sampling={"json_object": False})  # type: ignore[arg-type]
        answer = await http.rig.generate(with_false)
        assert answer.responses[0].prompt_tokens == (await chat(http)).usage.prompt_tokens


def test_settings_turn_it_off_and_on(model_folder: Path, tmp_path: Path) -> None:
    def read(folder: Path, **settings: Any) -> tuple[bool, bool]:
        model = ServedModel.from_folder(folder, **settings)
        return model.has_channels, model.tool_format is HARMONY

    assert read(model_folder) == (True, True)
    assert read(model_folder, reasoning_parser="none") == (False, False)
    assert read(model_folder, tool_call_parser="none") == (True, False)
    plain = write_model_folder(tmp_path / "plain")
    assert read(plain) == (False, False)
    assert read(plain, reasoning_parser="harmony", tool_call_parser="harmony") == (True, True)


async def test_text_is_not_divided(run_http: RunHttp) -> None:
    async with run_http(**writing(THOUGHT)) as http:
        answer = await http.openai.completions.create(model="fake", prompt=USER["content"], max_tokens=64)
        assert answer.choices[0].text == THOUGHT
