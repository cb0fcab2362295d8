"""Metrics of an instance under vLLM's names, labels and buckets, for dashboards, autoscalers and gateways of vLLM.

    RequestMetrics ─rejection, first token, each token, end▶ VllmRequests ─┐
    core ─▶ EngineLoad ────────────────────────────────────────────────────┴─ collected ─▶ Prometheus, at each scrape

The names are those of vLLM 0.32, listed in tests/data/vllm_metrics.json; docs/metrics.md says what each means here and
which have no counterpart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily

from engine.core.messages import STEP_TOKENS, EngineLoad, EngineRequest, KVReads, TokensEvent
from kv_transfer.transfer.connector import POST_BUCKETS_S, READ_BUCKETS_BYTES, READ_BUCKETS_DESCRIPTORS, READ_BUCKETS_S
from protos.tandem.v1 import instance_pb2
from serving.histogram import Histogram, cumulative
from serving.metrics import counter, gauge

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
_ENGINE = "0"  # vLLM numbers the engines of a data-parallel server; an instance has one
_REASONS = ("stop", "length", "abort", "error")


def token_buckets(max_model_len: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 … up to `max_model_len` tokens."""
    steps = (digit * 10**power for power in range(len(str(max_model_len))) for digit in (1, 2, 5))
    return [step for step in steps if step <= max_model_len]


_ANY_TOKENS = token_buckets(10**8)  # for any model; those above max_model_len are not exported
_REQUEST_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the call to its first token at this instance.", TTFT_BUCKETS_S),
    "inter_token_latency_seconds": ("Between two tokens of a request.", ITL_BUCKETS_S),
    "request_time_per_output_token_seconds": ("Mean time between tokens of a request.", ITL_BUCKETS_S),
    "e2e_request_latency_seconds": ("From the call to its end.", REQUEST_BUCKETS_S),
    "request_queue_time_seconds": ("From arrival until the engine first ran the request.", REQUEST_BUCKETS_S),
    "request_prefill_time_seconds": ("From then until its first token.", REQUEST_BUCKETS_S),
    "request_decode_time_seconds": ("From its first to its last token.", REQUEST_BUCKETS_S),
    "request_inference_time_seconds": ("Prefill and decode time together.", REQUEST_BUCKETS_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", _ANY_TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", _ANY_TOKENS),
    "request_params_max_tokens": ("max_tokens of a request.", _ANY_TOKENS),
    "request_params_n": ("Choices of a request: one, because the router splits them.", (1, 2, 5, 10, 20)),
}
"""Help text and buckets by name."""


@dataclass(slots=True)
class VllmRequests:
    """Totals since the start, written on the event loop alone."""

    num_rejected: int = 0  # requests over the concurrency limit, or without blocks within their reservation time
    sources: Counter[str] = field(default_factory=Counter)  # prompt tokens by the source of their KV
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(buckets) for name, (_, buckets) in _REQUEST_HISTOGRAMS.items()}
    )

    def observe(self, **values: float) -> None:
        """One value for each of these histograms."""
        for name, value in values.items():
            self.histograms[name].observe(value)

    def observe_first_token(self, request: EngineRequest, first: TokensEvent, first_token_s: float) -> None:
        """`first_token_s` is the time since the request was received."""
        num_tokens = num_prompt_tokens(request)
        num_cached = min(first.num_cached_tokens, num_tokens)
        num_external = min(first.num_external_tokens, num_tokens - num_cached)
        self.sources["local_cache_hit"] += num_cached
        self.sources["external_kv_transfer"] += num_external
        self.sources["local_compute"] += num_tokens - num_cached - num_external
        self.observe(time_to_first_token_seconds=first_token_s)

    def observe_finish(
        self, request: EngineRequest, *, whole_s: float, queue_s: float, decode_s: float, num_tokens: int
    ) -> None:
        """The request was queued for `queue_s`; `decode_s` lay between its first and its last token."""
        self.observe(
            e2e_request_latency_seconds=whole_s,
            request_queue_time_seconds=queue_s,
            request_prefill_time_seconds=max(0.0, whole_s - queue_s - decode_s),
            request_decode_time_seconds=decode_s,
            request_inference_time_seconds=max(0.0, whole_s - queue_s),
            request_prompt_tokens=num_prompt_tokens(request),
            request_generation_tokens=num_tokens,
            request_params_n=1,
        )
        if num_tokens > 1:
            self.observe(request_time_per_output_token_seconds=decode_s / (num_tokens - 1))
        if request.params.max_tokens is not None:
            self.observe(request_params_max_tokens=request.params.max_tokens)


def num_prompt_tokens(request: EngineRequest) -> int:
    """Tokens that the engine prefills: the prompt, and what another instance emitted."""
    return len(request.prompt_token_ids) + len(request.output_token_ids)


def collected(
    load: EngineLoad, requests: VllmRequests, info: instance_pb2.GetInstanceInfoResponse, ended: Mapping[str, int]
) -> Iterator[Metric]:
    """All metrics under vLLM's names; `ended`: requests by reason. May be called on any thread."""
    for metric in _of_the_engine(load, requests, info, ended):
        labels = {"model_name": info.model, "engine": _ENGINE}
        metric.samples = [sample._replace(labels=labels | sample.labels) for sample in metric.samples]
        yield metric
    sizes = (str(info.block_size), str(info.num_blocks), _ENGINE)
    labels_of_sizes = ("block_size", "num_gpu_blocks", "engine")
    yield gauge("vllm:cache_config_info", "Configuration of the KV cache.", [(sizes, 1)], *labels_of_sizes)


