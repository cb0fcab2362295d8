"""A whole stack with vLLM in its instances: what clients see is what the built-in engine would have answered."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tandem import Client
from tandem.client.health import load
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack
from tests.process_logs import LOGS
from tests.system.background_request import BackgroundRequest
from tests.system.checker import assert_same_answer, busy
from tests.system.reference import Reference
from tests.vllm.conftest import DEMO
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(1200)

PROMPT = "Once upon a time there was a penguin called Penny who had a tandem."
SAMPLED = {"temperature": 0.9, "top_p": 1.0, "top_k": 0, "max_tokens": 64, "ignore_eos": True}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 64},
    "seeded": {**SAMPLED, "seed": 7},
    "penalties": {**SAMPLED, "seed": 8, "presence_penalty": 1.0, "repetition_penalty": 1.1},
    "stop string": {**SAMPLED, "seed": 9, "stop": ["the", "and"]},
    "regex": {**SAMPLED, "seed": 10, "regex": "[a-z ]{30,60}", "ignore_eos": False},
}


@pytest.fixture(scope="module")
def stack(vllm_python: str) -> Iterator[LocalStack]:
    settings = StackSettings(
        model=DEMO,
        model_name="demo",
        engine="vllm",
        engine_python=vllm_python,
        num_prefill=0,
        num_decode=2,
        disaggregation="never",
        dtype="float32",
        num_blocks=200,
        instance_args=("--block-size", "32", "--server-drain-accept-s", "0.1", "--server-drain-move-s", "20"),
    )
    # vLLM logs the exceptions with which its processes end, when one of them is killed and when they are stopped.
    with LOGS.expected("EngineDeadError|CancelledError|vllm"), LocalStack(settings) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(DEMO)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_those_of_the_built_in_engine(stack: LocalStack, reference: Reference, name: str) -> None:
    with Client(stack.address, timeout_s=120) as client:
        assert_same_answer(client.generate(PROMPT, **SAMPLINGS[name]), reference.answer(PROMPT, **SAMPLINGS[name]))


def test_the_choices_of_a_request_differ(stack: LocalStack) -> None:
    with Client(stack.address, timeout_s=120) as client:
        completion = client.generate(PROMPT, n=2, seed=3, **{**SAMPLED, "max_tokens": 16})
    first, second = completion.choices
    assert len(first.token_ids) == len(second.token_ids) == 16
    assert first.token_ids != second.token_ids


@pytest.mark.parametrize("end", ["SIGKILL", "drain"])
def test_no_stream_changes_when_an_instance_leaves(stack: LocalStack, reference: Reference, end: str) -> None:
    samplings = [{**sampling, "seed": seed, "max_tokens": 120, "ignore_eos": "regex" not in sampling}
                 for seed in range(3) for sampling in SAMPLINGS.values() if "stop" not in sampling]  # fmt: skip
    expected = [reference.answer(PROMPT, **sampling) for sampling in samplings]
    running = [BackgroundRequest(stack.address, PROMPT, timeout_s=300, **sampling) for sampling in samplings]
    for request in running:
        request.wait_first_token(120)
    leaving = stack.processes["decode-0"]
    assert load(stack.instances["decode-0"]).num_running > 0, "nothing would be resumed"
    if end == "SIGKILL":
        leaving.kill()
    else:
        leaving.send_signal(signal.SIGTERM)
    for request, answer in zip(running, expected, strict=True):
        assert_same_answer(request.completion(), answer)
    wait_until(lambda: not leaving.running, within_s=120)
    wait_until(lambda: not busy(load(stack.instances["decode-1"])))
    stack.restart("decode-0")
    stack.wait_ready("decode-0")
