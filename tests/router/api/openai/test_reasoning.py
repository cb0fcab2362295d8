"""Models that think first: `reasoning_content` beside the content, and the switches of their templates."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from router.request.validation import ServedModel
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.model_folder import write_model_folder
from tests.router.api.openai.conftest import HttpRig, RunHttp
from tests.router.rig import SEED
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder

TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}<eos>{% endfor %}<turn>assistant: {{ reasoning_effort }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if tone == 'open' %}<think>\n{% endif %}"
)
USER = {"role": "user", "content": "How many?"}
THOUGHT, ANSWER = "Five is\nmore than four.", '{"n": 5}'
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("thinking"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return ServedModel.from_folder(model_folder, "fake")


def writing(text: str) -> dict[str, list[FakeInstance]]:
    behaviour = Behaviour(writes=text)
    return {
        "prefill": [FakeInstance("prefill", behaviour=behaviour)],
        "decode": [FakeInstance("decode", behaviour=behaviour)],
    }


async def chat(http: HttpRig, **options: Any) -> Any:
    options = {"messages": [USER], "seed": SEED, **options}
    options["extra_body"] = {"return_token_ids": True, **options.get("extra_body", {})}
    return await http.openai.chat.completions.create(model="fake", **options)


def prompt_of(model: ServedModel, answer: Any) -> str:
    assert model.tokenizer is not None
    return model.tokenizer.decode(answer.choices[0].model_extra["prompt_token_ids"], skip_special_tokens=False)


@pytest.mark.parametrize("tone", ["", "open"])
async def test_reasoning_is_apart_from_the_content(run_http: RunHttp, tone: str) -> None:
    switches = {"extra_body": {"chat_template_kwargs": {"tone": tone}}}
    async with run_http(**writing(TEXT.removeprefix("<think>\n") if tone else TEXT)) as http:
        message = (await chat(http, **switches)).choices[0].message
        assert (message.reasoning_content, message.content) == (THOUGHT, ANSWER)
        events = [event async for event in await chat(http, stream=True, **switches)]
        deltas = [event.choices[0].delta for event in events]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == THOUGHT
        assert "".join(delta.content or "" for delta in deltas) == ANSWER
        assert sum(hasattr(delta, "reasoning_content") for delta in deltas) > 3, "it comes as it is written"


async def test_each_part_of_a_response_has_its_own_events(run_http: RunHttp) -> None:
    """OpenAI's Node client takes no text, of reasoning neither, before the part that it belongs to."""
    async with run_http(**writing(TEXT)) as http:
        asked: dict[str, Any] = {"model": "fake", "input": "How many?"}
        events: list[Any] = [event async for event in await http.openai.responses.create(**asked, stream=True)]
        for index, (kind, text) in enumerate([("reasoning_text", THOUGHT), ("output_text", ANSWER)]):
            own = [event for event in events if getattr(event, "output_index", None) == index]
            kinds = [name.removeprefix("response.") for name, _ in itertools.groupby(event.type for event in own)]
            begin, end = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
            assert kinds == [*begin, f"{kind}.delta", f"{kind}.done", *end]
            parts = [event.part for event in own if event.type.startswith("response.content_part.")]
            assert [(part.type, part.text) for part in parts] == [(kind, ""), (kind, text)]
            assert [(part.type, part.text) for part in own[-1].item.content] == [(kind, text)]
        async with http.openai.responses.stream(**asked) as stream:
            final: Any = await stream.get_final_response()
        assert [item.content[0].text for item in final.output] == [THOUGHT, ANSWER]


async def test_reasoning_that_is_cut_is_an_incomplete_item(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        asked: dict[str, Any] = {"model": "fake", "input": "How many?"}
        whole: Any = await http.openai.responses.create(**asked)
        assert [(item.type, item.status) for item in whole.output] == [
            ("reasoning", "completed"),
            ("message", "completed"),
        ]
        again = [{"role": "user", "content": "How many?"}, *[item.to_dict() for item in whole.output]]
        await http.openai.responses.create(model="fake", input=[*again, {"role": "user", "content": "Sure?"}])
        cut: Any = await http.openai.responses.create(**asked, max_output_tokens=6)
        assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]
        stream: Any = await http.openai.responses.create(**asked, max_output_tokens=6, stream=True)
        events = [event async for event in stream]
        items = [event.item for event in events if event.type.startswith("response.output_item.")]
        assert [item.status for item in [*items, *events[-1].response.output]] == [
            "in_progress",
            "incomplete",
            "incomplete",
        ]


