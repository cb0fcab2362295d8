"""What an instance counts, whichever its role: its requests here, its engine and KV in the core's load reports.

    Observation ─ends▶ RequestMetrics ─┐
    core ─▶ EngineLoad ────────────────┴─▶ InstanceCollector ─▶ Prometheus, when it asks

Counted are plain numbers, on the event loop; the names under which Prometheus sees them stand in docs/metrics.md. What
vLLM's users look for is told a second time under its names (vllm_metrics.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import ClassVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from engine.messages import EngineLoad, EngineRequest, KVTotals, TokensEvent
from instance import vllm_metrics
from instance.load import LoadSource
from instance.vllm_metrics import VllmRequests
from protos.tandem.v1 import common_pb2, instance_pb2
from serving.events import RequestEvent, Timeline
from serving.logging import log_event
from serving.metrics import LatencyHistogram

_log = logging.getLogger(__name__)

Stages = dict[str, tuple[RequestEvent, RequestEvent]]


class Observation:
    """One request while it is being served."""

    def __init__(self, request: EngineRequest, vllm: VllmRequests) -> None:
        self.timeline = Timeline()
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._request = request
        self._vllm = vllm
        self._received_s = self.timeline.mark(RequestEvent.RECEIVED)
        self._queue_s = 0.0
        self._first_s = self._last_s = self._received_s

    def saw(self, chunk: common_pb2.TokenChunk, first: TokensEvent | None) -> bool:
        """Takes note of a chunk; returns whether it was the request's first here. `first` is the engine's word on the
        request's first token here, `RunningChoice.first`."""
        is_first = self.num_tokens == 0
        now_s = time.monotonic()
        if is_first:
            self._first_s = self.timeline.mark(RequestEvent.FIRST_TOKEN, now_s)
            if first is not None:
                self._queue_s = first.queue_s
                self._vllm.began(self._request, first, now_s - self._received_s)
        elif chunk.token_ids:
            self._vllm.gap_s.observe(now_s - self._last_s)
        self._last_s = now_s
        self.num_tokens += len(chunk.token_ids)
        if chunk.HasField("finish"):
            self.finish_reason = (
                common_pb2.FinishReason.Name(chunk.finish.reason).removeprefix("FINISH_REASON_").lower()
            )
        return is_first

    def finished(self) -> None:
        """It ended by itself; told to vLLM's histograms."""
        self._vllm.ended(
            self._request,
            whole_s=self._last_s - self._received_s,
            queue_s=self._queue_s,
            decode_s=self._last_s - self._first_s,
            num_tokens=self.num_tokens,
        )


