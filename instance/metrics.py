"""Metrics of an instance, whichever its role: its requests, and the engine and KV as in the core's load reports.

    Observation ─ends▶ RequestMetrics ─┐
    core ─▶ EngineLoad ────────────────┴─▶ InstanceCollector ─▶ Prometheus, at each scrape

Counts are plain numbers, written on the event loop. docs/metrics.md lists the names under which Prometheus gets them;
vllm_metrics.py exports them under vLLM's names as well.
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
from prometheus_client.core import InfoMetricFamily
from prometheus_client.registry import Collector

from engine.core.async_engine import AsyncEngine
from engine.core.messages import EngineLoad, EngineRequest, KVTotals, TokensEvent
from instance import vllm_metrics
from instance.vllm_metrics import VllmRequests
from protos.tandem.v1 import common_pb2, instance_pb2
from serving.errors import Overloaded
from serving.histogram import Histogram
from serving.limits import call_end
from serving.logging import RequestEvent, Timeline, log_event
from serving.metrics import counter, gauge, histogram

_log = logging.getLogger(__name__)


class Observation:
    def __init__(self, request: EngineRequest, vllm: VllmRequests) -> None:
        self.timeline = Timeline()
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._request = request
        self._vllm = vllm
        self._received_s = self.timeline.mark(RequestEvent.RECEIVED)
        self.queue_s = 0.0
        self._first_s = self._last_s = self._received_s

    def observe_chunk(self, chunk: common_pb2.TokenChunk, first: TokensEvent | None) -> bool:
        """Counts a chunk; True for the request's first one here. `first` is `ChoiceStream.first`."""
        is_first = self.num_tokens == 0
        now_s = time.monotonic()
        if is_first:
            self._first_s = self.timeline.mark(RequestEvent.FIRST_TOKEN, now_s)
            if first is not None:
                self.queue_s = first.queue_s
                self._vllm.observe_first_token(self._request, first, now_s - self._received_s)
        elif chunk.token_ids:
            self._vllm.histograms["inter_token_latency_seconds"].observe(now_s - self._last_s)
        self._last_s = now_s
        self.num_tokens += len(chunk.token_ids)
        if chunk.HasField("finish"):
            reason = common_pb2.FinishReason.Name(chunk.finish.reason)
            self.finish_reason = reason.removeprefix("FINISH_REASON_").lower()
        return is_first

    def finish(self) -> None:
        self._vllm.observe_finish(
            self._request,
            whole_s=self._last_s - self._received_s,
            queue_s=self.queue_s,
            decode_s=self._last_s - self._first_s,
            num_tokens=self.num_tokens,
        )