async def test_an_answer_without_reasoning_is_content(run_http: RunHttp) -> None:
    async with run_http(**writing("Five.")) as http:
        message = (await chat(http)).choices[0].message
        assert (message.content, getattr(message, "reasoning_content", None)) == ("Five.", None)


async def test_max_tokens_while_it_thinks_leaves_no_content(run_http: RunHttp) -> None:
    async with run_http(**writing(TEXT)) as http:
        [choice] = (await chat(http, max_tokens=6)).choices
        assert (choice.finish_reason, choice.message.content) == ("length", "")
        assert THOUGHT.startswith(choice.message.reasoning_content)


async def test_the_template_gets_effort_switches_and_earlier_reasoning(run_http: RunHttp, model: ServedModel) -> None:
    async with run_http(**writing("ok")) as http:
        assert prompt_of(model, await chat(http)).endswith("assistant: ")
        assert prompt_of(model, await chat(http, reasoning_effort="high")).endswith("assistant: high")
        assert prompt_of(model, await chat(http, reasoning_effort="none")).endswith("none<think>\n\n</think>\n\n")
        switches = {"chat_template_kwargs": {"enable_thinking": False}}
        assert prompt_of(model, await chat(http, extra_body=switches)).endswith("assistant: <think>\n\n</think>\n\n")
        for name in ("reasoning_content", "reasoning"):
            history = [USER, {"role": "assistant", "content": "5", name: "Hm."}]
            assert "<think>Hm.</think>5<eos>" in prompt_of(model, await chat(http, messages=history))
        with pytest.raises(openai.BadRequestError, match="reasoning_effort: 'huge'"):
            await chat(http, reasoning_effort="huge")


@pytest.mark.parametrize("tone", ["", "open"])
async def test_a_constraint_begins_behind_the_reasoning(run_http: RunHttp, tone: str) -> None:
    async with run_http(**writing(TEXT)) as http:
        switches = {"chat_template_kwargs": {"tone": tone}}
        await chat(http, response_format={"type": "json_object"}, extra_body=switches)
        sampling = http.rig.decode[0].recorded("decode")[0].detail.request.sampling
        [first, answer] = json.loads(sampling.structural_tag)["format"]["elements"]
        assert answer == {"type": "json_schema", "json_schema": {"type": "object"}}
        tag = (first if tone else first["content"])["elements"][0]
        assert (tag["begin"], tag["end"]) == ("" if tone else "<think>", "</think>")


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize(
    ("constraint", "answer"),
    [
        ({"choice": [" yes", " no"]}, " yes"),
        ({"regex": "\n[a-z]+ "}, "\nyes "),
        ({"grammar": 'root ::= "  " [a-z]+'}, "  yes"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "regex", "pattern": " +x"}}}, "  x"),
    ],
)
async def test_the_white_space_of_a_constrained_answer_is_part_of_it(
    run_http: RunHttp, constraint: dict[str, Any], answer: str, thinks: bool
) -> None:
    async with run_http(**writing(f"<think>{THOUGHT}</think>\n\n{answer}" if thinks else answer)) as http:
        options = {"extra_body": {"structured_outputs": constraint}}
        assert (await chat(http, **options)).choices[0].message.content == answer
        events = [event async for event in await chat(http, stream=True, **options)]
        assert "".join(event.choices[0].delta.content or "" for event in events) == answer
        # STEP: what the grammar allows is what the parser takes apart
        tag = json.loads(http.rig.decode[0].recorded("decode")[0].detail.request.sampling.structural_tag)
        gap = tag["format"]["elements"][0]["content"]["elements"][1]
        assert gap == {"type": "const_string", "value": "\n\n"}


@pytest.mark.parametrize("thinking", ["default", "tool_use"])
def test_one_of_the_models_templates_suffices(tmp_path: Path, thinking: str) -> None:
    templates = [
        {"name": name, "template": "</think>" if name == thinking else "x"} for name in ("default", "tool_use")
    ]
    folder = write_folder(tmp_path, byte_level_backend(), BYTE_LEVEL_CONFIG | {"chat_template": templates})
    assert ServedModel.from_folder(folder).thinks


async def test_a_setting_turns_it_off(run_http: RunHttp, model_folder: Path) -> None:
    assert ServedModel.from_folder(model_folder).thinks
    assert not ServedModel.from_folder(model_folder, reasoning_parser="none").thinks
