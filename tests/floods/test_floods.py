"""While somebody floods a port, others get every token, and when it is over nothing is left of it.

How much slower the others become is for `python -m benchmarks.floods`; here they must be exact, and memory bounded.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from tandem import AsyncClient
from tests.floods.floods import ANY_PORT, CLIENTS_PORT, Flood
from tests.lively import random_prompt
from tests.system.checker import Footprint, assert_no_leak, footprint, wait_idle
from tests.system.reference import Reference
from tests.system.rig import Rig

pytestmark = pytest.mark.slow

FLOOD_S = 2.0
MAX_GROWTH = 320 << 20
"""Bytes of one process: eight messages of 4 MiB received, and one parsed. Floods without bounds took gigabytes."""
NUM_NEIGHBOURS = 3
SAMPLING: Any = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
IDLE_WITHIN_S = 30.0

FLOODS = [("router", name, flood) for name, flood in {**ANY_PORT, **CLIENTS_PORT}.items()]
FLOODS += [("decode-0", name, flood) for name, flood in ANY_PORT.items()]


def rss(rig: Rig) -> dict[int, int]:
    """Bytes by process id, of every member and its engine core."""
    found = {}
    for member in rig.stack.processes.values():
        front = psutil.Process(member.pid)
        found |= {process.pid: process.memory_info().rss for process in (front, *front.children(recursive=True))}
    return found


class Neighbours:
    """Clients that ask one question after the other, and compare every answer."""

    def __init__(self, address: str, reference: Reference) -> None:
        self._address = address
        self._prompts = [random_prompt(random.Random(number), 70) for number in range(NUM_NEIGHBOURS)]
        self._expected = [reference.answer(prompt, **SAMPLING) for prompt in self._prompts]
        self.num_answers = 0

    async def ask(self, number: int) -> None:
        """One question of one client."""
        async with AsyncClient(self._address) as client:
            completion = await client.generate(self._prompts[number], **SAMPLING)
        assert completion.token_ids == self._expected[number].token_ids
        self.num_answers += 1

    async def ask_until(self, stop: asyncio.Event) -> None:
        """All of them, each one after the other."""

        async def one(number: int) -> None:
            while not stop.is_set():
                await self.ask(number)

        await asyncio.gather(*map(one, range(NUM_NEIGHBOURS)))


async def nothing_is_left(before: Footprint, rig: Rig) -> None:
    """As checked by assert_no_leak, once the server has noticed that its clients have gone."""
    deadline_s = time.monotonic() + IDLE_WITHIN_S
    while True:
        try:
            assert_no_leak(before, rig)
        except AssertionError:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.5)
        else:
            return


def growth(before: Mapping[int, int], after: Mapping[int, int]) -> dict[int, int]:
    return {pid: after[pid] - before[pid] for pid in before}


@pytest.mark.parametrize(("member", "name", "flood"), FLOODS, ids=[f"{member}-{name}" for member, name, _ in FLOODS])
async def test_neighbours_are_exact_and_memory_is_bounded(
    rig: Rig, reference: Reference, member: str, name: str, flood: Flood
) -> None:
    address = rig.address if member == "router" else rig.stack.instances[member]
    neighbours, stop = Neighbours(rig.address, reference), asyncio.Event()
    await neighbours.ask(0)
    wait_idle(rig, IDLE_WITHIN_S)
    before, memory = footprint(rig), rss(rig)

    # STEP flood, and send requests meanwhile
    flooding = asyncio.ensure_future(flood(address, stop))
    asking = asyncio.create_task(neighbours.ask_until(stop))
    peak = dict(memory)
    for _ in range(int(FLOOD_S / 0.1)):
        await asyncio.sleep(0.1)
        peak = {pid: max(peak[pid], size) for pid, size in rss(rig).items()}
    stop.set()
    num_done = await flooding
    await asking

    # STEP the flood took place, other clients were not affected, and nothing is left
    assert num_done >= 5, "too few repetitions for a flood"
    assert neighbours.num_answers > NUM_NEIGHBOURS
    assert max(growth(memory, peak).values()) <= MAX_GROWTH, growth(memory, peak)
    await nothing_is_left(before, rig)
    await neighbours.ask(0)
