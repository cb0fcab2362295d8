"""Constraints through whole stacks: handed over, or continued after a death, an answer is the aggregated engine's."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tandem.client.errors import TandemError
from tests.lively import random_prompt, text_prompt
from tests.system.deaths import kill_at
from tests.system.stacks import Stack, on, on_stack

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {"type": "integer", "maximum": 9999}, "minItems": 2, "maxItems": 3},
        "note": {"type": "string", "maxLength": 9},
    },
    "required": ["rows", "note"],
}  # fmt: skip
SMG_CLIENT = Path(__file__).parents[1] / "router/api/smg_client.py"
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 300}
CONSTRAINED: dict[str, dict[str, Any]] = {
    "json_schema": {**SAMPLED, "json_schema": json.dumps(SCHEMA)},
    "regex": {**SAMPLED, "temperature": 0.0, "regex": r"([a-z]{4,8} ){6,9}[a-z]{2,5}\."},
    "choice": {**SAMPLED, "choice": ["a tandem has two saddles", "a tandem has one saddle", "no tandem has a saddle"]},
    "structural_tag": {
        **SAMPLED,
        "structural_tag": json.dumps(
            {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<"],
                    "at_least_one": True,
                    "stop_after_first": True,
                    "tags": [
                        {
                            "type": "tag",
                            "begin": "<call>",
                            "content": {"type": "json_schema", "json_schema": SCHEMA},
                            "end": "</call>",
                        }
                    ],
                },
            }
        ),
    },
    "grammar": {**SAMPLED, "grammar": 'root ::= "(" item{6,9} ")"\nitem ::= [a-f]{3,5} ";"'},
}


def assert_satisfied(text: str, kind: str) -> None:
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "structural_tag":
        jsonschema.validate(json.loads(text.partition("<call>")[2].removesuffix("</call>")), SCHEMA)
    elif kind == "choice":
        assert text in CONSTRAINED["choice"]["choice"]
    elif kind == "regex":
        assert re.fullmatch(CONSTRAINED["regex"]["regex"], text)
    else:
        assert re.fullmatch(r"\(([a-f]{3,5};){6,9}\)", text)


@on("shared_storage")
@pytest.mark.parametrize("kind", CONSTRAINED)
def test_a_handed_over_answer_is_the_aggregated_engines(stack: Stack, prompts: random.Random, kind: str) -> None:
    prompt = text_prompt(prompts, 70)
    completion = stack.generate(prompt, CONSTRAINED[kind])
    stack.assert_exact(completion, prompt, CONSTRAINED[kind])
    assert completion.usage.external_tokens > 0
    assert completion.choices[0].finish_reason == "stop"
    assert_satisfied(completion.text, kind)


@on_stack("pair shared_storage")
def test_each_of_several_choices_has_a_grammar_of_its_own(stack: Stack, prompts: random.Random) -> None:
    completion = stack.generate(text_prompt(prompts, 40), {**CONSTRAINED["json_schema"], "n": 3})
    assert len({choice.text for choice in completion.choices}) > 1
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        assert_satisfied(choice.text, "json_schema")


@on_stack("pair shared_storage")
@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"grammar": "root ::= foo"}, 'Rule "foo" is not defined'),  # known to the instance alone
        ({"json_schema": '{"type": "string", "not": {}}'}, "at /: not is not supported"),
    ],
)
def test_a_constraint_that_no_instance_can_follow_is_the_clients_error(
    stack: Stack, prompts: random.Random, constraint: dict[str, Any], message: str
) -> None:
    with pytest.raises(TandemError, match=message) as raised:
        stack.generate(random_prompt(prompts, 40), constraint)
    assert raised.value.status == "INVALID_ARGUMENT"


@on_stack("pair shared_storage")
@pytest.mark.parametrize(
    "kind",
    ["json_schema", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("regex", "grammar", "structural_tag"))],
)
def test_vllms_published_stubs_give_the_same_constraints(stack: Stack, prompts: random.Random, kind: str) -> None:
    """smg-grpc-proto, in a process of its own."""
    prompt, params = text_prompt(prompts, 40), CONSTRAINED[kind]
    request = {"tokenized": {"input_ids": prompt}, "sampling_params": params, "stream": False}
    command = [sys.executable, str(SMG_CLIENT), "Generate", stack.rig.address, json.dumps(request)]
    ran = subprocess.run(command, capture_output=True, check=True, timeout=100)
    complete = json.loads(ran.stdout.splitlines()[-1])["complete"]
    assert tuple(complete["output_ids"]) == stack.reference.answer(prompt, **params).token_ids


@on_stack("killable shared_storage")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("json_schema", "decoding"),
        *(
            pytest.param(kind, at, marks=pytest.mark.slow)
            for kind in CONSTRAINED
            for at in ("first token", "loading", "decoding")
            if (kind, at) != ("json_schema", "decoding")
        ),
    ],
)
def test_an_answer_under_a_constraint_survives_a_killed_decode_instance(
    killable: Stack, prompts: random.Random, kind: str, at: str
) -> None:
    kill_at(killable, random_prompt(prompts, 150), at, "decode", CONSTRAINED[kind])