def _of_the_engine(
    load: EngineLoad, requests: VllmRequests, info: instance_pb2.GetInstanceInfoResponse, ended: Mapping[str, int]
) -> Iterator[Metric]:
    """Without the labels of model and engine."""
    yield from _gauges(load)
    yield from _totals(load, requests, info.kv_connector)
    ended = {**dict.fromkeys(_REASONS, 0), **ended}
    yield counter("vllm:request_success", "Requests ended, by reason.", ended, "finished_reason")
    yield from _histograms(load, requests, len(token_buckets(info.max_model_len)))
    for totals in load.kv_totals:
        if totals.connector == "nixl" and totals.reads is not None:
            yield from _nixl(totals.reads, load.num_expired_leases)
            break


def _gauges(load: EngineLoad) -> Iterator[Metric]:
    num_used = load.running_blocks + load.held_blocks + load.quarantined_blocks
    usage = num_used / max(1, num_used + load.free_blocks + load.cached_blocks)
    for name, documentation, value in (
        ("num_requests_running", "Running requests.", load.num_running),
        ("num_requests_waiting", "Waiting requests, for KV too.", load.num_waiting + load.num_loading),
        ("kv_cache_usage_perc", "Fraction of the KV blocks in use, 0 to 1.", usage),
    ):
        yield gauge(f"vllm:{name}", documentation, value)
    waiting = {"capacity": load.num_waiting, "deferred": load.num_loading}
    yield gauge("vllm:num_requests_waiting_by_reason", "Waiting requests, by reason.", waiting, "reason")
    states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    yield gauge("vllm:engine_sleep_state", "1 for the engine's current state.", states, "sleep_state")


def _totals(load: EngineLoad, requests: VllmRequests, connector: str) -> Iterator[Metric]:
    sources = {name: requests.sources[name] for name in ("local_compute", "local_cache_hit", "external_kv_transfer")}
    num_prompt = sum(sources.values())
    num_asked = num_prompt - sources["local_cache_hit"] if connector not in ("", "null") else 0
    for name, documentation, value in (
        ("prompt_tokens", "Prompt tokens.", num_prompt),
        ("generation_tokens", "Generated tokens.", load.num_generated_tokens),
        ("num_preemptions", "Requests whose blocks the engine took back.", load.num_preemptions),
        ("prefix_cache_queries", "Tokens looked up in the prefix cache.", num_prompt),
        ("prefix_cache_hits", "Tokens found in the prefix cache.", sources["local_cache_hit"]),
        ("external_prefix_cache_queries", "Tokens requested from the connector.", num_asked),
        ("external_prefix_cache_hits", "Tokens loaded by the connector.", sources["external_kv_transfer"]),
    ):
        yield counter(f"vllm:{name}", documentation, value)
    yield counter("vllm:prompt_tokens_by_source", "Prompt tokens, by the source of their KV.", sources, "source")
    rejected = {"capacity": requests.num_rejected}
    yield counter("vllm:admission_rejections", "Requests rejected for lack of capacity.", rejected, "reason")


def _histograms(load: EngineLoad, requests: VllmRequests, num_token_buckets: int) -> Iterator[Metric]:
    for name, (documentation, bounds) in _REQUEST_HISTOGRAMS.items():
        buckets = requests.histograms[name].buckets()
        if bounds is _ANY_TOKENS:
            buckets = [*buckets[:num_token_buckets], buckets[-1]]
        yield HistogramMetricFamily(f"vllm:{name}", documentation, buckets, requests.histograms[name].sum)
    buckets = cumulative(STEP_TOKENS, load.steps_by_tokens or [0] * (len(STEP_TOKENS) + 1))
    yield HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", buckets, load.num_step_tokens)


def _nixl(reads: KVReads, num_expired: int) -> Iterator[Metric]:
    """What vLLM calls a transfer is one NIXL handle: a read."""
    for name, documentation, bounds, counts, total in (
        ("xfer_time_seconds", "Duration of a read.", READ_BUCKETS_S, reads.by_seconds, reads.seconds),
        (
            "post_time_seconds",
            "Time to post a read to NIXL.",
            POST_BUCKETS_S,
            reads.by_post_seconds,
            reads.post_seconds,
        ),
        ("bytes_transferred", "Bytes of a read.", READ_BUCKETS_BYTES, reads.by_bytes, reads.num_bytes),
        (
            "num_descriptors",
            "Descriptors of a read: its pages times the arrays that hold them.",
            READ_BUCKETS_DESCRIPTORS,
            reads.by_descriptors,
            reads.num_descriptors,
        ),
    ):
        yield HistogramMetricFamily(f"vllm:nixl_{name}", documentation, cumulative(bounds, counts), total)
    yield counter("vllm:nixl_num_failed_transfers", "Failed reads.", reads.num_failed)
    yield counter("vllm:nixl_num_kv_expired_reqs", "Expired leases.", num_expired)