@dataclass(slots=True)
class RequestMetrics:
    """Totals since the start. Written on the event loop alone. A role adds numbers, and says what they are called."""

    STAGES: ClassVar[Stages] = {"first_token": (RequestEvent.RECEIVED, RequestEvent.FIRST_TOKEN)}
    """Parts of a request's life here whose length is observed, once per request that came so far."""
    COUNTERS: ClassVar[dict[str, tuple[str, str]]] = {
        "num_received": ("tandem_requests_received", "Requests that have come."),
    }
    """Field → name for Prometheus, without _total, and what it means."""

    num_received: int = 0
    num_cancelled: int = 0
    """Ended by the caller, or by its going away, before the last chunk."""
    num_failed: int = 0
    num_tokens: int = 0
    """Output tokens sent."""
    first_token_s: float = 0.0
    """Sum over requests of the time from the call to its first token."""
    num_first_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests that ended by themselves, by finish reason."""
    stages: dict[str, LatencyHistogram] = field(init=False)
    vllm: VllmRequests = field(default_factory=VllmRequests)
    """The same, and more, as vLLM counts it."""

    def __post_init__(self) -> None:
        self.stages = {name: LatencyHistogram() for name in self.STAGES}

    @contextmanager
    def observed(self, request: EngineRequest) -> Iterator[Observation]:
        """Counts the request that the block serves, and logs its end."""
        observation = Observation(request, self.vllm)
        self.num_received += 1
        try:
            yield observation
        except (GeneratorExit, asyncio.CancelledError):
            if observation.finish_reason is None:
                self.num_cancelled += 1
                self.vllm.finished["abort"] += 1
                self._ended(observation, RequestEvent.ABORTED)
            else:
                self._finished(observation)
            raise
        except BaseException as error:
            self.num_failed += 1
            self.vllm.failed(error)
            self._ended(observation, RequestEvent.FAILED, error=type(error).__name__)
            raise
        else:
            self._finished(observation)

    def totals(self) -> dict[str, object]:
        """Every number by name, for one log line."""
        totals = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("stages", "vllm")}
        return {**totals, "finished": dict(self.finished)}

    def collect(self) -> Iterator[Metric]:
        """The same for Prometheus."""
        for name, (called, documentation) in self.COUNTERS.items():
            yield CounterMetricFamily(called, documentation, value=getattr(self, name))
        ended = CounterMetricFamily("tandem_requests_ended", "Requests that have ended, by how.", labels=["reason"])
        for reason, number in {**self.finished, "cancelled": self.num_cancelled, "failed": self.num_failed}.items():
            ended.add_metric([reason], number)
        yield ended
        stages = HistogramMetricFamily(
            "tandem_request_stage_seconds", "How long a part of a request's life took here.", labels=["stage"]
        )
        for stage, histogram in self.stages.items():
            stages.add_metric([stage], histogram.buckets(), histogram.sum_s)
        yield stages

    def _finished(self, observation: Observation) -> None:
        reason = observation.finish_reason or "unknown"
        self.finished[reason] += 1
        self.vllm.finished[reason] += 1
        observation.finished()
        self._ended(observation, RequestEvent.FINISHED, reason=reason)

    def _ended(self, observation: Observation, event: RequestEvent, **fields: object) -> None:
        timeline = observation.timeline
        timeline.mark(event, time.monotonic())
        self.num_tokens += observation.num_tokens
        if (first_token_s := timeline.between(RequestEvent.RECEIVED, RequestEvent.FIRST_TOKEN)) is not None:
            self.num_first_tokens += 1
            self.first_token_s += first_token_s
        for stage, (start, end) in self.STAGES.items():
            if (took_s := timeline.between(start, end)) is not None:
                self.stages[stage].observe(took_s)
        log_event(_log, event, "", num_tokens=observation.num_tokens, **{**fields, **timeline.milliseconds()})


class InstanceCollector(Collector):
    """Everything an instance tells Prometheus. Reads, on whatever thread asks, the newest report of the core."""

    def __init__(
        self,
        source: LoadSource,
        requests: RequestMetrics,
        info: Callable[[], instance_pb2.GetInstanceInfoResponse],
    ) -> None:
        self._source = source
        self._requests = requests
        self._info = info

    def collect(self) -> Iterator[Metric]:
        load, info = self._source.load, self._info()
        role = instance_pb2.Role.Name(info.role).removeprefix("ROLE_").lower()
        yield InfoMetricFamily(
            "tandem_instance",
            "Who this is.",
            {"instance_id": info.instance_id, "role": role, "model": info.model, "connector": info.kv_connector},
        )
        yield from _engine(load, self._source.core_silence_s)
        yield from _kv(load, info.kv_connector)
        yield from vllm_metrics.collected(load, self._requests.vllm, info)
        yield from self._requests.collect()


def _engine(load: EngineLoad, core_silence_s: float) -> Iterator[Metric]:
    requests = GaugeMetricFamily("tandem_engine_requests", "Requests that are here now, by state.", labels=["state"])
    requests.add_metric(["waiting"], load.num_waiting)
    requests.add_metric(["running"], load.num_running)
    requests.add_metric(["loading"], load.num_loading)
    yield requests
    for name, documentation, value in (
        ("waiting_tokens", "Tokens that the waiting requests have yet to compute.", load.num_waiting_tokens),
        ("step_seconds", "How long a step takes, smoothed.", load.step_s),
        ("silence_seconds", "Since the engine core last gave a sign.", core_silence_s),
    ):
        yield GaugeMetricFamily(f"tandem_engine_{name}", documentation, value=value)
    for name, documentation, total in (
        ("steps", "Steps computed.", load.num_steps),
        ("prefilled_tokens", "Prompt tokens computed, not found in any cache.", load.num_prefilled_tokens),
        ("generated_tokens", "Tokens generated.", load.num_generated_tokens),
        ("preemptions", "Requests whose blocks the engine took back.", load.num_preemptions),
    ):
        yield CounterMetricFamily(f"tandem_engine_{name}", documentation, value=total)


def _kv(load: EngineLoad, connector: str) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("tandem_kv_blocks", "KV blocks, each in one class.", labels=["class"])
    for name in ("free", "cached", "running", "held", "quarantined"):
        blocks.add_metric([name], getattr(load, f"{name}_blocks"))
    yield blocks
    leases = GaugeMetricFamily("tandem_kv_leases", "Transfers whose KV is held here.", labels=["connector"])
    leases.add_metric([connector], load.num_transfers)
    yield leases
    for name, documentation, total in (
        ("expired_leases", "Leases that ran out before their reader came or released.", load.num_expired_leases),
        ("external_tokens", "Tokens whose KV came from elsewhere.", load.num_external_tokens),
        ("recomputed_blocks", "Blocks whose KV should have come and did not.", load.num_recomputed_blocks),
    ):
        family = CounterMetricFamily(f"tandem_kv_{name}", documentation, labels=["connector"])
        family.add_metric([connector], total)
        yield family
    yield from _moved(load.kv_totals)


def _moved(kv_totals: Sequence[KVTotals]) -> Iterator[Metric]:
    """What each connector counts by itself. One that is in a list twice has its place there in its name."""
    labels = ["connector", "direction"]
    num_shared = CounterMetricFamily("tandem_kv_shared_blocks", "Blocks to save that were there.", labels=labels[:1])
    num_blocks = CounterMetricFamily("tandem_kv_transfer_blocks", "Blocks moved.", labels=labels)
    num_bytes = CounterMetricFamily("tandem_kv_transfer_bytes", "Bytes moved.", labels=labels)
    seconds = CounterMetricFamily("tandem_kv_transfer_seconds", "Spent by the I/O threads together.", labels=labels)
    failures = CounterMetricFamily(
        "tandem_kv_transfer_failures", "Blocks that were not moved, by why.", labels=[*labels, "reason"]
    )
    names: list[str] = []
    for index, totals in enumerate(kv_totals):
        connector = f"{totals.connector}#{index}" if totals.connector in names else totals.connector
        names.append(connector)
        num_shared.add_metric([connector], totals.num_shared_blocks)
        for direction, moved in (("save", totals.saved), ("load", totals.loaded)):
            num_blocks.add_metric([connector, direction], moved.num_blocks)
            num_bytes.add_metric([connector, direction], moved.num_bytes)
            seconds.add_metric([connector, direction], moved.seconds)
            for reason, number in moved.failures.items():
                failures.add_metric([connector, direction, reason], number)
    yield from (num_shared, num_blocks, num_bytes, seconds, failures)