@dataclass(slots=True)
class RequestMetrics:
    """Totals since the start, written on the event loop alone."""

    STAGES: ClassVar[dict[str, tuple[RequestEvent, RequestEvent]]] = {
        "first_token": (RequestEvent.RECEIVED, RequestEvent.FIRST_TOKEN),
        "reserve": (RequestEvent.RECEIVED, RequestEvent.KV_RESERVED),
        "load": (RequestEvent.KV_RESERVED, RequestEvent.KV_LOADED),
    }
    """Parts of a request whose duration is observed, once per request that reached their end."""
    COUNTERS: ClassVar[dict[str, tuple[str, str]]] = {
        "num_received": ("tandem_requests_received", "Requests received."),
        "num_leases_given_up": ("tandem_prefill_given_up_leases", "Transfers released without a reader."),
        "num_seeded": ("tandem_decode_seeded_requests", "Requests that continued a first token from elsewhere."),
        "num_loaded": ("tandem_decode_loaded_transfers", "Transfers received, completely or in part."),
    }
    """Field -> Prometheus name without _total, and help text."""

    num_received: int = 0
    num_cancelled: int = 0  # ended by the caller or at the deadline, before the last chunk
    num_failed: int = 0  # also those that this instance ended: a drain's grace was over, or the caller did not read
    num_tokens: int = 0  # output tokens sent
    num_leases_given_up: int = 0  # of prefills that were cancelled, failed or needed no hand-over
    num_seeded: int = 0
    num_loaded: int = 0
    num_external_tokens: int = 0  # prompt tokens whose KV was loaded
    num_recomputed_blocks: int = 0  # blocks computed here because their KV was not loaded
    finished: Counter[str] = field(default_factory=Counter)  # completed requests by finish reason
    stages: dict[str, Histogram] = field(init=False)
    vllm: VllmRequests = field(default_factory=VllmRequests)

    def __post_init__(self) -> None:
        self.stages = {name: Histogram() for name in self.STAGES}

    @contextmanager
    def observe_request(self, request: EngineRequest) -> Iterator[Observation]:
        """Counts the request that the block serves, and logs its end."""
        observation = Observation(request, self.vllm)
        self.num_received += 1
        try:
            yield observation
        except (GeneratorExit, asyncio.CancelledError):
            if observation.finish_reason is not None:
                self._finished(observation)
            elif (end := call_end().error) is not None:
                self._failed(observation, end)
            else:
                self.num_cancelled += 1
                self._ended(observation, RequestEvent.ABORTED)
            raise
        except BaseException as error:
            self.vllm.num_rejected += isinstance(error, Overloaded)
            self._failed(observation, error)
            raise
        else:
            self._finished(observation)

    def totals(self) -> dict[str, object]:
        totals = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("stages", "vllm")}
        first_token = self.stages["first_token"]
        totals |= {"num_first_tokens": first_token.count, "first_token_s": first_token.sum}
        return {**totals, "finished": dict(self.finished)}

    def collect(self) -> Iterator[Metric]:
        for name, (metric, documentation) in self.COUNTERS.items():
            yield counter(metric, documentation, getattr(self, name))
        ended = {**self.finished, "cancelled": self.num_cancelled, "failed": self.num_failed}
        yield counter("tandem_requests_ended", "Requests ended, by reason.", ended, "reason")
        stages = "Duration of a part of a request at this instance."
        yield histogram("tandem_request_stage_seconds", stages, self.stages, "stage")

    def _finished(self, observation: Observation) -> None:
        reason = observation.finish_reason or "unknown"
        self.finished[reason] += 1
        observation.finish()
        self._ended(observation, RequestEvent.FINISHED, reason=reason)

    def _failed(self, observation: Observation, error: BaseException) -> None:
        self.num_failed += 1
        self._ended(observation, RequestEvent.FAILED, error=type(error).__name__)

    def _ended(self, observation: Observation, event: RequestEvent, **fields: object) -> None:
        timeline = observation.timeline
        timeline.mark(event, time.monotonic())
        self.num_tokens += observation.num_tokens
        for stage, (start, end) in self.STAGES.items():
            if (took_s := timeline.between(start, end)) is not None:
                self.stages[stage].observe(took_s)
        log_event(_log, event, "", num_tokens=observation.num_tokens, **{**fields, **timeline.milliseconds()})


@dataclass(eq=False)
class InstanceCollector(Collector):
    """All metrics of an instance. Reads the core's latest report, on the thread of the scrape."""

    engine: AsyncEngine
    requests: RequestMetrics
    info: Callable[[], instance_pb2.GetInstanceInfoResponse]

    def collect(self) -> Iterator[Metric]:
        load, info = self.engine.load, self.info()
        role = instance_pb2.Role.Name(info.role).removeprefix("ROLE_").lower()
        yield InfoMetricFamily(
            "tandem_instance",
            "Identity of the instance.",
            {"instance_id": info.instance_id, "role": role, "model": info.model, "connector": info.kv_connector},
        )
        yield from _engine(load, self.engine.core_silence_s)
        yield from _kv(load, info.kv_connector)
        requests = self.requests
        ended = Counter(requests.finished)
        ended.update(abort=requests.num_cancelled, error=requests.num_failed)
        yield from vllm_metrics.collected(load, requests.vllm, info, ended)
        yield from requests.collect()


