"""The router's metrics: what requests count, and what Prometheus reads of the router and its pools.

    RequestTrace ─ends▶ RouterMetrics ─┐
    pools, admission ─────── read ─────┴─▶ RouterCollector ─▶ Prometheus, once per scrape

A request is counted when it arrives, at each disaggregation decision, at its first token, and when it ends; further
tokens cost nothing. The pools are read on the event loop. docs/metrics.md lists all metric names.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import grpc
from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from router.admission.controller import REASONS, AdmissionController
from router.autoscaler.loop import Autoscaler, metrics_of
from router.autoscaler.observation import InstanceSample, samples_of
from router.autoscaler.router_signals import RecentLatencies
from router.autoscaler.settings import AutoscalerSettings
from router.picking.disaggregation import Disaggregation
from router.picking.picker import SHOWN_DIGITS
from router.pools.instance import State
from router.pools.instance_info import Role
from router.request.request_log import RequestLog, RequestSummary
from router.resilience.safeguards import Safeguards
from serving.histogram import Histogram
from serving.logging import RequestEvent, Timeline
from serving.metrics import Samples, counter, gauge, histogram

Path = Literal["split", "local"]

STAGES: dict[str, tuple[RequestEvent, ...]] = {
    "admission": (RequestEvent.RECEIVED, RequestEvent.ADMITTED),
    "reservation": (RequestEvent.PICKED, RequestEvent.KV_RESERVED),
    "prefill": (RequestEvent.PREFILL_STARTED, RequestEvent.FIRST_TOKEN, RequestEvent.PICKED),
    "whole": (RequestEvent.RECEIVED, RequestEvent.FINISHED),
}
"""Stages whose length is observed once per request that reached them, as arguments of `Timeline.between`: of the
attempt that did first, `prefill` of the one that brought the first token; `hand_over` is observed in each attempt."""
_OUTCOMES = (
    RequestEvent.FINISHED.value,
    RequestEvent.ABORTED.value,
    *(code.name.lower() for code in grpc.StatusCode if code is not grpc.StatusCode.OK),
)
_LOOP_TIMEOUT_S = 2.0  # how long a scrape waits for the event loop; it fails if the loop is blocked for longer


def _by_path() -> dict[Path, Histogram]:
    return {path: Histogram() for path in get_args(Path)}


@dataclass(slots=True)
class RouterMetrics:
    """Totals since the start. Written on the event loop alone."""

    num_received: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """By outcome: finished, aborted, or the status of the answer in lower case."""
    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By decision and reason; one per attempt, planned or not."""
    attempts: Counter[str] = field(default_factory=Counter)
    """By the beginning of the weights' digest of the instances."""
    num_retried: int = 0
    """Attempts that followed a failed one of the same choice before its first token."""
    num_resumed: int = 0
    """Those that followed one after it."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    stages: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram() for name in (*STAGES, "hand_over")})
    first_token: dict[Path, Histogram] = field(default_factory=_by_path)
    """Observed when the first token is sent, so that requests that run on count too."""
    without_first_token: Histogram = field(default_factory=Histogram)
    """How long those lasted that ended without one, unless nothing was left to generate."""
    output_token: dict[Path, Histogram] = field(default_factory=_by_path)
    recent: RecentLatencies = field(default_factory=lambda: RecentLatencies(AutoscalerSettings()))
    log: RequestLog | None = None
    """The requests themselves, for the live page; None: not kept."""

    def picked(self, weights_digest: str) -> None:
        self.attempts[weights_digest[:SHOWN_DIGITS]] += 1

    def decided(self, disaggregation: Disaggregation) -> None:
        self.decisions[disaggregation.decision.value, disaggregation.reason.value] += 1

    def request_ended(
        self, summary: RequestSummary, timeline: Timeline, path: Path | None, *, is_warm: bool = True
    ) -> None:
        """`path`: of the first attempt. `is_warm`: no instance was warming up."""
        self.ended[summary.outcome] += 1
        self.num_prompt_tokens += summary.num_prompt_tokens
        self.num_output_tokens += summary.num_tokens
        for stage, events in STAGES.items():
            if (took_s := timeline.between(*events)) is not None:
                self.stages[stage].observe(took_s)
        if path is None or summary.first_token_s is None:
            if summary.outcome != RequestEvent.FINISHED.value:
                self.without_first_token.observe(summary.last_s - summary.received_s)
            return
        if (gap_s := summary.gaps.mean_s) is not None:
            self.output_token[path].observe(gap_s)
            if is_warm:
                self.recent.ended(gap_s, summary.gaps.number)


@dataclass(eq=False)
class RouterCollector(Collector):
    """Everything that Prometheus reads of a router. Made on the event loop on which it reads the pools."""

    metrics: RouterMetrics
    safeguards: Safeguards
    admission: AdmissionController
    model: str
    autoscaler: Autoscaler | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        """Runs on any thread. Raises TimeoutError if the event loop does not answer."""
        reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        try:
            instances, num_rejected = reading.result(_LOOP_TIMEOUT_S)
        except TimeoutError:
            raise TimeoutError(f"the event loop has not answered for {_LOOP_TIMEOUT_S:g} s") from None
        yield InfoMetricFamily("tandem_router", "What this router serves.", {"model": self.model})
        yield from _requests(self.metrics)
        yield from _latencies(self.metrics)
        yield from _admission(self.admission)
        yield gauge(
            "tandem_router_quarantined_requests", "Contents rejected because they made instances fail.", num_rejected
        )
        num_under_way = self.safeguards.budget.num_under_way
        yield gauge(
            "tandem_router_failovers_under_way", "Attempts after a failed one, without a token yet.", num_under_way
        )
        yield from _instances(instances)
        yield from metrics_of(self.autoscaler)

    async def _read(self) -> tuple[list[tuple[Role, InstanceSample]], int]:
        samples = [(role, one) for role in get_args(Role) for one in self._samples(role)]
        return samples, self.safeguards.poison.num_rejected

    def _samples(self, role: Role) -> Iterator[InstanceSample]:
        """Each under a name of its own: those that share one under their addresses."""
        samples = [*samples_of(role, self.safeguards)]
        numbers = Counter(one.name for one in samples)
        for one in samples:
            yield one if numbers[one.name] == 1 else one._replace(name=one.address)


def _requests(metrics: RouterMetrics) -> Iterator[Metric]:
    for name, documentation, value in (
        ("requests_received", "Requests received.", metrics.num_received),
        ("prompt_tokens", "Prompt tokens of the requests that have ended.", metrics.num_prompt_tokens),
        ("output_tokens", "Tokens sent to clients, of the requests that have ended.", metrics.num_output_tokens),
    ):
        yield counter(f"tandem_router_{name}", documentation, value)
    what = "Requests that have ended, by outcome."
    yield counter("tandem_router_requests_ended", what, _from_zero(_OUTCOMES, metrics.ended), "outcome")
    decisions = dict(metrics.decisions).items()
    what = "Attempts, by where they ran and why."
    yield counter("tandem_router_disaggregation_decisions", what, decisions, "decision", "reason")
    what = "Attempts, by the beginning of the digest of the weights that computed them."
    yield counter("tandem_router_attempts", what, dict(metrics.attempts), "weights")
    failovers = {"retried": metrics.num_retried, "resumed": metrics.num_resumed}
    yield counter("tandem_router_failovers", "Attempts that followed a failed one.", failovers, "kind")


def _from_zero(known: Sequence[str], counted: Mapping[str, int]) -> dict[str, int]:
    """Prometheus' rate does not see the first events of a series that begins with them, so it begins without any."""
    return dict.fromkeys(known, 0) | dict(counted)


