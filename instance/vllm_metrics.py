"""An instance under vLLM's names, labels and buckets: dashboards, autoscalers and gateways made for vLLM find what they
look for.

    RequestMetrics ─refused, first token, each token, end▶ VllmRequests ─┐
    core ─▶ EngineLoad ──────────────────────────────────────────────────┴─ collected ─▶ Prometheus, when it asks

The names are those of vLLM 0.32; tests/data/vllm_metrics.json lists them, and docs/metrics.md says what each means here
and which have no counterpart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from engine.messages import STEP_TOKENS, EngineLoad, EngineRequest, KVReads, TokensEvent
from kv_transfer.counters import POST_BUCKETS_S, READ_BUCKETS_BYTES, READ_BUCKETS_DESCRIPTORS, READ_BUCKETS_S
from protos.tandem.v1 import instance_pb2
from serving.errors import Overloaded
from serving.histogram import Histogram, cumulative

_Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
CHOICES_BUCKETS = (1, 2, 5, 10, 20)
_LABELS = ["model_name", "engine"]
_ENGINE = "0"
"""An instance has one engine; vLLM numbers those of a data-parallel server."""
_REASONS = ("stop", "length", "abort", "error")


def token_buckets(max_model_len: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 … up to `max_model_len` tokens."""
    steps = (digit * 10**power for power in range(len(str(max_model_len))) for digit in (1, 2, 5))
    return [step for step in steps if step <= max_model_len]


def _token_histogram() -> Histogram:
    """As fine as that of any model; what is served is cut to the one that runs."""
    return Histogram(token_buckets(10**8))


@dataclass(slots=True)
class VllmRequests:
    """Totals since the start. Written on the event loop alone."""

    num_refused: int = 0
    """Requests for which there was no room: too many requests, or no blocks within their reservation's time."""
    finished: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    """Tokens of prompts, by where their KV came from."""
    first_token_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    gap_s: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS_S))
    mean_gap_s: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS_S))
    whole_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    queue_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    prefill_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    decode_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    inference_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    prompt_tokens: Histogram = field(default_factory=_token_histogram)
    output_tokens: Histogram = field(default_factory=_token_histogram)
    max_tokens: Histogram = field(default_factory=_token_histogram)
    choices: Histogram = field(default_factory=lambda: Histogram(CHOICES_BUCKETS))

    def began(self, request: EngineRequest, first: TokensEvent, first_token_s: float) -> None:
        """Its first token is here, `first_token_s` after the request."""
        num_tokens = num_prompt_tokens(request)
        num_cached = min(first.num_cached_tokens, num_tokens)
        num_external = min(first.num_external_tokens, num_tokens - num_cached)
        self.sources["local_cache_hit"] += num_cached
        self.sources["external_kv_transfer"] += num_external
        self.sources["local_compute"] += num_tokens - num_cached - num_external
        self.first_token_s.observe(first_token_s)

    def failed(self, error: BaseException) -> None:
        """It was answered with an error."""
        self.finished["error"] += 1
        if isinstance(error, Overloaded):
            self.num_refused += 1

    def ended(
        self, request: EngineRequest, *, whole_s: float, queue_s: float, decode_s: float, num_tokens: int
    ) -> None:
        """It ended by itself. It waited `queue_s` in the engine, and its `num_tokens` tokens came within `decode_s`."""
        self.whole_s.observe(whole_s)
        self.queue_s.observe(queue_s)
        self.prefill_s.observe(max(0.0, whole_s - queue_s - decode_s))
        self.decode_s.observe(decode_s)
        self.inference_s.observe(max(0.0, whole_s - queue_s))
        if num_tokens > 1:
            self.mean_gap_s.observe(decode_s / (num_tokens - 1))
        self.prompt_tokens.observe(num_prompt_tokens(request))
        self.output_tokens.observe(num_tokens)
        if request.params.max_tokens is not None:
            self.max_tokens.observe(request.params.max_tokens)
        self.choices.observe(1)


def num_prompt_tokens(request: EngineRequest) -> int:
    """What the engine is given to compute before it generates: what another instance has emitted is a part of it."""
    return len(request.prompt_token_ids) + len(request.output_token_ids)


