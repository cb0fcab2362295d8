"""The demo model, and other shapes of a stack: handing over only long prompts, and no prefill pool. What the processes
of a stack are: servers without torch, each of which ends with its engine core."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from protos.tandem.v1 import decode_pb2
from protos.tandem.v1.decode_pb2_grpc import DecodeServiceStub
from serving.channel import open_channel
from serving.lifecycle import EXIT_FAILED
from tandem import Client
from tests.instance.rig import instance_request, refusal
from tests.lively import random_prompt, rig_settings
from tests.system.background_request import BackgroundRequest
from tests.system.checker import assert_same_answer, assert_usage, wait_idle
from tests.system.reference import Reference
from tests.system.rig import Rig
from tests.system.stacks import GREEDY, Stack, on_stack
from tests.waiting import until, wait_until

TEXT = {"temperature": 0.0, "max_tokens": 48}
# In full: the router fills what is missing from the model's generation_config.json, the offline engine does not.
SEEDED_TEXT = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 3, "max_tokens": 48}
STORY = "Once upon a time there was a mole called Müller, who mended tandems. " * 8


@on_stack("demo")
@pytest.mark.parametrize("prompt", ["Once upon a time", STORY, "🚲"], ids=["short", "long", "emoji"])
@pytest.mark.parametrize("sampling", [TEXT, SEEDED_TEXT], ids=["greedy", "seeded"])
def test_demo_model_gives_the_aggregated_engines_text(stack: Stack, prompt: str, sampling: dict[str, object]) -> None:
    with Client(stack.rig.address) as client:
        completion = client.generate(prompt, **sampling)  # type: ignore[arg-type]
    assert_same_answer(completion, stack.reference.answer(prompt, **sampling))
    assert_usage(completion)


@on_stack("demo")
def test_a_chat_comes_to_its_own_end(stack: Stack) -> None:
    with Client(stack.rig.address) as client:
        completion = client.generate([{"role": "user", "content": "Who mends tandems?"}], temperature=0.0)
    assert completion.finish_reason == "stop"
    assert completion.text.strip()
    assert "<|" not in completion.text


@on_stack("killable shared_storage")
def test_auto_hands_over_long_prompts_and_prefills_short_ones_where_they_are_decoded(
    stack: Stack, prompts: random.Random
) -> None:
    """Killable stacks split by length: more than 64 tokens."""

    def num_prefilled(role: str) -> int:
        return sum(load.num_prefilled_tokens for name, load in stack.settled().items() if name.startswith(role))

    before = num_prefilled("prefill")
    short = stack.generate(random_prompt(prompts, 40), GREEDY)
    assert short.usage.external_tokens == 0
    assert num_prefilled("prefill") == before
    by_decode = num_prefilled("decode")
    long = stack.generate(random_prompt(prompts, 200), GREEDY)
    assert long.usage.external_tokens == 200
    assert num_prefilled("decode") == by_decode


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Iterator[Rig]:
    """A decode instance without a prefill pool."""
    long_wait = ("--failover-resume-wait-s", "30")
    settings = rig_settings(checkpoint, num_prefill=0, disaggregation="auto", router_args=long_wait)
    rig = Rig(settings, failpoints={"decode-0": ("engine.step",)})
    rig.start()
    try:
        yield rig
    finally:
        rig.stop()


def test_without_a_prefill_pool_the_decode_instance_does_it_all(
    alone: Rig, reference: Reference, prompts: random.Random
) -> None:
    for length in (1, 30, 200):
        prompt = random_prompt(prompts, length)
        with Client(alone.address) as client:
            completion = client.generate(prompt, **GREEDY)
        assert_same_answer(completion, reference.answer(prompt, **GREEDY))
        assert completion.usage.external_tokens == 0
    wait_idle(alone, 15.0)


def test_a_request_waits_for_the_only_instance_while_its_machine_is_held_up(
    alone: Rig, reference: Reference, prompts: random.Random
) -> None:
    prompt = random_prompt(prompts, 20)
    num_out = alone.router_warnings().count(" is out: ")
    with alone.frozen("decode-0"):
        wait_until(
            lambda: alone.router_warnings().count(" is out: ") > num_out, "the router does not notice that it is silent"
        )
        request = BackgroundRequest(alone.address, prompt, **GREEDY)
        time.sleep(1.0)  # longer than a rejection takes
    assert_same_answer(request.completion(), reference.answer(prompt, **GREEDY))
    wait_until(lambda: alone.is_ready("decode-0"), "it is not ready again")


async def test_an_instance_ends_with_its_core(alone: Rig) -> None:
    process = alone.stack.processes["decode-0"]
    [core] = psutil.Process(process.pid).children()
    with alone.armed("decode-0", "engine.step") as step:
        async with open_channel(alone.stack.instances["decode-0"]) as channel:
            call = DecodeServiceStub(channel).Decode()
            start = decode_pb2.DecodeStart(request=instance_request(prompt_token_ids=[5]))
            await call.write(decode_pb2.DecodeRequest(start=start))
            assert (await asyncio.to_thread(step.wait)).pid == core.pid
            core.kill()
            assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
    await until(lambda: not process.running)
    assert process.exit_status == EXIT_FAILED
    alone.stack.restart("decode-0")  # a rig in which a process has ended by itself is a failure


@on_stack("pair shared_storage")
def test_routers_and_servers_of_instances_have_no_torch(shared_stack: Stack) -> None:
    for name, process in shared_stack.rig.stack.processes.items():
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), name
