"""The state that the live page shows, as JSON: docs/live_page.md describes its members. Pure: no clock, no I/O.

    Reading ─▶ LiveState.next ─▶ state: router, pools, instances, requests, ended, points, decisions
                   └── remembers of the last reading what rates and gaps need

A point describes one second. Those of the time before the first reading are made from the requests that have ended
since, as if each had emitted its tokens evenly; later ones from what the running requests have emitted meanwhile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from router.autoscaler.decide import ScaleDecision
from router.autoscaler.loop import PoolStatus
from router.autoscaler.observation import InstanceSample
from router.autoscaler.resizer import Change
from router.autoscaler.router_signals import weighted_quantile
from router.pools.instance_info import InstanceKey, InstanceView, Role
from router.request.request_log import NO_GAPS, RequestSummary, TokenGaps
from serving.logging import RequestEvent

Json = dict[str, Any]
"""A JSON object without nulls."""
HISTORY_S = 300
MAX_RUNNING = 100
"""Running requests that are listed: the oldest."""
MAX_ENDED = 100
"""Ended requests that are listed: the last."""
MAX_DECISIONS = 32
_HIT_RATE_S = 60.0
_STALL_S = 1.5
"""A running request that has emitted nothing for longer has a gap, which is not over."""
_SILENT_S = 1.0
_MAX_STEP_S = 1.0
"""By which the wall clock may move against the monotonic one: names of points are seconds."""

STAGES: Mapping[RequestEvent, str] = {
    RequestEvent.RECEIVED: "queue",
    RequestEvent.ADMITTED: "pick",
    RequestEvent.PICKED: "reserve",
    RequestEvent.KV_RESERVED: "wait",
    RequestEvent.PREFILL_STARTED: "prefill",
    RequestEvent.HAND_OVER_STARTED: "hand_over",
    RequestEvent.KV_LOADED: "schedule",
    RequestEvent.DECODE_STARTED: "decode",
    RequestEvent.PAUSED: "queue",
    RequestEvent.INTERRUPTED: "pick",
}
"""The stage that begins with an event of a request in two pools; it ends with the next one's. `wait` ends when
the prefill instance has queued the request, `schedule` with the decode instance's first step."""


class PoolReading(NamedTuple):
    """One pool."""

    num_ready: int
    size: int | None
    """Desired; None: unknown, or it cannot be resized."""
    autoscaler: PoolStatus | None


@dataclass(frozen=True, slots=True)
class Reading:
    """What the router knows at one moment."""

    at_s: float
    """`time.time()`."""
    now_s: float
    """`time.monotonic()`, the clock of everything below."""
    router: Json
    """Its totals and what it serves, as they are shown."""
    pools: Mapping[Role, PoolReading]
    instances: Sequence[tuple[Role, InstanceSample]]
    running: Sequence[RequestSummary]
    """The oldest first."""
    ended: Sequence[RequestSummary]
    """In the order of their ends."""
    changes: Iterable[Change] = ()


@dataclass(slots=True)
class _Second:
    """What one point is made of; times in seconds."""

    ttfts: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Each request's mean gap, weighted by their number."""
    num_tokens: float = 0.0
    num_running: int = 0
    num_queued: int = 0
    num_ended: int = 0
    num_failed: int = 0

    def point(self, length_s: float = 1.0) -> Json:
        point: Json = {
            "tokens_per_s": round(self.num_tokens / length_s, 1),
            "running": self.num_running,
            "queued": self.num_queued,
            "ended": self.num_ended,
            "failed": self.num_failed,
        }
        for name, samples in (("ttft", self.ttfts), ("itl", self.gaps)):
            if samples:
                point[f"{name}_p50_ms"] = _ms(weighted_quantile(samples, 0.5))
                point[f"{name}_p95_ms"] = _ms(weighted_quantile(samples, 0.95))
        return point


class _Progress(NamedTuple):
    """What a request had emitted at a reading."""

    num_tokens: int
    gaps: TokenGaps
    since_s: float
    """When it had not emitted more before."""


