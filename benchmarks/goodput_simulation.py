"""Goodput of `auto`, with objectives and without, against static stacks, in virtual time.

    python -m benchmarks.goodput_simulation [--seconds 60] [--seed 1] [--only 4] [--noise 0.1] [--hardware core]

The engine's step budget (engine/scheduling/step_budget.py), the fit of its costs and the router's decision
(router/picking/placement.py) are the product's; instances are stubs whose steps take base + per_stream * streams +
per_token * prompt tokens, times a random factor if wanted (`--noise`). `--hardware core` is a core of the 33m shape as
measured, with the objectives of `pd_isolation`: a step with both streams and prompts takes longer than the sum, and
prompts alone hide the base, which the fit does not know of. Everything else is ideal: enough KV, no
contention for cores, load reports of this very moment. 27 points: 2, 4 and 8 instances, three mixes, three rates.
Beside `auto`, with objectives and without, run the static stacks with the same instances: aggregated with each chunk
budget (all with streams first, as the engine has them), and split always with each division into pools.

    arrival ─place─▶ prompts of an instance ─first token─▶ its own streams, or, after the hand-over, another's ─▶ done
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple

import click

from engine.core.messages import StepCost
from engine.scheduling import step_budget
from engine.scheduling.step_budget import Prompt, Stream
from engine.scheduling.step_cost import RecentRate, StepCostEstimator
from router.picking.placement import STEP_STRETCH, Goal, Site, place
from router.picking.settings import DisaggregationSettings


class Hardware(NamedTuple):
    """What a step takes, and the objectives that suit it."""

    cost: StepCost
    ttft_s: float
    itl_s: float
    mixed_s: float = 0.0
    """More, of a step with both streams and prompts."""
    hides_base: bool = False
    """A step of prompts alone takes what its tokens take; the weights are read meanwhile."""
    max_tokens: int = 2048

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        cost = self.cost
        if num_streams == 0 and self.hides_base:
            return max(cost.base_s, cost.per_token_s * num_tokens)
        return cost.seconds(num_streams, num_tokens) + (self.mixed_s if num_streams and num_tokens else 0.0)


HARDWARE = {
    "linear": Hardware(StepCost(0.0035, 0.0006, 1 / 4500), 1.0, 0.012),
    "core": Hardware(StepCost(0.006, 0.0004, 0.0004), 1.5, 0.018, 0.004, hides_base=True, max_tokens=512),
}
HAND_OVER_S, HAND_OVER_TOKEN_S = 0.025, 25e-6
CHUNKS = (128, 256, 512, 2048)
SIZES = (2, 4, 8)
LOADS = (0.4, 0.65, 0.9)
"""Of what the instances could do if their steps were all as long as the objective."""
_WARM_UP_S = 5.0
_SHARE_WINDOW_S = 5.0

Policy = Literal["auto", "free", "alone", "aggregated", "split"]
"""free: auto without objectives; alone: auto that never splits."""
_MIN_TOKENS = DisaggregationSettings().min_tokens


class Work(NamedTuple):
    num_input: int
    num_output: int


def _spread(rng: random.Random, mean: float, sigma: float = 0.6) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


MIXES: dict[str, Callable[[random.Random], Work]] = {
    "long50": lambda rng: Work(2048, 16) if rng.random() < 0.5 else Work(64, 256),
    "chat": lambda rng: Work(_spread(rng, 1150, 0.9), _spread(rng, 200)),
    "code": lambda rng: Work(_spread(rng, 2000), _spread(rng, 28)),
}


@dataclass(slots=True, eq=False)
class Request:
    work: Work
    arrived_s: float
    first_s: float = math.inf
    last_s: float = math.inf
    """Of its latest token."""
    num_out: int = 0
    num_left: int = 0
    is_late: bool = False
    decodes_at: Instance | None = None
    """None: at the instance that prefills."""

    @property
    def stays(self) -> bool:
        """It becomes a stream where it is prefilled."""
        return self.decodes_at is None

    @property
    def is_begun(self) -> bool:
        return self.num_left < self.work.num_input

    def is_good(self, hardware: Hardware) -> bool:
        tpot_s = (self.last_s - self.first_s) / max(self.work.num_output - 1, 1)
        is_complete = self.num_out >= self.work.num_output
        return is_complete and self.first_s - self.arrived_s <= hardware.ttft_s and tpot_s <= hardware.itl_s


@dataclass(eq=False)
class Instance:
    """`chunk`: of a static stack; None: the step budget."""

    simulation: Simulation
    chunk: int | None
    prompts: list[Request] = field(default_factory=list)
    streams: list[Request] = field(default_factory=list)
    num_coming: int = 0
    """Streams whose KV is under way."""
    is_stepping: bool = False
    estimator: StepCostEstimator = field(default_factory=StepCostEstimator)
    assigned: deque[tuple[float, int]] = field(default_factory=deque)
    prefill_rate: RecentRate = field(default_factory=RecentRate)

    @property
    def hardware(self) -> Hardware:
        return self.simulation.hardware

    @property
    def num_uncomputed(self) -> int:
        return sum(request.num_left for request in self.prompts if not request.is_late)

    @property
    def num_streams(self) -> int:
        """Those of the prompts that stay here, too."""
        return len(self.streams) + self.num_coming + sum(one.stays for one in self.prompts)

    def assign(self, request: Request) -> None:
        request.num_left = request.work.num_input
        self.assigned.append((self.simulation.now_s, request.num_left))
        self.prompts.append(request)
        self.wake()

    def share(self) -> float:
        """Of the last seconds, the part that the prompts assigned in them take."""
        since_s = self.simulation.now_s - _SHARE_WINDOW_S
        while self.assigned and self.assigned[0][0] < since_s:
            self.assigned.popleft()
        return min(0.95, sum(num for _, num in self.assigned) * self.hardware.cost.per_token_s / _SHARE_WINDOW_S)

    def join(self, request: Request) -> None:
        self.num_coming -= 1
        self.streams.append(request)
        self.wake()

    def wake(self) -> None:
        if not self.is_stepping:
            self.is_stepping = True
            self._step()

    def _step(self) -> None:
        if not (self.prompts or self.streams):
            self.is_stepping = False
            return
        left, num_streams, shares = self._budget(), len(self.streams), []
        num_becoming = num_streams + self.num_coming + sum(one.stays and one.is_begun for one in self.prompts)
        for request in self.prompts:
            if left == 0:
                break
            if request.stays and not request.is_begun:
                if not self._may_begin(request, num_becoming):
                    continue
                num_becoming += 1
            num_tokens = min(request.num_left, left)
            shares.append((request, num_tokens))
            left -= num_tokens
        num_tokens = sum(num for _, num in shares)
        seconds = self.hardware.seconds(num_streams, num_tokens) * self.simulation.factor()
        self.estimator.record(seconds, num_streams, num_tokens)
        self.simulation.later(seconds, self._end, shares, list(self.streams))

    def _may_begin(self, request: Request, num_streams: int) -> bool:
        cost = self.estimator.cost
        if self.chunk is not None or self.simulation.policy == "free":
            return True
        return step_budget.may_begin(cost, self.hardware.itl_s, num_streams, is_late=request.is_late)

    def _budget(self) -> int:
        if self.chunk is not None:
            return max(self.chunk - len(self.streams), 0)
        if self.simulation.policy == "free":
            return self._stretched()
        now_s, cost, hardware = self.simulation.now_s, self.estimator.cost, self.hardware
        itl_s, max_tokens = hardware.itl_s, hardware.max_tokens
        streams = [Stream(itl_s, step_budget.slack_s(itl_s, one.first_s, one.num_out, now_s)) for one in self.streams]
        planned = [
            Prompt(one.num_left, one.arrived_s + hardware.ttft_s - now_s) for one in self.prompts if not one.is_late
        ]
        late = set(step_budget.late(cost, len(streams), planned, max_tokens))
        if late:
            on_time = [one for one in self.prompts if not one.is_late]
            for index in late:
                on_time[index].is_late = True
            self.prompts.sort(key=lambda one: one.is_late)
            planned = [prompt for index, prompt in enumerate(planned) if index not in late]
        are_late = any(one.is_late for one in self.prompts)
        prefill_per_s = self.prefill_rate.per_s(now_s)
        return step_budget.prompt_budget(
            cost, streams, len(streams), planned, max_tokens, are_late=are_late, prefill_per_s=prefill_per_s
        )

    def _stretched(self) -> int:
        num_streams, num_tokens = len(self.streams), None
        if num_streams:
            num_tokens = step_budget.stretched_tokens(self.estimator.cost, num_streams, len(self.prompts), STEP_STRETCH)
        return self.hardware.max_tokens if num_tokens is None else min(num_tokens, self.hardware.max_tokens)

    def _end(self, shares: list[tuple[Request, int]], streams: list[Request]) -> None:
        for request in streams:
            self._token(request)
        for request, num_tokens in shares:
            request.num_left -= num_tokens
            self.prefill_rate.add(num_tokens, self.simulation.now_s)
            if not request.num_left:
                self.prompts.remove(request)
                self._token(request)
                if request.num_out < request.work.num_output:
                    self._go_on(request)
        self._step()

    def _token(self, request: Request) -> None:
        now_s = self.simulation.now_s
        request.num_out += 1
        if request.num_out == 1:
            request.first_s = now_s
        elif request.arrived_s >= _WARM_UP_S:
            self.simulation.gaps_s.append(now_s - request.last_s)
        request.last_s = now_s
        if request.num_out >= request.work.num_output and request in self.streams:
            self.streams.remove(request)

    def _go_on(self, request: Request) -> None:
        if request.decodes_at is None:
            self.streams.append(request)
        else:
            self.simulation.later(_hand_over_s(request), request.decodes_at.join, request)


def _hand_over_s(request: Request) -> float:
    return HAND_OVER_S + HAND_OVER_TOKEN_S * request.work.num_input


class Simulation:
    """One stack under one load."""

    def __init__(
        self,
        policy: Policy,
        num_prefill: int,
        num_decode: int,
        chunk: int | None,
        hardware: Hardware,
        seed: int,
        noise: float,
    ) -> None:
        self.now_s = 0.0
        self.reasons: dict[str, int] = {}
        self.gaps_s: list[float] = []
        """Between the tokens of a stream."""
        self.policy = policy
        self.hardware = hardware
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._rng, self._noise, self._noise_rng = random.Random(seed), noise, random.Random(seed)
        self._lengths: deque[int] = deque(maxlen=64)
        prefill_chunk = hardware.max_tokens if policy == "split" else chunk
        self._prefill = [Instance(self, prefill_chunk) for _ in range(num_prefill)]
        self._decode = [Instance(self, chunk) for _ in range(num_decode)]

    def factor(self) -> float:
        """By which the next step differs from what it costs on average."""
        return self._noise_rng.lognormvariate(0.0, self._noise)

    def later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now_s + seconds, self._num_events, call, args))

    def run(self, requests: list[Request]) -> float:
        """Goodput: good requests a second, of those after the warm-up."""
        for request in requests:
            self.later(request.arrived_s, self._arrive, request)
        end_s = requests[-1].arrived_s
        while self._events and self.now_s < end_s + 30:
            self.now_s, _, call, args = heapq.heappop(self._events)
            call(*args)
        counted = [request for request in requests if request.arrived_s >= _WARM_UP_S]
        return sum(request.is_good(self.hardware) for request in counted) / (end_s - _WARM_UP_S)

    def _arrive(self, request: Request) -> None:
        self._lengths.append(request.work.num_output)
        if self.policy == "aggregated":
            self._least(self._decode).assign(request)
        elif self.policy == "split":
            self._assign(request, self._least(self._prefill), self._least(self._decode))
        else:
            self._place(request)

    def _assign(self, request: Request, prefill: Instance, decode: Instance) -> None:
        request.decodes_at = decode
        decode.num_coming += 1
        prefill.assign(request)

    def _least(self, instances: list[Instance]) -> Instance:
        return min(instances, key=lambda one: (4 * len(one.prompts) + one.num_streams, self._rng.random()))

    def _place(self, request: Request) -> None:
        prefill, decode, ttft_s, itl_s = self._prefill, self._decode, self.hardware.ttft_s, self.hardware.itl_s
        if self.policy == "free":
            prefill, decode = [self._least(prefill)], [self._least(decode)]
            steps_s = (_cost(one).seconds(one.num_streams + 1) for one in (*prefill, *decode))
            ttft_s, itl_s = math.inf, STEP_STRETCH * max(steps_s)
        instances = [*prefill, *decode]
        shares = [instance.share() for instance in instances]
        short = sorted(self._lengths)[len(self._lengths) // 10]
        goal = Goal(ttft_s, itl_s, fmean(self._lengths), fmean(shares), short)
        sites = [
            Site(
                goal,
                _cost(instance),
                self.hardware.max_tokens,
                instance.num_uncomputed,
                instance.num_streams,
                share,
                request.work.num_input,
                _hand_over_s(request),
            )
            for instance, share in zip(instances, shares, strict=True)
        ]
        may_split = self.policy == "auto" or (self.policy == "free" and request.work.num_input > _MIN_TOKENS)
        pairs = [(range(len(prefill)), range(len(prefill), len(sites)))] if may_split else []
        placement = place(sites, pairs, self._rng)
        self.reasons[placement.reason] = self.reasons.get(placement.reason, 0) + 1
        if placement.prefill is None:
            instances[placement.site].assign(request)
        else:
            self.reasons["split"] = self.reasons.get("split", 0) + 1
            self._assign(request, instances[placement.prefill], instances[placement.site])


def _cost(instance: Instance) -> StepCost:
    cost = instance.estimator.cost
    return cost if cost is not None and min(cost.base_s, cost.per_token_s) > 0 else instance.hardware.cost


def arrivals(mix: str, rate: float, seconds: float, seed: int) -> list[Request]:
    rng, now_s, requests = random.Random(seed), 0.0, []
    while now_s < seconds:
        now_s += rng.expovariate(rate)
        requests.append(Request(MIXES[mix](rng), now_s))
    return requests


def full_rate(mix: str, num_instances: int, hardware: Hardware) -> float:
    """Requests a second at which the instances' time is used up, with steps as long as the objective."""
    rng = random.Random(0)
    works = [MIXES[mix](rng) for _ in range(2000)]
    cost, itl_s = hardware.cost, hardware.itl_s
    streams = (itl_s - cost.base_s) / cost.per_stream_s
    busy_s = fmean(one.num_input * cost.per_token_s + one.num_output * itl_s / streams for one in works)
    return num_instances / busy_s


