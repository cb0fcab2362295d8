"""Whole stacks under JSON schemas by the hundred: every finished output is valid, and the aggregated engine's."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from engine import LLM, SamplingParams
from tandem import Client
from tests.engine.sampling.schemas import random_schemas, suite_schemas
from tests.lively import text_prompt
from tests.system.connectors import CONNECTORS
from tests.system.reference import Answer
from tests.system.stacks import Stack, on, on_stack

NUM_SCHEMAS = 1000
NUM_CLIENTS = 16
WAYS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95})
MAX_TOKENS = 160


def questions(llm: LLM, schemas: list[Any], source: random.Random) -> list[tuple[Any, list[int], dict[str, Any]]]:
    """Each schema, greedy and sampled, with the prompt and the parameters. The model is random: without the bias it
    would seldom close what it opens."""
    assert llm.tokenizer is not None
    closing = {llm.tokenizer.encode(text, add_special_tokens=False)[0]: 5.0 for text in '"}]'}
    spaces = {llm.tokenizer.encode(text, add_special_tokens=False)[0]: -8.0 for text in " \n"}
    return [
        (
            schema,
            text_prompt(source, source.choice((20, 70))),
            {
                **way,
                "json_schema": json.dumps(schema),
                "seed": index,
                "max_tokens": MAX_TOKENS,
                "logit_bias": {**closing, **spaces},
            },
        )
        for index, schema in enumerate(schemas)
        for way in WAYS
    ]


def assert_valid(schemas: list[Any], source: random.Random, stack: Stack) -> None:
    llm = stack.reference.llm
    asked = questions(llm, schemas, source)
    expected = llm.generate(
        [prompt for _, prompt, _ in asked], [SamplingParams(**params) for *_, params in asked], use_tqdm=False
    )
    with Client(stack.rig.address, timeout_s=100) as client, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        found = list(pool.map(lambda one: client.generate(one[1], **one[2]), asked))
    num_finished = 0
    for (schema, _, params), completion, output in zip(asked, found, expected, strict=True):
        [aggregated] = output.outputs
        [choice] = completion.choices
        answer = Answer(choice.token_ids, choice.text, str(choice.finish_reason))
        assert answer == Answer(tuple(aggregated.token_ids), aggregated.text, str(aggregated.finish_reason)), params
        if choice.finish_reason == "stop":
            num_finished += 1
            jsonschema.validate(json.loads(choice.text), schema, cls=jsonschema.Draft202012Validator)
    num_handed_over = sum(completion.usage.external_tokens > 0 for completion in found)
    print(f"{len(schemas)} schemas: {num_finished} of {len(asked)} outputs finished, {num_handed_over} handed over")
    assert num_finished > 0.6 * len(asked), "those that max_tokens ends prove little"
    assert num_handed_over > 0.7 * len(asked)


@on_stack("pair shared_storage")
def test_finished_outputs_are_valid_and_the_aggregated_engines(stack: Stack, prompts: random.Random) -> None:
    of_suite = [schema for _, schema, _ in suite_schemas()]
    assert_valid([*prompts.sample(of_suite, 4), *random_schemas(4)], prompts, stack)


@pytest.mark.slow
@pytest.mark.timeout(900)
@on()
def test_a_thousand_schemas_are_followed_with_every_connector_in_turn(
    request: pytest.FixtureRequest, stack: Stack, prompts: random.Random
) -> None:
    connector = request.node.callspec.params["shared_stack"].removeprefix("pair ")
    of_suite = [schema for _, schema, _ in suite_schemas()]
    assert len(of_suite) > 100
    own = (of_suite + random_schemas(NUM_SCHEMAS - len(of_suite)))[list(CONNECTORS).index(connector) :: len(CONNECTORS)]
    assert len(own) > 140
    assert_valid(own, prompts, stack)