class LiveState:
    """Makes states of readings, each later than the one before."""

    def __init__(self) -> None:
        self._begin(0.0)

    def _begin(self, wall_s: float) -> None:
        """As if no reading had been made."""
        self._last_s: float | None = None
        self._wall_s = wall_s  # `time.time()` of monotonic 0: the same for all states, or equal times would differ
        self._progress: dict[int, _Progress] = {}  # by request
        self._counted: dict[InstanceKey, tuple[int, int]] = {}  # tokens prefilled, generated
        self._points: Json = {}
        self._ended: Json = {}

    def next(self, reading: Reading) -> Json:
        """The state at `reading`. It shares parts with earlier ones: do not change it. After a step of the wall clock,
        or a suspend, in which the monotonic one stands still, it is a first one."""
        wall_s = reading.at_s - reading.now_s
        if self._last_s is None or abs(wall_s - self._wall_s) > _MAX_STEP_S:
            self._begin(wall_s)
            self._add_history(reading)
            ended = _since(reading.ended, -math.inf)
        else:
            ended = _since(reading.ended, self._last_s)
            self._add_point(reading, ended, self._last_s)
        self._add_ended(ended)
        state = {
            "at": round(reading.at_s, 3),
            "router": reading.router,
            "pools": {role: _pool(pool) for role, pool in reading.pools.items()},
            "instances": self._instances(reading),
            "requests": {str(one.number): self._request(one) for one in reading.running[:MAX_RUNNING]},
            "ended": dict(self._ended),
            "points": dict(self._points),
            "decisions": self._decisions(reading),
        }
        self._last_s = reading.now_s
        return state

    # Points

    def _add_history(self, reading: Reading) -> None:
        seconds: defaultdict[int, _Second] = defaultdict(_Second)
        for request in [*_since(reading.ended, reading.now_s - HISTORY_S), *reading.running]:
            _spread(request, request.last_s if request.outcome else reading.now_s, seconds)
        now = int(reading.now_s)
        for second in range(now - HISTORY_S + 1, now):
            if second in seconds:
                self._points[self._name(second)] = seconds[second].point()
        for request in reading.running:
            self._progress[request.number] = _Progress(request.num_tokens, request.gaps, reading.now_s)

    def _add_point(self, reading: Reading, ended: Sequence[RequestSummary], last_s: float) -> None:
        num_queued = reading.router.get("queued", 0)
        second = _Second(num_running=max(len(reading.running) - num_queued, 0), num_queued=num_queued)
        second.num_ended, second.num_failed = len(ended), sum(_has_failed(request) for request in ended)
        before, self._progress = self._progress, {}
        for request in (*reading.running, *ended):
            first_s = request.first_token_s
            if first_s is None:
                continue
            if last_s < first_s <= reading.now_s:
                second.ttfts.append((first_s - request.received_s, 1.0))
            now_s = request.last_s if request.outcome else reading.now_s
            progress = before.get(request.number, _Progress(0, NO_GAPS, first_s))
            after = _advance(request, progress, now_s, second)
            if not request.outcome:
                self._progress[request.number] = after
        self._points[self._name(int(reading.now_s))] = second.point(reading.now_s - last_s)
        while len(self._points) > HISTORY_S or int(next(iter(self._points))) < self._wall_s + reading.now_s - HISTORY_S:
            del self._points[next(iter(self._points))]

    def _name(self, second: int) -> str:
        return str(int(second + self._wall_s))

    # Requests

    def _add_ended(self, ended: Sequence[RequestSummary]) -> None:
        for request in ended[-MAX_ENDED:]:
            self._ended[str(request.number)] = self._request(request)
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _request(self, request: RequestSummary) -> Json:
        shown: Json = {
            "id": request.request_id,
            "at": round(self._wall_s + request.received_s, 3),
            "prompt_tokens": request.num_prompt_tokens,
            "tokens": request.num_tokens,
            "prefill": list(request.prefill),
            "decode": list(request.decode),
            "reason": request.reason,
        }
        if not request.outcome:
            *_, (stage, _) = _begun_stages(request)
            return {**shown, "stage": stage}
        stages = [[name, _ms(seconds)] for name, seconds in stages_of(request)]
        shown |= {"outcome": request.outcome, "error": request.error, "stages": stages}
        shown["total_ms"] = _ms(request.last_s - request.received_s)
        if request.num_cached_tokens is not None:
            shown["cached_tokens"] = request.num_cached_tokens
        if (first_s := request.first_token_s) is not None:
            shown["ttft_ms"] = _ms(first_s - request.received_s)
        if (gap_s := request.gaps.mean_s) is not None:
            shown["itl_ms"] = _ms(gap_s)
        return shown

    # Instances and pools

    def _instances(self, reading: Reading) -> Json:
        hit_rates = _hit_rates(_since(reading.ended, reading.now_s - _HIT_RATE_S))
        before, self._counted = self._counted, {}
        shown: Json = {}
        for role, sample in sorted(reading.instances, key=lambda one: (one[0], _natural(one[1].name))):
            if sample.address in shown and sample.state == "foreign":
                continue  # one that is given for both pools is shown in its own
            instance: Json = {"name": sample.name, "role": role, "state": sample.state}
            if sample.is_ejected:
                instance["state"] = "ejected"
            if sample.out is not None:
                instance["out"] = sample.out
            if _SILENT_S < sample.report_age_s < math.inf:
                instance["silent_s"] = round(sample.report_age_s, 1)
            if sample.name in hit_rates:
                instance["hit_rate"] = round(hit_rates[sample.name], 3)
            if (view := sample.view) is not None:
                instance |= _load(view)
                counted = (view.load.num_prefilled_tokens, view.load.num_generated_tokens)
                self._counted[view.key] = counted
                if self._last_s is not None and view.key in before:
                    span_s, was = reading.now_s - self._last_s, before[view.key]
                    instance["prefill_tokens_per_s"] = round(max(counted[0] - was[0], 0) / span_s, 1)
                    instance["tokens_per_s"] = round(max(counted[1] - was[1], 0) / span_s, 1)
            shown[sample.address] = instance
        return shown

    def _decisions(self, reading: Reading) -> Json:
        made = [_change(change) for change in reading.changes if change.cause == "operator"]
        for role, pool in reading.pools.items():
            if pool.autoscaler is not None:
                made += [_decision(role, decision) for decision in pool.autoscaler.recent]
        made.sort(key=lambda one: one[0])
        return {
            f"{at_s:.3f} {decision['pool']}": {"at": round(self._wall_s + at_s, 3), **decision}
            for at_s, decision in made[-MAX_DECISIONS:]
        }


