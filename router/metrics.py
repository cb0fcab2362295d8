"""What a router counts, and what it tells Prometheus: requests, decisions, and its pools as it sees them.

    Journey ─ends▶ RouterMetrics ─┐
    pools, admission ─ looked at ─┴─▶ RouterCollector ─▶ Prometheus, when it asks

A request is counted when it comes, at each decision where it runs, and when it ends; a token costs nothing. The pools
are read on the event loop, once per scrape. The names under which Prometheus sees all this stand in docs/metrics.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from router.admission.door import Admission
from router.autoscaler import metrics as autoscaler_metrics
from router.autoscaler.latencies import RecentLatencies
from router.autoscaler.loop import Autoscaler
from router.autoscaler.policy import AutoscalerSettings
from router.failover.ejection import Ejection
from router.failover.safeguards import Safeguards
from router.picking.disaggregation import Disaggregation
from router.pools.instances import InstanceView, Role
from router.pools.member import Member, State
from router.pools.pool import Pool
from serving.events import RequestEvent, Timeline
from serving.metrics import LatencyHistogram

Path = Literal["split", "local"]

STAGES: dict[str, tuple[RequestEvent, RequestEvent]] = {
    "admission": (RequestEvent.RECEIVED, RequestEvent.ADMITTED),
    "reservation": (RequestEvent.PICKED, RequestEvent.KV_RESERVED),
    "prefill": (RequestEvent.PREFILL_STARTED, RequestEvent.FIRST_TOKEN),
    "hand_over": (RequestEvent.FIRST_TOKEN, RequestEvent.KV_LOADED),
    "whole": (RequestEvent.RECEIVED, RequestEvent.FINISHED),
}
"""Parts of a request's life whose length is observed, once per request that came so far."""
_PATIENCE_S = 2.0
"""How long a scrape waits for the event loop; a router whose loop stands still longer has no numbers to tell."""


def _by_path() -> dict[Path, LatencyHistogram]:
    return {path: LatencyHistogram() for path in get_args(Path)}


