"""A live page on synthetic readings: many instances and requests without a router, for what a browser makes of them.

python -m tests.router.api.live.synthetic [PORT [INSTANCES]]     1 000 requests a minute, until Ctrl-C
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import FastAPI

from router.api.admin import PoolsService
from router.api.live.endpoints import LiveFeed, LivePage
from router.api.live.state import PoolReading, Reading
from router.api.openai.exchange import HttpLimits
from router.api.openai.server import HttpServer, HttpSettings
from router.autoscaler.decide import ScaleDecision
from router.autoscaler.loop import PoolStatus
from router.autoscaler.observation import InstanceSample
from router.autoscaler.settings import DecodePolicy, PrefillPolicy
from router.pools.instance_info import Role
from router.pools.throughput import ThroughputEstimate
from router.request.request_log import MAX_ENDED, NO_GAPS, RequestSummary, TokenGaps
from serving.limits import AbuseLimits, OpenCalls
from serving.logging import RequestEvent
from tests.router.autoscaler.builders import instance

STAGES = (
    RequestEvent.RECEIVED,
    RequestEvent.ADMITTED,
    RequestEvent.PICKED,
    RequestEvent.KV_RESERVED,
    RequestEvent.PREFILL_STARTED,
    RequestEvent.FIRST_TOKEN,
    RequestEvent.HAND_OVER_STARTED,
    RequestEvent.KV_LOADED,
    RequestEvent.DECODE_STARTED,
    RequestEvent.FINISHED,
)
"""What happens to a request, in this order."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A request whose whole life is known."""

    number: int
    marks: tuple[tuple[RequestEvent, float], ...]
    num_prompt: int
    num_tokens: int
    num_cached: int
    prefill: str
    decode: str
    epoch: str

    def at(self, now_s: float) -> RequestSummary:
        marks = tuple(mark for mark in self.marks if mark[1] <= now_s)
        is_over, first_s, end_s = len(marks) == len(self.marks), self.marks[5][1], self.marks[-1][1]
        part = min(max((now_s - first_s) / (end_s - first_s), 0.0), 1.0)
        num_tokens = int(part * (self.num_tokens - 1)) + (now_s >= first_s)
        return RequestSummary(
            number=self.number,
            request_id=f"{self.epoch or 'chatcmpl'}-{self.number:05d}",
            marks=marks,
            num_choices=1,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached if is_over else None,
            num_tokens=num_tokens,
            gaps=TokenGaps(part * (end_s - first_s), num_tokens - 1) if num_tokens > 1 else NO_GAPS,
            prefill=(self.prefill,),
            decode=(self.decode,),
            prefilled_by=self.prefill,
            reason=f"{self.num_prompt - self.num_cached} tokens to prefill, more than 64 stay local",
            outcome="finished" if is_over else "",
        )