def stages_of(request: RequestSummary) -> list[tuple[str, float]]:
    """The stages of a request in order, with their lengths in seconds. They add up to the whole; those of length 0,
    and of a second attempt too, are listed."""
    begun = list(_begun_stages(request))
    ends = [*(at_s for _, at_s in begun[1:]), request.last_s]
    lengths = [(name, end_s - at_s) for (name, at_s), end_s in zip(begun, ends, strict=True)]
    return [(name, sum(length for _, length in same)) for name, same in groupby(lengths, key=lambda one: one[0])]


def _begun_stages(request: RequestSummary) -> Iterator[tuple[str, float]]:
    """Each stage with the time of its begin. An attempt of one instance alone has nothing reserved and nothing handed
    over: it is prefilled once it is picked, and decoded from its first token on."""
    marks = [mark for mark in request.marks if mark[0] in STAGES]
    following = [*(event for event, _ in marks[1:]), RequestEvent.KV_RESERVED if request.prefill else None]
    for (event, at_s), following_event in zip(marks, following, strict=True):
        name = STAGES[event]
        if event is RequestEvent.PICKED and following_event is not RequestEvent.KV_RESERVED:
            name = "prefill"
        yield name, at_s


def _since(ended: Sequence[RequestSummary], since_s: float) -> list[RequestSummary]:
    """Those that ended later, in order; costs nothing for the others."""
    return [*takewhile(lambda request: request.last_s > since_s, reversed(ended))][::-1]


def _has_failed(request: RequestSummary) -> bool:
    return request.outcome not in ("finished", "aborted")


def _advance(request: RequestSummary, progress: _Progress, now_s: float, second: _Second) -> _Progress:
    """Adds what `request` has emitted until `now_s` to `second`; returns its new progress."""
    num_new, new_gaps = request.num_tokens - progress.num_tokens, request.gaps.since(progress.gaps)
    second.num_tokens += num_new
    if (gap_s := new_gaps.mean_s) is not None:
        second.gaps.append((gap_s, new_gaps.number))
    elif num_new == 0 and not request.outcome:
        if now_s - progress.since_s > _STALL_S:
            second.gaps.append((now_s - progress.since_s, 1.0))
        return progress
    return _Progress(request.num_tokens, request.gaps, now_s)


