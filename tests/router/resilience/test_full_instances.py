"""Waiting for room at a full decode instance is no failure of it; silence is."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from router.dispatch import instance_call
from tests.fakes.behaviour import Behaviour
from tests.router.conftest import Run
from tests.router.failing import busy, decodes, status_of
from tests.router.rig import PROMPT, Rig, request_of
from tests.waiting import until

AT_ONCE = {"failures": 1}
"""The first failure ejects: an instance that is in has not failed."""
SILENCE_S = 2.0
"""Longer than a stall of the machine."""
PATIENT = {"reserve_timeout_s": 60.0, "reservation_s": 0.3}
IMPATIENT = {"reserve_timeout_s": 0.3, "reservation_s": 60.0}
FULL: dict[str, Any] = {"reserve_s": 60, "num_without_room": 1}
STUCK: dict[str, Any] = {"reserve_s": 60}


def ejected(rig: Rig) -> list[str]:
    outliers = rig.app.safeguards.outliers["decode"]
    return [view.info.instance_id for view in rig.app.pools.decode.views() if outliers.ejected_s(view.key) is not None]


async def test_more_streams_than_slots_are_all_served_and_no_instance_is_ejected(run: Run) -> None:
    fakes = decodes(*(Behaviour(slots=2, token_s=0.5) for _ in range(2)))
    settings = {"admission": {"sequence_fraction": 2.0}, "disaggregation": {"reserve_timeout_s": SILENCE_S}}
    async with run(decode=fakes, ejection=AT_ONCE, **settings) as rig:
        prompts = [[20 + i, *PROMPT] for i in range(8)]
        pending = [asyncio.create_task(rig.generate(request_of(prompt))) for prompt in prompts]
        await until(lambda: sum(len(fake.recorded("decode")) for fake in fakes) == len(prompts))
        await asyncio.sleep(1.25 * SILENCE_S)
        assert sum(len(fake.recorded("reserved")) for fake in fakes) == 4, "the others have waited all the while"
        for fake in fakes:
            fake.behaviour.token_s = 0.0
        for prompt, answer in zip(prompts, await asyncio.gather(*pending), strict=True):
            assert answer.is_exactly(12, prompt=prompt)
        assert sum(len(fake.recorded("decode")) for fake in fakes) == len(prompts), "none was tried again"
        assert ejected(rig) == []


async def test_a_halt_of_the_router_gives_no_reservation_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_call, "_LOOK_AGAIN_S", 60.0)
    late = decodes(Behaviour(reserve_s=0.05))
    async with run(decode=late, disaggregation={"reserve_timeout_s": 0.3}, ejection=AT_ONCE) as rig:
        asked = asyncio.create_task(rig.generate())
        await rig.decode[0].until("decode")
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        assert (await asked).is_exactly(12)
        assert len(rig.decode[0].recorded("decode")) == 1
        assert ejected(rig) == []


async def test_after_its_longest_wait_for_room_a_request_goes_elsewhere(run: Run) -> None:
    async with run(decode=decodes(Behaviour(**FULL), busy()), disaggregation=PATIENT, ejection=AT_ONCE) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert len(rig.decode[0].recorded("decode")) == 1
        assert ejected(rig) == []


async def test_the_wait_for_a_grammar_takes_nothing_from_that_for_room(run: Run) -> None:
    """The instance counts each, and reports the request all the while."""
    slow: dict[str, Any] = {**FULL, "reserve_s": 5 * PATIENT["reservation_s"]}
    async with run(decode=decodes(Behaviour(**slow), busy()), disaggregation=PATIENT, ejection=AT_ONCE) as rig:
        request = request_of()
        request.sampling.regex = "[a-z]+"
        assert (await rig.generate(request)).is_exactly(12)
        assert [len(fake.recorded("decode")) for fake in rig.decode] == [1, 0]


async def test_full_everywhere_is_overload_with_a_hint(run: Run) -> None:
    fakes = decodes(Behaviour(**FULL), busy(**FULL))
    async with run(decode=fakes, disaggregation=PATIENT, ejection=AT_ONCE) as rig:
        error = await status_of(rig)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("grpc-retry-pushback-ms", "1000") in tuple(error.trailing_metadata() or ())
        assert all(len(fake.recorded("decode")) == 1 for fake in fakes)
        assert ejected(rig) == []


@pytest.mark.parametrize(("behaviour", "goes_silent"), [(STUCK, False), (FULL, True)])
async def test_an_instance_that_neither_answers_nor_reports_a_queue_has_failed(
    run: Run, behaviour: dict[str, Any], goes_silent: bool
) -> None:
    async with run(decode=decodes(Behaviour(**behaviour), busy()), disaggregation=IMPATIENT, ejection=AT_ONCE) as rig:
        rig.decode[0].behaviour.beats = not goes_silent
        assert (await rig.generate()).is_exactly(12)
        assert len(rig.decode[0].recorded("decode")) == 1
        assert ejected(rig) == ["decode-0"]