@dataclass
class Synthetic:
    """Readings of pools that serve `per_minute` requests a minute; a spike doubles the times to the first token."""

    num_instances: int = 50
    per_minute: int = 1000
    seed: int = 0
    spikes: bool = True
    epoch: str = ""
    """Of its numbering; the ids of its requests begin with it."""
    num_read: int = 0
    _planned: list[_Planned] = field(default_factory=list)
    _ended: deque[RequestSummary] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._next_s = time.monotonic() - 300.0
        self._num_planned = 0
        status, now_s = PoolStatus(DecodePolicy(min_size=4, max_size=48)), time.monotonic()
        for age_s, size, new_size, hold, reason in (
            (190.0, 28, 30, None, "load 0.91 of 0.80 wants 32; at most 2 more a step"),
            (140.0, 30, 30, "cool_down", "load 0.86 of 0.80 wants 31; the last change was 50 s ago, 60 s must pass"),
            (12.0, 30, 30, "steady", "load 0.62 of 0.80, KV 0.41 of 0.85, ITL 31 ms of 50 ms"),
        ):
            status.decided(ScaleDecision("decode", now_s - age_s, size, new_size, new_size, hold, reason), leads=True)  # type: ignore[arg-type]
        self._statuses = {"prefill": PoolStatus(PrefillPolicy(min_size=2, max_size=24)), "decode": status}
        steady = ScaleDecision("prefill", now_s - 12, 20, 20, 20, "steady", "load 0.55 of 0.80, TTFT 310 ms of 500 ms")
        self._statuses["prefill"].decided(steady, leads=True)

    async def read(self) -> Reading:
        self.num_read += 1
        now_s = time.monotonic()
        while self._next_s < now_s:
            self._planned.append(self._new(self._next_s))
            self._next_s += self._rng.expovariate(self.per_minute / 60)
        over = [one for one in self._planned if one.marks[-1][1] <= now_s]
        self._ended.extend(one.at(now_s) for one in sorted(over, key=lambda one: one.marks[-1][1]))
        self._planned = [one for one in self._planned if one.marks[-1][1] > now_s]
        num_prefill = self.num_instances * 2 // 5
        return Reading(
            at_s=time.time(),
            now_s=now_s,
            router=self._router(),
            pools={
                "prefill": PoolReading(num_prefill, num_prefill, self._statuses["prefill"]),
                "decode": PoolReading(
                    self.num_instances - num_prefill - 1, self.num_instances - num_prefill, self._statuses["decode"]
                ),
            },
            instances=[*self._instances(num_prefill, now_s)],
            running=[one.at(now_s) for one in self._planned],
            ended=self._ended,
        )

    def _router(self) -> dict[str, Any]:
        return {
            "model": "synthetic", "version": "0.1.0", "chat": True, "serving": True, "resizable": True,
            "in_flight": len(self._planned), "queued": 0, "received": self._num_planned,
            "ended": {"finished": self._num_planned - len(self._planned)}, "rejected": {}, "epoch": self.epoch,
        }  # fmt: skip

    def _new(self, at_s: float) -> _Planned:
        rng, num_prefill = self._rng, self.num_instances * 2 // 5
        self._num_planned += 1
        slow = 3.0 if self.spikes and at_s % 100 < 18 else 1.0
        lengths = [
            0.002,
            0.001,
            0.012,
            0.03 * slow * slow,
            rng.lognormvariate(-1.9, 0.5) * slow,
            0.0,
            0.03,
            0.012,
            rng.uniform(1, 6),
        ]
        marks, now_s = [], at_s
        for event, length_s in zip(STAGES, [*lengths, 0.0], strict=True):
            marks.append((event, now_s))
            now_s += length_s * rng.uniform(0.6, 1.4)
        prompt = int(rng.lognormvariate(6, 0.8))
        cached = int(prompt * rng.choice((0, 0, 0.4, 0.9)))
        tokens = max(2, int((marks[-1][1] - marks[5][1]) / rng.uniform(0.02, 0.045)))
        prefill, decode = rng.randrange(num_prefill), rng.randrange(self.num_instances - num_prefill)
        return _Planned(
            self._num_planned,
            tuple(marks),
            prompt,
            tokens,
            cached,
            f"prefill-{prefill}",
            f"decode-{decode}",
            self.epoch,
        )

    def _instances(self, num_prefill: int, now_s: float) -> Iterator[tuple[Role, InstanceSample]]:
        rng = random.Random(int(now_s))
        for index in range(self.num_instances):
            role: Role
            role, place = ("prefill", index) if index < num_prefill else ("decode", index - num_prefill)
            used, cached = rng.randint(100, 700), rng.randint(50, 250)
            sample = instance(
                f"{role}-{place}",
                used_blocks=used + cached,
                cached_blocks=cached,
                num_running=rng.randint(1, 8),
                num_waiting=rng.choice((0, 0, 0, 1, 2)),
                step_s=rng.uniform(0.012, 0.03),
                held_blocks=rng.randint(0, 40) if role == "prefill" else 0,
                num_generated_tokens=int(now_s * 230) if role == "decode" else 0,
                num_prefilled_tokens=int(now_s * 4000) if role == "prefill" else 0,
            )
            view = sample.view
            assert view is not None
            identity = dataclasses.replace(view.info.identity, block_size=16)
            info = dataclasses.replace(view.info, identity=identity, bytes_per_block=1_835_008, kv_connector="nixl")
            speed = ThroughputEstimate(prefill_per_s=9000.0 + 31 * place, hand_over_per_s=18_000.0 + 97 * place)
            view = dataclasses.replace(view, info=info, throughput=speed)
            sample = sample._replace(view=view, address=f"10.0.{index // 20}.{index % 20 + 10}:50051")
            if role == "decode" and place == 3:
                sample = sample._replace(state="draining", out="draining")
            yield role, sample


@asynccontextmanager
async def serving(source: Synthetic, port: int = 0) -> AsyncIterator[tuple[str, LiveFeed]]:
    """The page's address and its feed."""
    calls = OpenCalls(max_per_peer=64, max_in_all=64)
    limits = HttpLimits(calls, AbuseLimits(per_s=1.0), 1 << 20, 10.0, 60.0)
    feed = LiveFeed(source.read)
    page = LivePage(feed, cast(PoolsService, None), limits, lambda metadata: None)
    app = FastAPI()
    page.add_to(app)
    app.get("/")(page.index)
    server = HttpServer(app, HttpSettings(listen=f"127.0.0.1:{port}"), write_timeout_s=10.0)
    await server.start()
    try:
        yield f"http://{server.address}", feed
    finally:
        feed.close()
        await server.stop()


async def _serve(port: int, num_instances: int) -> None:
    async with serving(Synthetic(num_instances), port) as (url, _):
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(*map(int, (sys.argv[1:] + ["0", "50"][len(sys.argv) - 1 :]))))