def _spread(request: RequestSummary, end_s: float, seconds: defaultdict[int, _Second]) -> None:
    """Adds a request that has run until `end_s` to the seconds of its life, its tokens evenly after the first."""
    admitted_s = next((at_s for event, at_s in request.marks if event is RequestEvent.ADMITTED), end_s)
    for second in range(int(request.received_s), int(end_s)):
        is_queued = second + 1 < admitted_s
        seconds[second].num_queued += is_queued
        seconds[second].num_running += not is_queued
    if request.outcome:
        seconds[int(end_s)].num_ended += 1
        seconds[int(end_s)].num_failed += _has_failed(request)
    if (first_s := request.first_token_s) is None:
        return
    seconds[int(first_s)].ttfts.append((first_s - request.received_s, 1.0))
    seconds[int(first_s)].num_tokens += request.num_choices
    num_rest, length_s = request.num_tokens - request.num_choices, end_s - first_s
    if num_rest <= 0 or length_s <= 0:
        return
    gap_s, num_gaps = request.gaps.mean_s, request.gaps.number
    for second in range(int(first_s), int(end_s) + 1):
        share = (min(second + 1, end_s) - max(second, first_s)) / length_s
        seconds[second].num_tokens += share * num_rest
        if gap_s is not None:
            seconds[second].gaps.append((gap_s, share * num_gaps))


def _hit_rates(ended: Iterable[RequestSummary]) -> dict[str, float]:
    """By the instance that prefilled: cached prompt tokens over all."""
    cached: defaultdict[str, int] = defaultdict(int)
    prompts: defaultdict[str, int] = defaultdict(int)
    for request in ended:
        if request.num_cached_tokens is not None and request.num_prompt_tokens:
            cached[request.prefilled_by] += request.num_cached_tokens
            prompts[request.prefilled_by] += request.num_prompt_tokens
    return {name: cached[name] / num_tokens for name, num_tokens in prompts.items()}


def _load(view: InstanceView) -> Json:
    load, info, speed = view.load, view.info, view.throughput
    shown: Json = {
        "waiting": load.num_waiting + view.num_unreported,
        "running": load.num_running,
        "loading": load.num_loading,
        "waiting_tokens": load.num_waiting_tokens,
        "step_ms": _ms(load.step_s),
        "slots": info.max_num_seqs,
        "connector": info.kv_connector,
        "dtype": info.identity.dtype,
        "kv": {
            "blocks": info.num_blocks,
            "free": load.free_blocks,
            "cached": load.cached_blocks,
            "held": load.held_blocks,
            "pinned": load.quarantined_blocks,
        },
    }
    if speed.prefill_per_s is not None:
        shown["prefill_speed"] = round(speed.prefill_per_s)
    if speed.hand_over_per_s is not None:
        shown["hand_over_speed"] = round(speed.hand_over_per_s)
        if info.identity.block_size and info.bytes_per_block:
            token_bytes = info.bytes_per_block / info.identity.block_size
            shown["hand_over_bytes_per_s"] = round(speed.hand_over_per_s * token_bytes)
    return shown


def _pool(pool: PoolReading) -> Json:
    shown: Json = {"ready": pool.num_ready}
    if pool.size is not None:
        shown["size"] = pool.size
    if (status := pool.autoscaler) is not None:
        shown |= {"min": status.policy.min_size, "max": status.policy.max_size, "leads": status.leads}
        if status.decision is not None:
            shown |= {"desired": status.decision.desired, "hold": status.decision.hold or ""}
        if status.failure is not None:
            shown["hold"] = "no_answer"
        shown["reason"] = status.reason
    return shown


def _decision(role: Role, decision: ScaleDecision) -> tuple[float, Json]:
    shown = {"pool": role, "from": decision.size, "to": decision.new_size, "cause": "autoscaler"}
    return decision.at_s, {**shown, "hold": decision.hold or "", "reason": decision.reason}


def _change(change: Change) -> tuple[float, Json]:
    shown = {"pool": change.role, "from": change.previous_size, "to": change.size, "cause": change.cause}
    return change.at_s, {**shown, "hold": "", "reason": change.reason}


def _natural(name: str) -> tuple[str, int]:
    """decode-10 after decode-9."""
    head, _, tail = name.rpartition("-")
    return (head, int(tail)) if tail.isdecimal() else (name, -1)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
