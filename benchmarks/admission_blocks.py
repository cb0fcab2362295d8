"""How many KV blocks to promise: goodput, refusals and preemptions by `admission.block_fraction`, in simulated time.

    python -m benchmarks.admission_blocks

The router's admission controller in front of an instance that is simulated step by step: each step takes equally long,
prompts share its token budget, and when blocks run out, the request admitted last is preempted and computed again.
Lengths are exponential, as unforeseeable as can be. "Worst case" promises each request its `max_tokens`.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field

import click

from engine.sampling.params import SamplingParams
from router.admission.capacity import Capacity
from router.admission.controller import AdmissionController
from router.admission.settings import AdmissionSettings
from router.request.generation_request import GenerationRequest
from serving.errors import Overloaded
from tests.router import virtual_time

NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS = 1000, 16, 256
STEP_S, STEP_TOKENS = 0.02, 512
PROMPT = (50, 350)
MEAN_OUTPUT, MAX_TOKENS = 200, 2000
WARM_S, END_S = 60.0, 240.0
PEAK_PER_S = NUM_BLOCKS * BLOCK_SIZE / (sum(PROMPT) / 2 + MEAN_OUTPUT) / (MEAN_OUTPUT * STEP_S)
"""Requests a second that fill the blocks, if each held prompt and mean output for its life."""


@dataclass(eq=False)
class _Request:
    num_prompt: int
    length: int
    began: asyncio.Future[None]
    ended: asyncio.Future[None]
    num_computed: int = 0
    num_output: int = 0

    @property
    def num_needed(self) -> int:
        return self.num_prompt + self.num_output

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_SIZE)


@dataclass
class _Instance:
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def num_used(self) -> int:
        return sum(one.num_blocks(one.num_computed) for one in self.running)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            self.compute()
            while self.num_used > NUM_BLOCKS:
                self.preempt(self.running.pop())
            self.take()

    def compute(self) -> None:
        """One step: the missing part of each prompt within the budget, or one token."""
        budget = STEP_TOKENS
        for one in list(self.running):
            num = min(budget, max(one.num_needed - one.num_computed, 0))
            if num == 0 and one.num_computed < one.num_needed:
                continue
            was_decoding = one.num_computed >= one.num_needed
            one.num_computed += 1 if was_decoding else num
            budget -= 1 if was_decoding else num
            if was_decoding:
                self.emit(one)

    def emit(self, one: _Request) -> None:
        one.num_output += 1
        if not one.began.done():
            one.began.set_result(None)
        if one.num_output == one.length:
            self.running.remove(one)
            one.ended.set_result(None)

    def preempt(self, one: _Request) -> None:
        one.num_computed = 0
        self.num_preemptions += 1
        self.waiting.appendleft(one)

    def take(self) -> None:
        promised = sum(one.num_blocks(max(one.num_computed, one.num_needed)) for one in self.running)
        while self.waiting and len(self.running) < MAX_SEQS:
            needed = self.waiting[0].num_blocks(self.waiting[0].num_needed + 1)
            if promised + needed > NUM_BLOCKS:
                return
            promised += needed
            self.running.append(self.waiting.popleft())


class _WorstCase(AdmissionController):
    """Promises every choice its max_tokens."""

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self.lengths.expected = lambda max_tokens: max_tokens  # type: ignore[method-assign]


async def _measure(load: float, fraction: float, *, worst_case: bool) -> str:
    rng, loop, instance = random.Random(1), asyncio.get_running_loop(), _Instance()
    stepping = asyncio.create_task(instance.run())

    def look() -> Capacity:
        used = len(instance.running) + len(instance.waiting)
        return Capacity(1, MAX_SEQS, NUM_BLOCKS, BLOCK_SIZE, STEP_TOKENS, used, instance.num_used)

    admission = (_WorstCase if worst_case else AdmissionController)(
        AdmissionSettings(block_fraction=fraction), look, clock=loop.time, rng=rng
    )
    num_good_tokens, num_refused, first_tokens_s = 0, 0, []

    async def send_request() -> None:
        nonlocal num_good_tokens, num_refused
        arrived_s = loop.time()
        num_prompt, length = rng.randint(*PROMPT), min(MAX_TOKENS, max(1, round(rng.expovariate(1 / MEAN_OUTPUT))))
        one = _Request(num_prompt, length, loop.create_future(), loop.create_future())
        params = SamplingParams(max_tokens=MAX_TOKENS)
        request = GenerationRequest("label", "id", "model", (1,) * num_prompt, params)
        try:
            async with admission.admit(request) as ticket:
                instance.waiting.append(one)
                await one.began
                admission.prefilled(ticket)
                first_tokens_s.append(loop.time() - arrived_s)
                await one.ended
                ticket.num_emitted = lambda: length
            num_good_tokens += length if loop.time() > WARM_S else 0
        except Overloaded:
            num_refused += 1

    tasks = []
    while loop.time() < END_S:
        tasks.append(asyncio.create_task(send_request()))
        await asyncio.sleep(rng.expovariate(load * PEAK_PER_S))
    goodput = num_good_tokens / (END_S - WARM_S)
    for task in [stepping, *tasks]:
        task.cancel()
    await asyncio.gather(stepping, *tasks, return_exceptions=True)
    p99_s = sorted(first_tokens_s)[int(0.99 * len(first_tokens_s))]
    preempted = 100 * instance.num_preemptions / len(first_tokens_s)
    name = "worst case" if worst_case else "expected"
    cells = [f"{load:g}×", f"{name}, {fraction:g}", f"{goodput:.0f}", f"{num_refused / len(tasks):.1%}"]
    return "| " + " | ".join([*cells, f"{preempted:.0f}", f"{p99_s:.1f} s"]) + " |"


@click.command()
def main() -> None:
    """Prints one table: the load, the promised blocks, and the result."""
    print("| load | blocks promised | tokens/s | refused | preempted per 100 | first token p99 |")
    print("|---|---|---|---|---|---|")
    for load in (0.8, 3.0):
        for worst_case, fraction in [
            (True, 0.85),
            (True, 1.0),
            *((False, f) for f in (0.7, 0.85, 0.9, 1.0, 1.2, 100.0)),
        ]:
            print(virtual_time.run(_measure(load, fraction, worst_case=worst_case)), flush=True)


if __name__ == "__main__":
    main()
