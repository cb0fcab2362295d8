"""A router in front of stub instances, offered their capacity and then three times as much, and the outcome.

Router, instances and clients are processes of their own, and talk over sockets.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.process_logs import LOGS
from tests.router.open_load import TENANT_KEY, Outcome

NUM_INSTANCES = 4
SLOTS = 8
NUM_TOKENS = 8
TOKEN_S = 0.12
TIMER_S = 0.002
"""By how much a sleep overruns, per token."""
SERVICE_S = NUM_TOKENS * (TOKEN_S + TIMER_S)
CAPACITY_PER_S = NUM_INSTANCES * SLOTS / SERVICE_S
QUEUE_LIMIT_S = 5.0
LONG_NUM_TOKENS = 200
MODEST_FROM_S = 5.0


@dataclass(frozen=True)
class Figures:
    """The outcome of one load. `per_s` counts the good ends in its steady part, by tenant."""

    outcomes: list[Outcome]
    seconds: float

    @property
    def refused(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.code == "RESOURCE_EXHAUSTED"]

    @property
    def served(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.code == "OK"]

    def per_s(self, tenant: str | None = None, begin_s: float = 2 * SERVICE_S) -> float:
        """Whole answers a second, from when the pools must be full until the last request came."""
        ended = [one for one in self.served if begin_s < one.ended_s <= self.seconds and tenant in (None, one.tenant)]
        return len(ended) / (self.seconds - begin_s)


@contextmanager
def stack(model_folder: Path, folder: Path) -> Iterator[tuple[str, psutil.Process, Path]]:
    """The router's address, its process, and its log; instances and router end with it."""
    fakes = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.fakes.process"),
            *("--instances", str(NUM_INSTANCES), "--slots", str(SLOTS), "--token-s", str(TOKEN_S)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    log = folder / "router.log"
    router: subprocess.Popen[str] | None = None
    try:
        assert fakes.stdout is not None
        addresses = fakes.stdout.readline().removeprefix("ready ").strip()
        assert addresses
        with log.open("w") as errors:
            router = subprocess.Popen(
                [
                    *(sys.executable, "-m", "router", "--listen", "127.0.0.1:0", "--model", str(model_folder)),
                    *("--decode", addresses, "--disaggregation", "never", "--log-format", "json"),
                    *("--admission-queue-timeout-s", str(QUEUE_LIMIT_S), "--admission-tenant-key", TENANT_KEY),
                    *("--server-max-calls-per-peer", "4096", "--server-drain-accept-s", "0"),
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert router.stdout is not None
        line = router.stdout.readline()
        assert line.startswith("ready address="), log.read_text()
        yield line.removeprefix("ready address=").strip(), psutil.Process(router.pid), log
        router.terminate()
        assert router.wait(20) == 0
    finally:
        if router is not None and router.poll() is None:
            router.kill()
            router.wait()
        if router is not None and router.stdout is not None:
            router.stdout.close()
        LOGS.read(log)
        fakes.communicate("")


async def offer(address: str, router: psutil.Process, seconds: float, *streams: dict[str, Any]) -> tuple[Figures, int]:
    """Offers `streams` (open_load.py); returns the outcomes and the router's largest RSS in bytes."""
    load = {"address": address, "seconds": seconds, "num_tokens": NUM_TOKENS, "streams": streams}
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.router.open_load", json.dumps(load)), stdout=asyncio.subprocess.PIPE
    )
    output = asyncio.create_task(client.communicate())
    rss = 0
    while not output.done():
        rss = max(rss, router.memory_info().rss)
        await asyncio.sleep(0.1)
    outcomes = [Outcome(**fields) for fields in json.loads(output.result()[0])]
    return Figures(outcomes, seconds), rss


def percentile(values: list[float], fraction: float) -> float:
    return sorted(values)[min(int(fraction * len(values)), len(values) - 1)]


def waits_s(log: Path) -> list[float]:
    """From the router's own log: how long each admitted request had waited."""
    fields = [json.loads(line).get("fields", {}) for line in log.read_text().splitlines()]
    return [(line["admitted_ms"] - line["received_ms"]) / 1e3 for line in fields if "admitted_ms" in line]


@dataclass(frozen=True)
class Overload:
    """The outcomes of both loads."""

    peak: Figures
    over: Figures
    waits_s: list[float]
    """Of the admitted requests, by the router's own log."""
    rss: tuple[int, int]
    """The router's largest, in bytes, under each load."""

    @property
    def refusals_s(self) -> list[float]:
        """How long each refusal took."""
        return [one.ended_s - one.came_s for one in self.over.refused]

    @property
    def goodput(self) -> float:
        """Part of the peak that is left under three times the load."""
        return self.over.per_s() / self.peak.per_s()

    @property
    def fair_part(self) -> float:
        """Part of its fair share that the tenant gets which asks for no more than that."""
        return self.over.per_s("calm") / min(CAPACITY_PER_S / 2, self.peak.per_s() / 2)

    def summary(self) -> dict[str, object]:
        """The figures, for a table."""
        over = self.over
        first_s = [one.first_token_s for one in over.served if one.first_token_s is not None]
        return {
            "offered /s": f"{CAPACITY_PER_S:.1f}, then {3 * CAPACITY_PER_S:.1f} for {over.seconds:g} s",
            "goodput /s": f"{self.peak.per_s():.2f}, then {over.per_s():.2f} ({self.goodput:.1%})",
            "refused": f"{len(self.peak.refused)}, then {len(over.refused)} of {len(over.outcomes)}",
            "refusal ms p50 p99 max": [round(1e3 * percentile(self.refusals_s, f), 1) for f in (0.5, 0.99, 1.0)],
            "refused after a wait": sum("no room within" in one.message for one in over.refused),
            "wait s p50 p99 max": [round(percentile(self.waits_s, f), 3) for f in (0.5, 0.99, 1.0)],
            "first token s p50 p99 max": [round(percentile(first_s, f), 3) for f in (0.5, 0.99, 1.0)],
            "well-behaved tenant": f"{over.per_s('calm'):.2f} /s, {self.fair_part:.1%} of its fair share",
            "its refusals": sum(one.tenant == "calm" for one in over.refused),
            "hint ms": sorted(one.pushback_ms or 0 for one in over.refused)[:: max(len(over.refused) - 1, 1)],
            "router RSS MiB": [rss >> 20 for rss in self.rss],
        }


async def run(model_folder: Path, folder: Path, *, peak_s: float, overload_s: float) -> Overload:
    """First exactly what the instances can do, by two tenants alike; then three times that: one tenant asks for its
    fair share, the other for five times its own."""
    half_per_s = CAPACITY_PER_S / 2
    calm, flood = ({"tenant": tenant, "per_s": half_per_s} for tenant in ("calm", "flood"))
    with stack(model_folder, folder) as (address, router, log):
        peak, rss_before = await offer(address, router, peak_s, calm, flood)
        over, rss_after = await offer(address, router, overload_s, calm, {**flood, "per_s": 5 * half_per_s})
    return Overload(peak, over, waits_s(log), (rss_before, rss_after))


@dataclass(frozen=True)
class LongStreams:
    """The outcome of one tenant's long streams in all slots, and another one's requests from `MODEST_FROM_S` on."""

    figures: Figures

    @property
    def fair_part(self) -> float:
        """Part of its fair share that the modest tenant gets, from two seconds after its first request on."""
        return self.figures.per_s("modest", MODEST_FROM_S + 2.0) / (CAPACITY_PER_S / 2)

    @property
    def refusals_s(self) -> list[float]:
        """How long each refusal since then took."""
        return [one.ended_s - one.came_s for one in self.figures.refused if one.came_s >= MODEST_FROM_S]

    @property
    def long(self) -> list[Outcome]:
        """The long streams that were admitted."""
        return [one for one in self.figures.outcomes if one.tenant == "greedy" and one.first_token_s is not None]

    @property
    def num_cut(self) -> int:
        """Of those, the ones that did not get all their tokens."""
        return sum(one.num_tokens != LONG_NUM_TOKENS for one in self.long)

    def summary(self) -> dict[str, object]:
        """The figures, for a table."""
        num_asked = sum(one.came_s >= MODEST_FROM_S for one in self.figures.outcomes)
        return {
            "beside long streams": f"{self.fair_part:.1%} of its fair share from 2 s after its first request on",
            "its refusal ms p50 p99 max": [round(1e3 * percentile(self.refusals_s, f), 1) for f in (0.5, 0.99, 1.0)],
            "refused there": f"{len(self.refusals_s)} of {num_asked}",
            "long streams cut": f"{self.num_cut} of {len(self.long)}",
            "their seconds p50 max": [
                round(percentile([one.ended_s - one.came_s for one in self.long], f), 1) for f in (0.5, 1.0)
            ],
        }


async def run_long_streams(model_folder: Path, folder: Path, *, seconds: float) -> LongStreams:
    """One tenant fills all slots with streams of 24 s and goes on asking; then another one asks for its fair share."""
    greedy = {"tenant": "greedy", "per_s": 10.0, "num_tokens": LONG_NUM_TOKENS}
    modest = {"tenant": "modest", "per_s": CAPACITY_PER_S / 2, "from_s": MODEST_FROM_S}
    with stack(model_folder, folder) as (address, router, _):
        figures, _ = await offer(address, router, seconds, greedy, modest)
    return LongStreams(figures)