@dataclass(slots=True)
class RouterMetrics:
    """Totals since the start. Written on the event loop alone."""

    num_received: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """By outcome: finished, aborted, or the status it was answered with, in small letters."""
    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By decision and reason; one per attempt that was planned, or could not be."""
    num_retried: int = 0
    num_resumed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    stages: dict[str, LatencyHistogram] = field(default_factory=lambda: {name: LatencyHistogram() for name in STAGES})
    first_token: dict[Path, LatencyHistogram] = field(default_factory=_by_path)
    output_token: dict[Path, LatencyHistogram] = field(default_factory=_by_path)
    recent: RecentLatencies = field(default_factory=lambda: RecentLatencies(AutoscalerSettings()))
    """Of the requests that end now, for the autoscaler."""

    def decided(self, disaggregation: Disaggregation) -> None:
        """An attempt was planned, or refused."""
        self.decisions[disaggregation.decision.value, disaggregation.reason.value] += 1

    def request_ended(
        self,
        outcome: str,
        timeline: Timeline,
        path: Path | None,
        *,
        num_choices: int,
        num_prompt: int,
        num_output: int,
        is_warm: bool = True,
    ) -> None:
        """A request is over. `path` is that of its first attempt, None if it came to none; `num_*` are tokens, but for
        the choices. `is_warm`: no instance that it touched was still warming up."""
        self.ended[outcome] += 1
        self.num_prompt_tokens += num_prompt
        self.num_output_tokens += num_output
        num_resumed = timeline.count(RequestEvent.RESUMED)
        self.num_resumed += num_resumed
        self.num_retried += max(0, timeline.count(RequestEvent.PICKED) - num_choices - num_resumed)
        for stage, (start, end) in STAGES.items():
            if (took_s := timeline.between(start, end)) is not None:
                self.stages[stage].observe(took_s)
        if path is None or (first_s := timeline.at(RequestEvent.FIRST_TOKEN)) is None:
            return
        self.first_token[path].observe(first_s - timeline.marks[0][1])
        num_gaps = num_output / max(1, num_choices) - 1
        if num_gaps > 0:
            gap_s = (timeline.marks[-1][1] - first_s) / num_gaps
            self.output_token[path].observe(gap_s)
            if is_warm:
                self.recent.ended(gap_s, num_gaps)


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """One address of a pool at the moment of a scrape."""

    role: Role
    name: str
    state: State | Literal["ejected"]
    beat_age_s: float
    view: InstanceView | None


class RouterCollector(Collector):
    """Everything a router tells Prometheus. Made on the event loop on which it looks at the pools."""

    def __init__(
        self,
        metrics: RouterMetrics,
        safeguards: Safeguards,
        admission: Admission,
        *,
        model: str,
        autoscaler: Autoscaler | None = None,
    ) -> None:
        self._metrics = metrics
        self._autoscaler = autoscaler
        self._safeguards = safeguards
        self._admission = admission
        self._model = model
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        """On whatever thread asks. Raises TimeoutError when the event loop does not answer."""
        members, num_quarantined = asyncio.run_coroutine_threadsafe(self._look(), self._loop).result(_PATIENCE_S)
        yield InfoMetricFamily("tandem_router", "What this router serves.", {"model": self._model})
        yield from _requests(self._metrics)
        yield from _latencies(self._metrics)
        yield from _admission(self._admission)
        yield from _safeguards(num_quarantined, self._safeguards.budget.num_under_way)
        yield from _pools(members)
        yield from _instances(members)
        yield from autoscaler_metrics.collected(self._autoscaler)

    async def _look(self) -> tuple[list[MemberSnapshot], int]:
        """The pools' members, and how many contents are refused."""
        snapshots = [snapshot for role in get_args(Role) for snapshot in _snapshots(role, *self._safeguards.side(role))]
        return snapshots, self._safeguards.quarantine.num_refused


def _snapshots(role: Role, pool: Pool, ejection: Ejection) -> Iterator[MemberSnapshot]:
    views = {view.key: view for view in pool.views()}
    for member in pool.members:
        key = member.key
        ejected = member.state == "ready" and key is not None and ejection.ejected_s(key) is not None
        view = views.get(key) if key is not None else None
        yield MemberSnapshot(role, _name(member), "ejected" if ejected else member.state, member.beat_age_s, view)


def _name(member: Member) -> str:
    return (member.info.instance_id if member.info is not None else "") or member.address


def _requests(metrics: RouterMetrics) -> Iterator[Metric]:
    for name, documentation, value in (
        ("requests_received", "Requests that have come.", metrics.num_received),
        ("prompt_tokens", "Prompt tokens of the requests that have ended.", metrics.num_prompt_tokens),
        ("output_tokens", "Tokens sent to clients, of the requests that have ended.", metrics.num_output_tokens),
    ):
        yield CounterMetricFamily(f"tandem_router_{name}", documentation, value=value)
    ended = CounterMetricFamily("tandem_router_requests_ended", "Requests that have ended, by how.", labels=["outcome"])
    for outcome, number in dict(metrics.ended).items():
        ended.add_metric([outcome], number)
    yield ended
    decisions = CounterMetricFamily(
        "tandem_router_disaggregation_decisions", "Attempts, by where they ran and why.", labels=["decision", "reason"]
    )
    for labels, number in dict(metrics.decisions).items():
        decisions.add_metric(list(labels), number)
    yield decisions
    failovers = CounterMetricFamily("tandem_router_failovers", "Attempts that followed a failed one.", labels=["kind"])
    failovers.add_metric(["retried"], metrics.num_retried)
    failovers.add_metric(["resumed"], metrics.num_resumed)
    yield failovers