@dataclass(frozen=True, slots=True)
class _Families:
    """Metric families with vLLM's two labels, and with one more where there are several values."""

    model: str

    def one(self, kind: _Kind, name: str, documentation: str, value: float) -> Metric:
        family = kind(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric([self.model, _ENGINE], value)
        return family

    def each(self, kind: _Kind, name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
        family = kind(f"vllm:{name}", documentation, labels=[*_LABELS, label])
        for told, value in values.items():
            family.add_metric([self.model, _ENGINE, told], value)
        return family

    def histogram(self, name: str, documentation: str, buckets: list[tuple[str, float]], total: float) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric([self.model, _ENGINE], buckets, total)
        return family


def collected(load: EngineLoad, requests: VllmRequests, info: instance_pb2.GetInstanceInfoResponse) -> Iterator[Metric]:
    """Everything by vLLM's names. May be called on any thread."""
    families = _Families(info.model)
    yield from _now(families, load, info)
    yield from _totals(families, load, requests, info.kv_connector)
    yield from _latencies(families, requests)
    yield from _sizes(families, load, requests, info.max_model_len)
    for totals in load.kv_totals:
        if totals.connector == "nixl" and totals.reads is not None:
            yield from _nixl(families, totals.reads, load.num_expired_leases)
            break


def _now(families: _Families, load: EngineLoad, info: instance_pb2.GetInstanceInfoResponse) -> Iterator[Metric]:
    num_used = load.running_blocks + load.held_blocks + load.quarantined_blocks
    num_blocks = num_used + load.free_blocks + load.cached_blocks
    yield families.one(GaugeMetricFamily, "num_requests_running", "Requests that run.", load.num_running)
    yield families.one(
        GaugeMetricFamily,
        "num_requests_waiting",
        "Requests that wait, for KV too.",
        load.num_waiting + load.num_loading,
    )
    waiting = {"capacity": load.num_waiting, "deferred": load.num_loading}
    yield families.each(
        GaugeMetricFamily, "num_requests_waiting_by_reason", "Requests that wait, by for what.", "reason", waiting
    )
    yield families.one(
        GaugeMetricFamily,
        "kv_cache_usage_perc",
        "Share of the KV blocks that is in use, 0 to 1.",
        num_used / max(1, num_blocks),
    )
    states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    yield families.each(
        GaugeMetricFamily, "engine_sleep_state", "1 for the state that it is in.", "sleep_state", states
    )
    config = GaugeMetricFamily(
        "vllm:cache_config_info", "KV blocks that there are.", labels=["block_size", "num_gpu_blocks", "engine"]
    )
    config.add_metric([str(info.block_size), str(info.num_blocks), "0"], 1)
    yield config


def _totals(families: _Families, load: EngineLoad, requests: VllmRequests, connector: str) -> Iterator[Metric]:
    sources = {name: requests.sources[name] for name in ("local_compute", "local_cache_hit", "external_kv_transfer")}
    num_prompt = sum(sources.values())
    num_asked = num_prompt - sources["local_cache_hit"] if connector not in ("", "null") else 0
    for name, documentation, value in (
        ("prompt_tokens", "Tokens of prompts.", num_prompt),
        ("generation_tokens", "Tokens generated.", load.num_generated_tokens),
        ("num_preemptions", "Requests whose blocks the engine took back.", load.num_preemptions),
        ("prefix_cache_queries", "Tokens looked for in the prefix cache.", num_prompt),
        ("prefix_cache_hits", "Tokens found there.", sources["local_cache_hit"]),
        ("external_prefix_cache_queries", "Tokens that the connector was asked for.", num_asked),
        ("external_prefix_cache_hits", "Tokens that it brought.", sources["external_kv_transfer"]),
    ):
        yield families.one(CounterMetricFamily, name, documentation, value)
    yield families.each(
        CounterMetricFamily, "prompt_tokens_by_source", "Tokens of prompts, by where KV came from.", "source", sources
    )
    finished = {**dict.fromkeys(_REASONS, 0), **requests.finished}
    yield families.each(
        CounterMetricFamily, "request_success", "Requests that have ended, by how.", "finished_reason", finished
    )
    refused = {"capacity": requests.num_refused}
    yield families.each(
        CounterMetricFamily, "admission_rejections", "Requests for which there was no room.", "reason", refused
    )


def _latencies(families: _Families, requests: VllmRequests) -> Iterator[Metric]:
    for name, documentation, histogram in (
        ("time_to_first_token", "From the call to its first token from here.", requests.first_token_s),
        ("inter_token_latency", "Between two tokens of a request.", requests.gap_s),
        ("request_time_per_output_token", "A request's mean gap between tokens.", requests.mean_gap_s),
        ("e2e_request_latency", "From the call to its end.", requests.whole_s),
        ("request_queue_time", "Before the engine first ran it.", requests.queue_s),
        ("request_prefill_time", "From there to its first token.", requests.prefill_s),
        ("request_decode_time", "From there to its last one.", requests.decode_s),
        ("request_inference_time", "The last two together.", requests.inference_s),
    ):
        yield families.histogram(f"{name}_seconds", documentation, histogram.buckets(), histogram.sum)


def _sizes(families: _Families, load: EngineLoad, requests: VllmRequests, max_model_len: int) -> Iterator[Metric]:
    num_buckets = len(token_buckets(max_model_len))
    for name, documentation, histogram in (
        ("request_prompt_tokens", "Tokens of a request's prompt.", requests.prompt_tokens),
        ("request_generation_tokens", "Tokens generated for a request.", requests.output_tokens),
        ("request_params_max_tokens", "Tokens that a request may have.", requests.max_tokens),
    ):
        buckets = histogram.buckets()
        yield families.histogram(name, documentation, [*buckets[:num_buckets], buckets[-1]], histogram.sum)
    yield families.histogram(
        "request_params_n", "Choices of a request: one, the router splits them.",
        requests.choices.buckets(), requests.choices.sum,
    )  # fmt: skip
    counts = load.steps_by_tokens or [0] * (len(STEP_TOKENS) + 1)
    yield families.histogram(
        "iteration_tokens_total", "Tokens of a step.", cumulative(STEP_TOKENS, counts), load.num_step_tokens
    )


def _nixl(families: _Families, reads: KVReads, num_expired: int) -> Iterator[Metric]:
    """A transfer of vLLM's is one that NIXL has a handle of: a read."""
    for name, documentation, bounds, counts, total in (
        ("xfer_time_seconds", "From the start of a read to its end.", READ_BUCKETS_S, reads.by_seconds, reads.seconds),
        ("post_time_seconds", "To hand it over.", POST_BUCKETS_S, reads.by_post_seconds, reads.post_seconds),
        ("bytes_transferred", "Bytes of a read.", READ_BUCKETS_BYTES, reads.by_bytes, reads.num_bytes),
        ("num_descriptors", "Its pages.", READ_BUCKETS_DESCRIPTORS, reads.by_descriptors, reads.num_descriptors),
    ):
        yield families.histogram(f"nixl_{name}", documentation, cumulative(bounds, counts), total)
    yield families.one(CounterMetricFamily, "nixl_num_failed_transfers", "Reads that failed.", reads.num_failed)
    yield families.one(CounterMetricFamily, "nixl_num_kv_expired_reqs", "Leases that ran out.", num_expired)
