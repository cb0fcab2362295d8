"""Routers and stub instances on a virtual clock, around the real picker, scorers, views and in-flight accounting.

    arrival ─delay─▶ a slot of the instance, or its queue ──▶ first token ─delay─▶ acknowledged
                                                          └─▶ last token  ─delay─▶ ended; the next one begins

An instance has a fixed number of slots and serves its queue in order; a request holds its slot for its prompt and its
tokens. Every `report_s` each instance reports its queue to its routers. A router knows only these reports and its own
requests, through the product's code.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from router.picking.picker import Pick, pick, ready
from router.pools.in_flight import InFlightCalls
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport

Policy = Literal["round_robin", "uncorrected", "default", "omniscient"]
"""uncorrected: `4*waiting + running` of the last report. omniscient: of this very moment."""

_TRACE = Path(__file__).parents[2] / "data" / "azure_llm_2023_conv_lengths.csv.gz"
_WARM_UP = 0.05
"""Of the requests, the first ones, which find the instances empty and are not counted."""


class Lengths(NamedTuple):
    """One request of the trace."""

    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated."""

    num_instances: int = 8
    num_slots: int = 16
    load: float = 0.9
    """Of the slots, on average."""
    report_s: float = 0.2
    num_routers: int = 1
    num_requests: int = 10_000
    token_s: float = 0.025
    prompt_tokens_per_s: float = 5000.0
    delay_s: float = 0.001

    def service_s(self, lengths: Lengths) -> float:
        """How long a request holds its slot."""
        return lengths.num_prompt_tokens / self.prompt_tokens_per_s + lengths.num_output_tokens * self.token_s


@cache
def trace() -> tuple[Lengths, ...]:
    """The lengths of the Azure conversation trace."""
    with gzip.open(_TRACE, "rt") as file:
        return tuple(Lengths(int(row["context_tokens"]), int(row["generated_tokens"])) for row in csv.DictReader(file))


class _Stub:
    """One instance."""

    def __init__(self) -> None:
        self.queue: deque[int] = deque()
        self.num_running = 0
        self.num_in_transit = 0

    def load(self) -> LoadReport:
        return LoadReport("e", num_waiting=len(self.queue), num_running=self.num_running)


class _Router:
    """What one router knows: the last reports, and its own requests."""

    def __init__(self, infos: list[InstanceInfo], clock: Callable[[], float]) -> None:
        self.infos = infos
        self.keys = [InstanceKey(info.address, info.epoch) for info in infos]
        self.calls: list[Any] = [InFlightCalls(clock=clock) for _ in infos]  # a request's number stands for its call
        self.reports = [LoadReport("e") for _ in infos]
        self.num_sent = 0

    def views(self) -> list[InstanceView]:
        return [
            InstanceView(
                key=key,
                info=info,
                load=report,
                num_unreported=calls.num_unreported,
                num_ended=calls.num_ended,
                num_unreported_tokens=calls.num_unreported_tokens,
                num_unreported_to_prefill=calls.num_unreported_to_prefill,
            )
            for key, info, report, calls in zip(self.keys, self.infos, self.reports, self.calls, strict=True)
        ]