def _latencies(metrics: RouterMetrics) -> Iterator[Metric]:
    for name, documentation, label, histograms in (
        ("stage", "How long a part of a request's life took.", "stage", metrics.stages),
        ("time_to_first_token", "From the call to the first token on its way.", "path", metrics.first_token),
        ("time_per_output_token", "Mean gap between a request's tokens.", "path", metrics.output_token),
    ):
        family = HistogramMetricFamily(f"tandem_router_{name}_seconds", documentation, labels=[label])
        for value, histogram in histograms.items():
            family.add_metric([value], histogram.buckets(), histogram.sum_s)
        yield family


def _admission(admission: Admission) -> Iterator[Metric]:
    for what, in_flight, queued in (
        ("requests", admission.num_requests, admission.num_queued),
        ("tokens", admission.num_tokens, admission.num_queued_tokens),
    ):
        family = GaugeMetricFamily(f"tandem_router_{what}", f"{what.title()} here now, by state.", labels=["state"])
        family.add_metric(["in_flight"], in_flight)
        family.add_metric(["queued"], queued)
        yield family
    yield GaugeMetricFamily(
        "tandem_router_waiting_tenants", "Tenants of whom something waits.", value=admission.num_waiting_tenants
    )
    refused = CounterMetricFamily("tandem_router_requests_refused", "Requests not let in, by why.", labels=["reason"])
    for reason, number in dict(admission.num_refused).items():
        refused.add_metric([reason], number)
    yield refused
    wait = HistogramMetricFamily("tandem_router_queue_wait_seconds", "How long those who were let in had waited.")
    wait.add_metric([], admission.wait_s.buckets(), admission.wait_s.sum_s)
    yield wait


def _safeguards(num_quarantined: int, num_under_way: int) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "tandem_router_quarantined_requests", "Contents that are refused for a while.", value=num_quarantined
    )
    yield GaugeMetricFamily(
        "tandem_router_failovers_under_way", "Attempts after a failed one, without a token yet.", value=num_under_way
    )


def _pools(members: list[MemberSnapshot]) -> Iterator[Metric]:
    sizes = GaugeMetricFamily("tandem_router_instances", "Addresses of a pool, by state.", labels=["role", "state"])
    states = Counter((member.role, member.state) for member in members)
    for role in get_args(Role):
        for state in (*get_args(State), "ejected"):
            sizes.add_metric([role, state], states[role, state])
    yield sizes


def _instances(members: list[MemberSnapshot]) -> Iterator[Metric]:
    labels = ["role", "instance"]
    age = GaugeMetricFamily("tandem_router_instance_beat_age_seconds", "Since the last report.", labels=labels)
    requests = GaugeMetricFamily(
        "tandem_router_instance_requests", "Requests at an instance, as told and as sent.", labels=[*labels, "state"]
    )
    tokens = GaugeMetricFamily(
        "tandem_router_instance_waiting_tokens", "Tokens that wait at an instance to be prefilled.", labels=labels
    )
    blocks = GaugeMetricFamily("tandem_router_instance_usable_blocks", "KV blocks that can be taken.", labels=labels)
    speeds = GaugeMetricFamily(
        "tandem_router_instance_tokens_per_second", "Speeds as measured by this router.", labels=[*labels, "kind"]
    )
    for member in members:
        whose = [member.role, member.name]
        age.add_metric(whose, member.beat_age_s)
        if (view := member.view) is None:
            continue
        for state, number in (
            ("waiting", view.load.num_waiting),
            ("running", view.load.num_running),
            ("loading", view.load.num_loading),
            ("unreported", view.num_unreported),
        ):
            requests.add_metric([*whose, state], number)
        tokens.add_metric(whose, view.load.num_waiting_tokens + view.num_unreported_tokens)
        blocks.add_metric(whose, view.load.free_blocks + view.load.cached_blocks)
        for kind, per_s in (("prefill", view.pace.prefill_per_s), ("hand_over", view.pace.hand_over_per_s)):
            if per_s is not None:
                speeds.add_metric([*whose, kind], per_s)
    yield from (age, requests, tokens, blocks, speeds)