def _latencies(metrics: RouterMetrics) -> Iterator[Metric]:
    for name, documentation, label, histograms in (
        ("stage", "Length of a stage of a request.", "stage", metrics.stages),
        ("time_to_first_token", "From the call to sending the first token.", "path", metrics.first_token),
        ("time_per_output_token", "Mean gap between the tokens of a request's choices.", "path", metrics.output_token),
    ):
        yield histogram(f"tandem_router_{name}_seconds", documentation, histograms, label)
    what = "From the call to the end of a request that ended without a first token."
    yield _unlabelled("tandem_router_time_without_first_token_seconds", what, metrics.without_first_token)


def _unlabelled(name: str, documentation: str, counted: Histogram) -> Metric:
    family = HistogramMetricFamily(name, documentation)
    family.add_metric([], counted.buckets(), counted.sum)
    return family


def _admission(admission: AdmissionController) -> Iterator[Metric]:
    for name, in_flight, queued in (
        ("requests", admission.in_use.num_requests, admission.num_queued),
        ("tokens", admission.in_use.num_tokens, admission.queue.queued_cost),
    ):
        samples = {"in_flight": in_flight, "queued": queued}
        yield gauge(f"tandem_router_{name}", f"Current {name}, by state.", samples, "state")
    yield gauge("tandem_router_waiting_tenants", "Tenants with queued requests.", admission.queue.num_backlogged)
    rejected = _from_zero(REASONS, admission.num_rejected)
    yield counter("tandem_router_requests_refused", "Requests rejected, by reason.", rejected, "reason")
    what = "Times that a stream gave its slot to another tenant."
    yield counter("tandem_router_streams_paused", what, admission.num_paused)
    yield _unlabelled("tandem_router_queue_wait_seconds", "Queue wait of admitted requests.", admission.wait_s)