class Stack(NamedTuple):
    name: str
    policy: Policy
    num_prefill: int
    num_decode: int
    chunk: int | None


def static_stacks(size: int, hardware: Hardware) -> Iterator[Stack]:
    for chunk in (chunk for chunk in CHUNKS if chunk <= hardware.max_tokens):
        yield Stack(f"aggregated, {chunk}", "aggregated", 0, size, chunk)
    for num_prefill in sorted({max(1, size // 4), size // 2, size - max(1, size // 4)}):
        yield Stack(
            f"{num_prefill}P{size - num_prefill}D always", "split", num_prefill, size - num_prefill, hardware.max_tokens
        )


def simulate(
    stack: Stack, mix: str, rate: float, hardware: Hardware, *, seconds: float, seed: int, noise: float
) -> tuple[float, float]:
    """Goodput, and the 99th percentile of the gaps between tokens, in seconds."""
    simulation = Simulation(stack.policy, stack.num_prefill, stack.num_decode, stack.chunk, hardware, seed, noise)
    goodput, gaps_s = simulation.run(arrivals(mix, rate, seconds, seed)), sorted(simulation.gaps_s)
    return goodput, gaps_s[len(gaps_s) * 99 // 100]


class Point(NamedTuple):
    size: int
    mix: str
    load: float
    rate: float
    auto: float
    alone: float
    best: float
    best_name: str
    itl_p99_ms: float
    """Of auto."""
    free: float
    free_itl_p99_ms: float

    @property
    def ratio(self) -> float:
        return self.auto / self.best if self.best else math.inf


def measure(
    size: int, mix: str, load: float, *, seconds: float, seed: int, noise: float = 0.0, hardware: str = "linear"
) -> Point:
    machine = HARDWARE[hardware]
    rate = load * full_rate(mix, size, machine)
    half = size // 2

    def run(stack: Stack) -> tuple[float, float]:
        return simulate(stack, mix, rate, machine, seconds=seconds, seed=seed, noise=noise)

    auto, itl_p99_s = run(Stack("auto", "auto", half, size - half, None))
    free, free_itl_p99_s = run(Stack("free", "free", half, size - half, None))
    alone, _ = run(Stack("alone", "alone", half, size - half, None))
    best, name = max((run(one)[0], one.name) for one in static_stacks(size, machine))
    return Point(size, mix, load, rate, auto, alone, best, name, itl_p99_s * 1e3, free, free_itl_p99_s * 1e3)


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="Of arrivals, in virtual time.")
@click.option("--seed", default=1, show_default=True)
@click.option("--only", type=int, help="Only stacks of so many instances.")
@click.option("--noise", default=0.0, show_default=True, help="Standard deviation of the logarithm of a step's time.")
@click.option(
    "--hardware", type=click.Choice(list(HARDWARE)), default="linear", show_default=True, help="What a step takes."
)
def main(seconds: float, seed: int, only: int | None, noise: float, hardware: str) -> None:
    """Print goodput of auto, with objectives and without, and of the best static stack at each point, as a Markdown
    table."""
    click.echo(
        "| instances | mix | load | requests/s | auto | its ITL p99, ms | without objectives | its ITL p99, ms | "
        "never split | best static | | auto / best |"
    )
    click.echo("|" + " --- |" * 12)
    ratios = []
    for size in SIZES if only is None else (only,):
        for mix in MIXES:
            for load in LOADS:
                point = measure(size, mix, load, seconds=seconds, seed=seed, noise=noise, hardware=hardware)
                ratios.append(point.ratio)
                click.echo(
                    f"| {size} | {mix} | {load:g} | {point.rate:.1f} | {point.auto:.2f} | {point.itl_p99_ms:.0f} | "
                    f"{point.free:.2f} | {point.free_itl_p99_ms:.0f} | {point.alone:.2f} | {point.best:.2f} | "
                    f"{point.best_name} | {point.ratio:.2f} |"
                )
    click.echo(f"\nauto / best: least {min(ratios):.2f}, mean {fmean(ratios):.2f}")


if __name__ == "__main__":
    main()
