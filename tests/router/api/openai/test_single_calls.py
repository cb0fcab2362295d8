"""Tools of a model whose template supports one call in a message, as Llama 3's does: each answer can be sent back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.request.validation import ServedModel
from tests.fakes.model_folder import write_model_folder
from tests.router.api.openai.conftest import RunHttp
from tests.router.api.openai.test_tools import USER, WEATHER, answer_to, chat, sent, streamed, writing

TEMPLATE = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}.<eos>{% endif %}'
    "{% for message in messages %}<turn>{{ message.role }}: "
    "{% if 'tool_calls' in message %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{{ message.tool_calls[0].function | tojson }}{% else %}{{ message.content }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)
CALLS = [{"name": "get_weather", "parameters": {"city": city}} for city in ("Oslo", "Rome")]
TEXT = "; ".join(map(json.dumps, CALLS))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return ServedModel.from_folder(model_folder, "fake")


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_an_answer_is_one_call_that_can_be_sent_back(run_http: RunHttp, tool_choice: str) -> None:
    async with run_http(**writing(TEXT)) as http:
        [choice] = (await chat(http, tool_choice=tool_choice)).choices
        [call] = choice.message.tool_calls
        assert (json.loads(call.function.arguments), choice.finish_reason) == ({"city": "Oslo"}, "tool_calls")
        tag = sent(http).sampling.structural_tag
        assert bool(tag) == (tool_choice == "required")
        assert not tag or json.loads(tag)["format"]["stop_after_first"]
        content, calls, reason = await streamed(http, tool_choice=tool_choice)
        assert (content, len(calls), reason) == ("", 1, "tool_calls")
        assert await chat(http, messages=[USER, choice.message, answer_to(call)])


async def test_a_history_of_parallel_calls_is_accepted_by_each_api(run_http: RunHttp, model: ServedModel) -> None:
    """Of another model, or of this one before a change."""
    async with run_http(**writing("Sun.")) as http:
        calls = [
            {"id": f"c{i}", "function": {"name": one["name"], "arguments": json.dumps(one["parameters"])}}
            for i, one in enumerate(CALLS)
        ]
        results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"sun {i}"} for i in range(2)]
        await chat(http, messages=[USER, {"role": "assistant", "tool_calls": calls}, *results])
        prompts = [sent(http).prompt_token_ids]
        uses = [
            {"type": "tool_use", "id": f"c{i}", "name": one["name"], "input": one["parameters"]}
            for i, one in enumerate(CALLS)
        ]
        answers = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": f"sun {i}"} for i in range(2)]
        history: list[Any] = [USER, {"role": "assistant", "content": uses}, {"role": "user", "content": answers}]
        tools = [{"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}]
        answer = await http.post("/v1/messages", messages=history, tools=tools, max_tokens=8)
        assert answer.status_code == 200, answer.text
        prompts.append(sent(http).prompt_token_ids)
        assert model.tokenizer is not None
        turns = [model.tokenizer.decode(prompt, skip_special_tokens=False).split("<eos>")[2:] for prompt in prompts]
        assert turns[0] == turns[1] == [
            '<turn>assistant: {"name": "get_weather", "arguments": {"city": "Oslo"}}', "<turn>tool: sun 0",
            '<turn>assistant: {"name": "get_weather", "arguments": {"city": "Rome"}}', "<turn>tool: sun 1",
            "<turn>assistant: ",
        ]  # fmt: skip