def _engine(load: EngineLoad, core_silence_s: float) -> Iterator[Metric]:
    requests = {"waiting": load.num_waiting, "running": load.num_running, "loading": load.num_loading}
    yield gauge("tandem_engine_requests", "Requests in the engine, by state.", requests, "state")
    for name, documentation, value in (
        ("waiting_tokens", "Tokens that waiting requests have yet to compute.", load.num_waiting_tokens),
        ("step_seconds", "Predicted duration of the current or last step.", load.step_s),
        (
            "silence_seconds",
            "Time since the engine core's last message between two steps, without pauses of this process.",
            core_silence_s,
        ),
    ):
        yield gauge(f"tandem_engine_{name}", documentation, value)
    for name, documentation, total in (
        ("steps", "Steps computed.", load.num_steps),
        ("prefilled_tokens", "Prompt tokens computed, not found in any cache.", load.num_prefilled_tokens),
        ("generated_tokens", "Tokens generated.", load.num_generated_tokens),
        ("draft_tokens", "Tokens of drafts computed.", load.num_draft_tokens),
        ("accepted_tokens", "Tokens of drafts that were right.", load.num_accepted_tokens),
        ("preemptions", "Requests whose blocks the engine took back.", load.num_preemptions),
    ):
        yield counter(f"tandem_engine_{name}", documentation, total)


def _kv(load: EngineLoad, connector: str) -> Iterator[Metric]:
    classes = ("free", "cached", "running", "held", "quarantined")
    blocks = {name: getattr(load, f"{name}_blocks") for name in classes}
    yield gauge("tandem_kv_blocks", "KV blocks, each in one class.", blocks, "class")
    leases = {connector: load.num_transfers}
    yield gauge("tandem_kv_leases", "Transfers whose KV is held here.", leases, "connector")
    for name, documentation, total in (
        ("expired_leases", "Leases that expired before their reader released them.", load.num_expired_leases),
        ("external_tokens", "Tokens whose KV came from elsewhere.", load.num_external_tokens),
        ("recomputed_blocks", "Blocks computed here because their KV was not loaded.", load.num_recomputed_blocks),
    ):
        yield counter(f"tandem_kv_{name}", documentation, {connector: total}, "connector")
    yield from _moved(load.kv_totals)


def _moved(kv_totals: Sequence[KVTotals]) -> Iterator[Metric]:
    """Each connector's own counts. A connector that is in the list twice gets its index appended to its name."""
    names: list[str] = []
    for index, totals in enumerate(kv_totals):
        names.append(f"{totals.connector}#{index}" if totals.connector in names else totals.connector)
    shared = {name: totals.num_shared_blocks for name, totals in zip(names, kv_totals, strict=True)}
    yield counter("tandem_kv_shared_blocks", "Blocks found stored already.", shared, "connector")
    by_labels = [
        ((name, direction), moved)
        for name, totals in zip(names, kv_totals, strict=True)
        for direction, moved in (("save", totals.saved), ("load", totals.loaded))
    ]
    for suffix, documentation, attribute in (
        ("blocks", "Blocks moved.", "num_blocks"),
        ("bytes", "Bytes moved.", "num_bytes"),
        ("seconds", "Time spent, summed over I/O threads.", "seconds"),
    ):
        samples = [(labels, getattr(moved, attribute)) for labels, moved in by_labels]
        yield counter(f"tandem_kv_transfer_{suffix}", documentation, samples, "connector", "direction")
    failures = [((*labels, why), count) for labels, moved in by_labels for why, count in moved.failures.items()]
    name, documentation = "tandem_kv_transfer_failures", "Blocks not moved, by reason."
    yield counter(name, documentation, failures, "connector", "direction", "reason")
