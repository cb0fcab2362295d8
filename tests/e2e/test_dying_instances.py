"""An instance that dies or freezes in the middle of an answer costs a pause, never a token.

Each test parks a real process at a failpoint, proves that it stands there, and kills or freezes it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.asking import Asked
from tests.faults.checker import assert_same_answer, wait_idle
from tests.faults.reference import Reference
from tests.faults.rig import Failpoint, Rig
from tests.lively import random_prompt, rig_settings

SAMPLINGS = {
    "greedy": {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True},
    "seeded": {"temperature": 0.9, "seed": 77, "max_tokens": 40, "ignore_eos": True},
}
STALL_S = 5.0
FREED_WITHIN_S = 4.0
"""A dead reader's lease (2 s) has to run out, and the reports have to tell."""


@pytest.fixture(scope="module")
def wide_rig(checkpoint: Path) -> Iterator[Rig]:
    """One prefill and two decode instances; what cannot be split is prefilled where it is decoded."""
    names = ("decode.after_token", "kv.load")
    by_length = ("--disaggregation-speed-smoothing", "0")
    settings = rig_settings(checkpoint, num_decode=2, disaggregation="auto", router_args=by_length)
    failpoints = {"prefill-0": ("prefill.first_token", "engine.step"), "decode-0": names, "decode-1": names}
    rig = Rig(settings, failpoints=failpoints)
    rig.start()
    try:
        yield rig
    finally:
        rig.stop()


def first_reached(failpoints: list[Failpoint]) -> Failpoint:
    """The one of several failpoints at which a process arrives."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        for failpoint in failpoints:
            if failpoint.reached:
                return failpoint
        time.sleep(0.005)
    raise AssertionError("nobody came to any of the failpoints")


@pytest.mark.parametrize("where", ["decode.after_token", "kv.load"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_killed_decode_instance_costs_a_pause_and_no_token(
    wide_rig: Rig, reference: Reference, prompts: random.Random, where: str, sampling: str
) -> None:
    prompt = random_prompt(prompts, 150)
    with wide_rig.armed("decode-0", where) as first, wide_rig.armed("decode-1", where) as second:
        asked = Asked(wide_rig.address, prompt, **SAMPLINGS[sampling])
        victim = first_reached([first, second]).member
        asked.wait_first_token()
        wide_rig.kill(victim)
        killed_s = time.monotonic()
    completion = asked.completion()
    assert time.monotonic() - killed_s < STALL_S
    assert_same_answer(completion, reference.answer(prompt, **SAMPLINGS[sampling]))
    wide_rig.restart(victim)
    wait_idle(wide_rig, FREED_WITHIN_S)


@pytest.mark.parametrize("where", ["engine.step", "prefill.first_token"])
def test_killed_prefill_instance_costs_a_pause_and_no_token(
    wide_rig: Rig, reference: Reference, prompts: random.Random, where: str
) -> None:
    prompt = random_prompt(prompts, 150)
    sampling = SAMPLINGS["greedy"]
    with wide_rig.armed("prefill-0", where) as parked:
        asked = Asked(wide_rig.address, prompt, **sampling)
        parked.wait()
        wide_rig.kill("prefill-0")
        killed_s = time.monotonic()
    completion = asked.completion()
    assert time.monotonic() - killed_s < STALL_S
    assert_same_answer(completion, reference.answer(prompt, **sampling))
    wide_rig.restart("prefill-0")
    wait_idle(wide_rig, FREED_WITHIN_S)


def test_frozen_decode_instance_is_left_behind_and_its_late_tokens_are_dropped(
    wide_rig: Rig, reference: Reference, prompts: random.Random
) -> None:
    prompt = random_prompt(prompts, 150)
    sampling = SAMPLINGS["seeded"]
    with (
        wide_rig.armed("decode-0", "decode.after_token") as first,
        wide_rig.armed("decode-1", "decode.after_token") as second,
    ):
        asked = Asked(wide_rig.address, prompt, **sampling)
        parked = first_reached([first, second])
        with wide_rig.frozen(parked.member):
            frozen_s = time.monotonic()
            for failpoint in (first, second):
                failpoint.release()
            completion = asked.completion()
            assert time.monotonic() - frozen_s < STALL_S
    assert_same_answer(completion, reference.answer(prompt, **sampling))
    wait_idle(wide_rig, FREED_WITHIN_S)