class _Simulation:
    """One run. Events are (time, number, function, arguments)."""

    def __init__(self, setup: Setup, policy: Policy, seed: int) -> None:
        self.setup = setup
        self.policy = policy
        rng = random.Random(seed)
        self.requests = rng.sample(trace(), setup.num_requests)
        self.tie_breaker = random.Random(seed + 1)
        infos = [
            InstanceInfo(f"i{index}", "e", "decode", str(index), Identity(), max_num_seqs=setup.num_slots)
            for index in range(setup.num_instances)
        ]
        self.stubs = [_Stub() for _ in infos]
        self.routers = [_Router(infos, lambda: self.now_s) for _ in range(setup.num_routers)]
        self.waits_s = [0.0] * setup.num_requests
        self.arrivals_s = self._arrivals(rng)
        self.num_ended = 0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.num_events = 0
        self.now_s = 0.0
        for request, arrival_s in enumerate(self.arrivals_s):
            self.at(arrival_s, self.arrive, request)
        if policy in ("uncorrected", "default"):  # the others read no reports
            for instance in range(setup.num_instances):
                self.at(rng.random() * setup.report_s, self.report, instance)

    def _arrivals(self, rng: random.Random) -> list[float]:
        mean_s = sum(map(self.setup.service_s, self.requests)) / len(self.requests)
        per_s = self.setup.load * self.setup.num_instances * self.setup.num_slots / mean_s
        arrival_s, arrivals_s = 0.0, []
        for _ in self.requests:
            arrival_s += rng.expovariate(per_s)
            arrivals_s.append(arrival_s)
        return arrivals_s

    def at(self, time_s: float, function: Callable[..., None], *arguments: Any) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time_s, self.num_events, function, arguments))

    def run(self) -> list[float]:
        """The wait for a slot, in seconds, of every request after the warm-up."""
        while self.num_ended < self.setup.num_requests:
            self.now_s, _, function, arguments = heapq.heappop(self.events)
            function(*arguments)
        return self.waits_s[int(_WARM_UP * self.setup.num_requests) :]

    # At the routers

    def router_of(self, request: int) -> _Router:
        return self.routers[request % len(self.routers)]

    def arrive(self, request: int) -> None:
        router = self.router_of(request)
        instance = self.choose(router)
        router.num_sent += 1
        router.calls[instance].add(request, *[self.requests[request].num_prompt_tokens] * 2)
        router.calls[instance].sent(request)
        self.stubs[instance].num_in_transit += 1
        self.at(self.now_s + self.setup.delay_s, self.deliver, instance, request)

    def choose(self, router: _Router) -> int:
        if self.policy == "round_robin":
            return router.num_sent % self.setup.num_instances
        views = router.views()
        if self.policy == "uncorrected":
            views = [InstanceView(view.key, view.info, view.load) for view in views]
        if self.policy == "omniscient":
            views = [self.truth(view, stub) for view, stub in zip(views, self.stubs, strict=True)]
        found = pick(views, [ready], rng=self.tie_breaker)
        assert isinstance(found, Pick)
        return int(found.instance.key.address)

    def truth(self, view: InstanceView, stub: _Stub) -> InstanceView:
        load = stub.load()
        return InstanceView(view.key, view.info, replace(load, num_waiting=load.num_waiting + stub.num_in_transit))

    def acknowledge(self, instance: int, request: int) -> None:
        self.router_of(request).calls[instance].acknowledge(request)

    def end(self, instance: int, request: int) -> None:
        self.router_of(request).calls[instance].remove(request)
        self.num_ended += 1

    def take_report(self, instance: int, report: LoadReport) -> None:
        for router in self.routers:
            router.reports[instance] = report
            router.calls[instance].report_received()

    # At the instances

    def deliver(self, instance: int, request: int) -> None:
        stub = self.stubs[instance]
        stub.num_in_transit -= 1
        stub.queue.append(request)
        self.begin(instance)

    def begin(self, instance: int) -> None:
        stub, setup = self.stubs[instance], self.setup
        while stub.queue and stub.num_running < setup.num_slots:
            request = stub.queue.popleft()
            stub.num_running += 1
            self.waits_s[request] = self.now_s - self.arrivals_s[request] - setup.delay_s
            lengths = self.requests[request]
            first_s = self.now_s + setup.service_s(Lengths(lengths.num_prompt_tokens, 1))
            self.at(first_s + setup.delay_s, self.acknowledge, instance, request)
            self.at(self.now_s + setup.service_s(lengths), self.finish, instance, request)

    def finish(self, instance: int, request: int) -> None:
        self.stubs[instance].num_running -= 1
        self.begin(instance)
        self.at(self.now_s + self.setup.delay_s, self.end, instance, request)

    def report(self, instance: int) -> None:
        self.at(self.now_s + self.setup.delay_s, self.take_report, instance, self.stubs[instance].load())
        self.at(self.now_s + self.setup.report_s, self.report, instance)


def waits_s(setup: Setup, policy: Policy, seed: int) -> list[float]:
    """Every counted request's wait for a slot, in seconds."""
    return _Simulation(setup, policy, seed).run()


@cache
def p99_s(setup: Setup, policy: Policy, seed: int) -> float:
    """The wait for a slot that one request in a hundred exceeds, in seconds."""
    waits = sorted(waits_s(setup, policy, seed))
    return waits[int(0.99 * len(waits))]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The policies over the same requests and arrivals; p99 waits in seconds."""

    seed: int
    round_robin_s: float
    uncorrected_s: float
    default_s: float
    omniscient_s: float

    @property
    def of_round_robin(self) -> float:
        return self.default_s / self.round_robin_s

    @property
    def of_omniscient(self) -> float:
        return self.default_s / self.omniscient_s


def compare(setup: Setup, seed: int) -> Comparison:
    """All four policies. Round-robin and omniscience do not depend on how many routers there are."""
    alone = replace(setup, num_routers=1)
    return Comparison(
        seed,
        p99_s(alone, "round_robin", seed),
        p99_s(setup, "uncorrected", seed),
        p99_s(setup, "default", seed),
        p99_s(alone, "omniscient", seed),
    )


def table(comparisons: Sequence[Comparison]) -> str:
    """The comparisons for people, in Markdown."""
    lines = [
        "| seed | round-robin | uncorrected | default | omniscient | default / round-robin | default / omniscient |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for one in comparisons:
        waits = (one.round_robin_s, one.uncorrected_s, one.default_s, one.omniscient_s)
        cells = [str(one.seed), *(f"{wait_s:.2f} s" for wait_s in waits)]
        cells += [f"{one.of_round_robin:.2f}", f"{one.of_omniscient:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for num_routers in (1, 2, 3):
        print(f"\n{num_routers} router(s):\n")
        print(table([compare(Setup(num_routers=num_routers), seed) for seed in range(5)]))
