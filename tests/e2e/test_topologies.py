"""The demo model, and the other shapes of a stack: aggregated, splitting only long prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tandem import Client
from tandem.demo import MODEL_DIR
from tests.faults.checker import assert_same_answer, assert_usage, wait_idle
from tests.faults.reference import Reference
from tests.faults.rig import Rig
from tests.lively import random_prompt, rig_settings

GREEDY = {"temperature": 0.0, "max_tokens": 48}
# In full: the router fills what is missing from the model's generation_config.json, the offline engine does not.
SEEDED = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 3, "max_tokens": 48}


@pytest.fixture(scope="module")
def demo_reference() -> Reference:
    return Reference(MODEL_DIR, num_blocks=512)


@pytest.fixture(scope="module")
def demo_rig() -> Iterator[Rig]:
    """The demo model; prompts of more than 64 tokens are split, however fast it is measured to be without that."""
    by_length = ("--disaggregation-speed-smoothing", "0")
    rig = Rig(rig_settings(MODEL_DIR, disaggregation="auto", router_args=by_length))
    rig.start()
    yield rig
    wait_idle(rig)
    rig.stop()


STORY = "Once upon a time there was a mole called Müller, who mended tandems. " * 8


@pytest.mark.parametrize("prompt", ["Once upon a time", STORY, "🚲"], ids=["short", "long", "emoji"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_demo_model_gives_the_aggregated_engines_text(
    demo_rig: Rig, demo_reference: Reference, prompt: str, sampling: dict[str, object]
) -> None:
    with Client(demo_rig.address) as client:
        completion = client.generate(prompt, **sampling)  # type: ignore[arg-type]
    assert_same_answer(completion, demo_reference.answer(prompt, **sampling))
    assert_usage(completion)


def test_auto_moves_long_prompts_and_keeps_short_ones_where_they_are_decoded(demo_rig: Rig) -> None:
    with Client(demo_rig.address) as client:
        before = demo_rig.loads()
        short = client.generate("A fox", **GREEDY)  # type: ignore[arg-type]
        between = demo_rig.loads()
        long = client.generate("The fox said: " + STORY, **GREEDY)  # type: ignore[arg-type]
        after = demo_rig.loads()
    assert short.usage.external_tokens == 0
    assert between["prefill-0"].num_prefilled_tokens == before["prefill-0"].num_prefilled_tokens
    assert long.usage.external_tokens == long.prompt_tokens - long.usage.cached_tokens > 64
    assert after["decode-0"].num_prefilled_tokens == between["decode-0"].num_prefilled_tokens


def test_a_chat_comes_to_its_own_end(demo_rig: Rig) -> None:
    with Client(demo_rig.address) as client:
        completion = client.generate([{"role": "user", "content": "Who mends tandems?"}], temperature=0.0)
    assert completion.finish_reason == "stop"
    assert completion.text.strip()
    assert "<|" not in completion.text


def test_without_a_prefill_pool_the_decode_instance_does_it_all(reference: Reference, prompts: random.Random) -> None:
    rig = Rig(rig_settings(reference.folder, num_prefill=0, disaggregation="auto"))
    rig.start()
    try:
        for length in (1, 30, 200):
            prompt = random_prompt(prompts, length)
            sampling = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
            with Client(rig.address) as client:
                completion = client.generate(prompt, **sampling)  # type: ignore[arg-type]
            assert_same_answer(completion, reference.answer(prompt, **sampling))
            assert completion.usage.external_tokens == 0
        wait_idle(rig)
    finally:
        rig.stop()
