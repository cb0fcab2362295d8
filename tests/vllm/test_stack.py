"""A whole stack with vLLM in its instances: what clients see is what the built-in engine would have answered."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from engine import SamplingParams
from tandem import Client
from tandem.client.health import instances_out, load
from tandem.demo import MODEL_DIR as DEMO
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack
from tests.process_logs import LOGS
from tests.system.background_request import BackgroundRequest
from tests.system.checker import assert_same_answer, busy
from tests.system.reference import Reference
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(1200)

PROMPT = "Once upon a time there was a penguin called Penny who had a tandem. " * 6
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 1.0, "top_k": 0, "max_tokens": 64, "ignore_eos": True}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 64},
    "seeded": {**SAMPLED, "seed": 7},
    "penalties": {**SAMPLED, "seed": 8, "presence_penalty": 1.0, "repetition_penalty": 1.1},
    "stop string": {**SAMPLED, "seed": 9, "stop": ["the", "and"]},
    "regex": {**SAMPLED, "seed": 10, "regex": "[a-z ]{30,60}", "ignore_eos": False},
}


@pytest.fixture(scope="module", params=["aggregated", "split"])
def stack(request: pytest.FixtureRequest, vllm_python: str) -> Iterator[LocalStack]:
    is_split = request.param == "split"
    settings = StackSettings(
        model=DEMO,
        model_name="demo",
        engine="vllm",
        engine_python=vllm_python,
        num_prefill=int(is_split),
        num_decode=2,
        disaggregation="always" if is_split else "never",
        dtype="float32",
        num_blocks=200,
        instance_args=(
            *("--block-size", "32", "--server-drain-accept-s", "0.1"),
            *("--server-drain-grace-s", "60", "--server-drain-move-s", "59.8"),  # streams move at once
        ),
    )
    # vLLM logs the exceptions with which its processes end, when one of them is killed and when they are stopped.
    with LOGS.expected("EngineDeadError|CancelledError|vllm"), LocalStack(settings) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(DEMO)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_those_of_the_built_in_engine(stack: LocalStack, reference: Reference, name: str) -> None:
    before, prompt = num_external_tokens(stack), f"{PROMPT} And now some {name}"
    with Client(stack.address, timeout_s=120) as client:
        completion = client.generate(prompt, **SAMPLINGS[name])
    assert_same_answer(completion, reference.answer(prompt, **SAMPLINGS[name]))
    if "prefill-0" in stack.instances:
        usage = completion.choices[0].usage
        assert usage.external_tokens > 0
        assert usage.recomputed_tokens == 0
        wait_until(lambda: num_external_tokens(stack) >= before + usage.external_tokens)


def num_external_tokens(stack: LocalStack) -> int:
    """Tokens whose KV decode instances got from elsewhere."""
    return sum(load(address).num_external_tokens for name, address in stack.instances.items() if "decode" in name)


def test_the_choices_of_a_request_are_those_of_the_built_in_engine(stack: LocalStack, reference: Reference) -> None:
    sampling = {**SAMPLED, "max_tokens": 16, "n": 2, "seed": 3}
    with Client(stack.address, timeout_s=120) as client:
        completion = client.generate(PROMPT, **sampling)
    [expected] = reference.llm.generate([PROMPT], SamplingParams(**sampling), use_tqdm=False)
    found = [list(choice.token_ids) for choice in completion.choices]
    assert found == [list(choice.token_ids) for choice in expected.outputs]
    assert found[0] != found[1]


def busiest_decode(stack: LocalStack) -> str:
    """A decode instance that computes something."""
    running: dict[str, int] = {}

    def is_running() -> bool:
        running.update({name: load(at).num_running for name, at in stack.instances.items() if "decode" in name})
        return any(running.values())

    wait_until(is_running, "nothing would be resumed", within_s=10)
    return max(running, key=lambda name: running[name])


@pytest.mark.parametrize(("end", "role"), [("SIGKILL", "decode"), ("drain", "decode"), ("SIGKILL", "prefill")])
def test_no_stream_changes_when_an_instance_leaves(
    stack: LocalStack, reference: Reference, end: str, role: str
) -> None:
    """Without a prefill instance it is a decode instance again."""
    samplings = [{**sampling, "seed": seed, "max_tokens": 120, "ignore_eos": "regex" not in sampling}
                 for seed in range(3) for sampling in SAMPLINGS.values() if "stop" not in sampling
                 and not (role == "prefill" and "regex" in sampling)]  # fmt: skip
    expected = [reference.answer(PROMPT, **sampling) for sampling in samplings]
    running = [BackgroundRequest(stack.address, PROMPT, timeout_s=300, **sampling) for sampling in samplings]
    for request, sampling in zip(running, samplings, strict=True):
        if "regex" not in sampling:  # its grammar may take longer than the others' answers; without one it would fail
            request.wait_first_token(120)
    name = "prefill-0" if f"{role}-0" == "prefill-0" in stack.instances else busiest_decode(stack)
    leaving = stack.processes[name]
    if end == "SIGKILL":
        leaving.kill()
    else:
        leaving.send_signal(signal.SIGTERM)
    for request, answer in zip(running, expected, strict=True):
        assert_same_answer(request.completion(), answer)
    wait_until(lambda: not leaving.running, within_s=120)
    for other in stack.instances.keys() - {name}:
        wait_until(lambda other=other: not busy(load(stack.instances[other])))  # type: ignore[misc]
    stack.restart(name)
    stack.wait_ready(name)
    wait_until(lambda: not instances_out(stack.admin_address))
