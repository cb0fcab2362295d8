"""Decode instances are killed, drained and short of blocks under constrained streams: each answer, tool calls included,
is that of a run without faults."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tandem import Client
from tandem.client.completion import Completion
from tests.lively import text_prompt
from tests.system.checker import wait_idle
from tests.system.killable import PATIENT, KillableStack, cut_under_load, killable_stack
from tests.system.load import Load
from tests.system.questions import Question
from tests.system.reference import Reference
from tests.system.stacks import DRAFTS, DRAIN, DRAIN_MOVE_S
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_QUESTIONS = 60
ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 12},
        "codes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 100, "maximum": 9999},
            "minItems": 6,
            "maxItems": 8,
        },
    },
    "required": ["name", "codes"],
}
REGEX = r"([a-z]{4,8} ){10,14}[a-z]{2,5}\."
TOOLS = [{"name": name, "parameters": ROW, "strict": True} for name in ("store", "look_up")]
KINDS: dict[str, dict[str, Any]] = {
    "json schema": {"json_schema": json.dumps(ROW)},
    "regex": {"regex": REGEX},
    "tools": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 250}


@dataclass(frozen=True, slots=True)
class Recorded(Question):
    """A request with the answer of a run without faults."""

    answer: Completion | None = None

    def assert_answered(self, completion: Completion) -> None:
        assert _said(completion) == _said(self.answer), self.kind


def _said(completion: Completion | None) -> list[Any]:
    """Everything but the ids of calls, which are made of the request's."""
    assert completion is not None
    return [
        (
            choice.token_ids,
            choice.text,
            choice.finish_reason,
            [(call.name, call.arguments) for call in choice.tool_calls],
        )
        for choice in completion.choices
    ]


def assert_satisfied(kind: str, completion: Completion) -> None:
    [choice] = completion.choices
    assert choice.finish_reason == "stop", (kind, choice.text)
    match kind:
        case "json schema":
            jsonschema.validate(json.loads(choice.text), ROW)
        case "regex":
            assert re.fullmatch(REGEX, choice.text)
        case _:
            [call] = choice.tool_calls
            jsonschema.validate(json.loads(call.arguments), ROW)


def asked(spaces: Sequence[int]) -> list[Recorded]:
    """Each kind in turn, greedy every third time. The model would write `spaces` for ever."""
    source, questions = random.Random("constraints"), []
    for number in range(NUM_QUESTIONS):
        kind = list(KINDS)[number % len(KINDS)]
        prompt: Any = text_prompt(source, source.choice((12, 40, 90)))
        if kind == "tools":
            prompt = [{"role": "user", "content": f"Question {number}: {'about it ' * source.choice((1, 20))}"}]
        params = {**SAMPLED, **KINDS[kind], "seed": number, **({"temperature": 0.0} if number % 9 < 3 else {})}
        if kind != "regex":
            params["logit_bias"] = dict.fromkeys(spaces, -20.0)
        questions.append(Recorded(kind, tuple(prompt), params, ()))
    return questions


HERMES = ("--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def questions(checkpoint: Path, reference: Reference) -> list[Recorded]:
    """With their answers while nothing fails."""
    tokenizer = reference.llm.tokenizer
    spaces = [token_id for token_id in range(360) if (text := tokenizer.decode([token_id])) and text.isspace()]
    questions = asked(spaces)
    with (
        killable_stack(checkpoint, num_prefill=1, num_decode=1, router_args=(*PATIENT, *HERMES)) as calm,
        Client(calm.rig.address, timeout_s=100) as client,
        ThreadPoolExecutor(12) as pool,
    ):
        answers = list(pool.map(lambda one: client.generate(list(one.prompt), **one.sampling), questions))
    for question, answer in zip(questions, answers, strict=True):
        assert_satisfied(question.kind, answer)
    return [replace(question, answer=answer) for question, answer in zip(questions, answers, strict=True)]


@pytest.fixture(scope="module")
def stack(checkpoint: Path) -> Iterator[KillableStack]:
    """Its instances speculate; those that have given the fault-free answers do not."""
    sizes = ("--max-num-batched-tokens", "64", "--block-size", "16", "--peers-ping-timeout-ms", "20000")
    drains = (*DRAIN, "--server-drain-move-s", str(DRAIN_MOVE_S))
    # A busy machine is slow to try all streams of a dead instance again.
    retries = ("--failover-retry-share", "1", "--failover-retry-wait-s", "60")
    router_args = (*PATIENT, *DRAIN, *HERMES, *retries)
    with killable_stack(
        checkpoint, num_prefill=2, num_decode=3, router_args=router_args, instance_args=(*sizes, *drains, *DRAFTS)
    ) as stack:
        yield stack
        stack.wait_up()
        wait_idle(stack.rig, 15.0)


def test_the_answers_under_json_schemas_and_regexes_are_the_aggregated_engines(
    questions: Sequence[Recorded], reference: Reference
) -> None:
    for question in [question for question in questions if question.kind != "tools"][::3]:
        expected = reference.answer(question.prompt, **question.sampling)
        assert question.answer is not None
        assert question.answer.choices[0].token_ids == expected.token_ids


def test_preempted_streams_under_constraints_have_the_fault_free_answers(
    checkpoint: Path, questions: Sequence[Recorded]
) -> None:
    """The decode instance has fewer blocks than its streams come to need."""
    fields: dict[str, Any] = {"num_blocks": 64, "disaggregation": "never"}
    router_args = (*PATIENT, *HERMES, "--admission-block-fraction", "100")
    with killable_stack(checkpoint, num_prefill=1, num_decode=1, router_args=router_args, **fields) as stack:
        with Load(stack.rig.address, questions, num_clients=16) as load:
            wait_until(lambda: sum(outcome.is_over for outcome in list(load.outcomes)) >= 60, "answers do not end", 200)
            outcomes = load.finish()
        for outcome in outcomes:
            outcome.assert_exact()
        num_preemptions = stack.rig.load("decode-0").num_preemptions
        print(f"{len(outcomes)} streams, {num_preemptions} preemptions")
        assert num_preemptions > 10


@pytest.mark.parametrize("strike", [KillableStack.kill, KillableStack.drain], ids=["kill -9", "drain"])
def test_sixty_cut_streams_under_constraints_have_the_fault_free_answers(
    stack: KillableStack, questions: Sequence[Recorded], strike: Callable[[KillableStack, str], int]
) -> None:
    stack.wait_up()
    cut = cut_under_load(stack, questions, num_strikes=5, num_cut=60, num_clients=24, strike=strike)
    assert {outcome.question.kind for outcome in cut} == set(KINDS)