def _instances(instances: list[tuple[Role, InstanceSample]]) -> Iterator[Metric]:
    states = Counter((role, "ejected" if one.is_ejected else one.state) for role, one in instances)
    every = [(role, state) for role in get_args(Role) for state in (*get_args(State), "ejected")]
    sizes = [(labels, states[labels]) for labels in every]
    yield gauge("tandem_router_instances", "Instances of a pool, by state.", sizes, "role", "state")

    def per_instance(name: str, documentation: str, samples: Samples, *labels: str) -> Metric:
        return gauge(f"tandem_router_instance_{name}", documentation, samples, "role", "instance", *labels)

    ages = [((role, one.name), one.report_age_s) for role, one in instances if one.report_age_s < math.inf]
    views = [((role, one.name), one.view) for role, one in instances if one.view is not None]
    yield per_instance("beat_age_seconds", "Since the last report.", ages)
    states_of = (
        ((*labels, state), number)
        for labels, view in views
        for state, number in (
            ("waiting", view.load.num_waiting),
            ("running", view.load.num_running),
            ("loading", view.load.num_loading),
            ("unreported", view.num_unreported),
        )
    )
    yield per_instance("requests", "Requests at an instance, as reported and as sent since.", states_of, "state")
    without_room = [(labels, view.load.num_without_room) for labels, view in views]
    yield per_instance(
        "requests_without_room", "Of the waiting requests: whose KV has no room yet, or no grammar.", without_room
    )
    tokens = [(labels, view.num_waiting_tokens) for labels, view in views]
    yield per_instance("waiting_tokens", "Tokens that wait at an instance to be prefilled.", tokens)
    blocks = [(labels, view.load.usable_blocks) for labels, view in views]
    yield per_instance("usable_blocks", "Free and cached KV blocks.", blocks)
    throughput = (
        ((*labels, kind), per_s)
        for labels, view in views
        for kind, per_s in (
            ("prefill", view.throughput.prefill_per_s),
            ("hand_over", view.throughput.hand_over_per_s),
        )
        if per_s is not None
    )
    yield per_instance("tokens_per_second", "Throughput as measured by this router.", throughput, "kind")
