"""An instance exports vLLM's names, labels and buckets with the right numbers."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import decode_service.service
import prefill_service.service
from engine.core.messages import EngineLoad, EngineRequest, KVTotals, TokensEvent
from engine.sampling.params import SamplingParams
from instance.server import Role
from instance.vllm_metrics import VllmRequests, collected, token_buckets
from kv_transfer.transfer.connector import ReadCounters
from protos.tandem.v1 import decode_pb2, instance_pb2, prefill_pb2
from serving.histogram import Histogram
from serving.metrics import MetricsSettings
from tests.instance.rig import Rig, instance_request, model_folder, read_all, refusal, running
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
VLLM: dict[str, Any] = json.loads((ROOT / "tests/data/vllm_metrics.json").read_text())
METRICS = MetricsSettings(listen="127.0.0.1:0")
ROLES = {"prefill": prefill_service.service.ROLE, "decode": decode_service.service.ROLE}
WITHOUT_COUNTERPART = {
    "lora_requests_info",
    "num_requests_kv_fetch_by_stage",
    "nixl_num_failed_notifications",
    "nixl_num_notifications_after_expiry",
}
NUM_OF_PROMPT = len(instance_request().prompt_token_ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


async def families(rig: Rig) -> dict[str, Metric]:
    """What is served under vLLM's prefix, by name without it."""
    address = f"http://{rig.server.metrics_server.address}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=20).read().decode())
    found = {family.name: family for family in text_string_to_metric_families(text)}
    return {name.removeprefix("vllm:"): family for name, family in found.items() if name.startswith("vllm:")}


def value(found: dict[str, Metric], name: str, suffix: str = "", **labels: str) -> float:
    """One sample's value, of the instance's one engine."""
    wanted = {"model_name": "demo", "engine": "0", **labels}
    [sample] = [
        sample for sample in found[name].samples if sample.name == f"vllm:{name}{suffix}" and sample.labels == wanted
    ]
    return float(sample.value)


def bounds_of(family: Metric) -> list[float]:
    return [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]


def labels_of(name: str) -> set[str]:
    spec = VLLM["metrics"][name]
    if "labels" in spec:
        return {*spec["labels"], "engine"}
    return {*VLLM["labels"], *([spec["label"]] if "label" in spec else [])}


# Names, labels, buckets


@pytest.mark.parametrize("role", ROLES.values(), ids=ROLES)
async def test_every_name_label_and_bucket_is_vllms(folder: Path, role: Role) -> None:
    async with running(folder, role, metrics=METRICS) as rig:
        assert not [name for name in await families(rig) if name.startswith("nixl_")], "exported with NIXL alone"
        rig.core.emit(kv_totals=[KVTotals("first"), KVTotals("nixl", reads=ReadCounters().totals())])
        await until(lambda: rig.server.engine.load.kv_totals)
        found = await families(rig)
    assert found.keys() == VLLM["metrics"].keys() - WITHOUT_COUNTERPART
    for name, family in found.items():
        spec = VLLM["metrics"][name]
        assert family.type == spec["type"], name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == labels_of(name), name
        if "values" in spec:
            assert [sample.labels[spec["label"]] for sample in family.samples] == spec["values"]
        if family.type == "histogram":
            bounds = VLLM["buckets"][spec["buckets"]]
            if spec["buckets"] == "tokens":
                bounds = [1, 2, 5, 10, 20, 50, 100, 200]  # max_model_len of the scripted core is 256
            assert bounds_of(family) == [*bounds, float("inf")], name


def test_what_has_no_counterpart_is_said_in_the_documentation() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    section = text.partition("### Without counterpart")[2].partition("\n## ")[0]
    assert {f"vllm:{name}" for name in WITHOUT_COUNTERPART} == set(re.findall(r"`(vllm:\w+)`", section))


@given(st.integers(1, 10**7))
def test_token_buckets_rise_by_1_2_and_5_up_to_the_longest_request(max_model_len: int) -> None:
    bounds = token_buckets(max_model_len)
    assert bounds == sorted(set(bounds))
    assert {int(str(bound).rstrip("0")) for bound in bounds} <= {1, 2, 5}
    assert bounds[0] == 1
    assert max_model_len / 2.5 < bounds[-1] <= max_model_len


def test_bounds_are_written_as_prometheus_writes_them() -> None:
    assert [bound for bound, _ in Histogram([0.001, 5, 10**6, 2 * 10**6]).buckets()] == [
        "0.001",
        "5.0",
        "1e+06",
        "2e+06",
        "+Inf",
    ]


# Numbers


async def test_a_request_is_in_every_metric(folder: Path) -> None:
    async with running(folder, ROLES["decode"], metrics=METRICS) as rig:
        call = rig.decode.Decode()
        await call.write(decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(request=instance_request())))
        await rig.core.request()
        computed: dict[str, Any] = {"num_cached_tokens": 4, "num_external_tokens": 3, "queue_s": 0.4}
        for event in (
            TokensEvent("r1", [72], **computed),
            TokensEvent("r1", [73], **computed),
            TokensEvent("r1", [74], "length", **computed),
        ):
            rig.core.emit(event, num_generated_tokens=3, num_preemptions=2, num_waiting=5, num_loading=6)
        await call.done_writing()
        assert len(await read_all(call)) == 3
        await until(lambda: rig.server.metrics.finished["length"])
        found = await families(rig)
    sources = {"local_cache_hit": 4, "external_kv_transfer": 3, "local_compute": NUM_OF_PROMPT - 7}
    for source, number in sources.items():
        assert value(found, "prompt_tokens_by_source", "_total", source=source) == number
    for name, number in {
        "prompt_tokens": NUM_OF_PROMPT,
        "generation_tokens": 3,
        "num_preemptions": 2,
        "prefix_cache_queries": NUM_OF_PROMPT,
        "prefix_cache_hits": 4,
        "external_prefix_cache_queries": NUM_OF_PROMPT - 4,
        "external_prefix_cache_hits": 3,
    }.items():
        assert value(found, name, "_total") == number, name
    assert value(found, "request_success", "_total", finished_reason="length") == 1
    assert value(found, "num_requests_waiting_by_reason", reason="capacity") == 5
    assert value(found, "num_requests_waiting_by_reason", reason="deferred") == 6
    for name, number in {"request_prompt_tokens": NUM_OF_PROMPT, "request_generation_tokens": 3,
                         "request_params_max_tokens": 32, "request_params_n": 1}.items():  # fmt: skip
        assert (value(found, name, "_count"), value(found, name, "_sum")) == (1, number), name
    assert value(found, "inter_token_latency_seconds", "_count") == 2
    assert value(found, "time_to_first_token_seconds", "_count") == 1
    assert value(found, "request_queue_time_seconds", "_sum") == 0.4
    assert value(found, "request_queue_time_seconds", "_bucket", le="0.3") == 0
    assert value(found, "request_queue_time_seconds", "_bucket", le="0.5") == 1
    whole, decode = (value(found, f"{name}_seconds", "_sum") for name in ("e2e_request_latency", "request_decode_time"))
    assert value(found, "request_time_per_output_token_seconds", "_sum") == pytest.approx(decode / 2)
    assert value(found, "inter_token_latency_seconds", "_sum") == pytest.approx(decode)
    assert value(found, "time_to_first_token_seconds", "_sum") == pytest.approx(whole - decode)


def test_the_parts_of_a_request_add_up() -> None:
    requests = VllmRequests()
    request = EngineRequest(request_id="r", prompt_token_ids=[1, 2], output_token_ids=[3], params=SamplingParams())
    requests.observe_finish(request, whole_s=10.0, queue_s=2.0, decode_s=5.0, num_tokens=6)
    sums = {name.removesuffix("_seconds"): histogram.sum for name, histogram in requests.histograms.items()}
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time")
    assert [sums[part] for part in parts] == [2.0, 3.0, 5.0, 8.0]
    assert sums["request_time_per_output_token"] == 1.0
    assert sums["request_prompt_tokens"] == 3  # what another instance emitted has to be computed here, too
    requests.observe_finish(request, whole_s=1.0, queue_s=0.0, decode_s=0.0, num_tokens=1)
    assert requests.histograms["request_time_per_output_token_seconds"].count == 1  # one token has no gap


async def test_unsuccessful_requests_are_counted_by_reason(folder: Path) -> None:
    async with running(folder, ROLES["prefill"], metrics=METRICS) as rig:

        def ask(request_id: str) -> Any:
            hand_over = prefill_pb2.HandOver(transfer_id=request_id)
            request = prefill_pb2.PrefillRequest(request=instance_request(request_id), hand_over=hand_over)
            return rig.prefill.Prefill(request)

        cancelled = ask("r1")
        await cancelled.read()
        cancelled.cancel()
        refused = ask("r2")
        await rig.core.request(2)
        rig.core.emit(TokensEvent("r2", [], "error", error="no blocks", error_kind="no_room"))
        assert (await refusal(refused)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        broken = ask("r3")
        await rig.core.request(3)
        rig.core.emit(TokensEvent("r3", [], "error", error="not finite"))
        assert (await refusal(broken)).code() is grpc.StatusCode.INTERNAL
        metrics = rig.server.metrics
        await until(lambda: metrics.num_cancelled == 1 and metrics.num_failed == 2)
        found = await families(rig)
    assert value(found, "request_success", "_total", finished_reason="abort") == 1
    assert value(found, "request_success", "_total", finished_reason="error") == 2
    assert value(found, "admission_rejections", "_total", reason="capacity") == 1
    assert value(found, "e2e_request_latency_seconds", "_count") == 0


@pytest.mark.parametrize(("connector", "num_asked"), [("null", 0), ("nixl", 10)])
def test_without_a_connector_nothing_is_asked_for_elsewhere(connector: str, num_asked: int) -> None:
    requests = VllmRequests()
    requests.sources["local_compute"] = 10
    info = instance_pb2.GetInstanceInfoResponse(model="demo", kv_connector=connector)
    found = {family.name.removeprefix("vllm:"): family for family in collected(EngineLoad(), requests, info, {})}
    assert value(found, "external_prefix_cache_queries", "_total") == num_asked


def test_a_read_is_a_transfer_of_nixls() -> None:
    reads = ReadCounters()
    reads.count_success(0.02, 0.003, 5000, 12)
    reads.count_success(0.2, 0.001, 2048, 1)
    reads.num_failed = 3
    load = EngineLoad(kv_totals=[KVTotals("nixl", reads=reads.totals())], num_expired_leases=4)
    info = instance_pb2.GetInstanceInfoResponse(model="demo", kv_connector="nixl")
    found = {family.name.removeprefix("vllm:"): family for family in collected(load, VllmRequests(), info, {})}
    for name, total in {
        "nixl_xfer_time_seconds": 0.22,
        "nixl_post_time_seconds": 0.004,
        "nixl_bytes_transferred": 7048,
        "nixl_num_descriptors": 13,
    }.items():
        assert value(found, name, "_count") == 2
        assert value(found, name, "_sum") == pytest.approx(total)
    assert value(found, "nixl_xfer_time_seconds", "_bucket", le="0.01") == 0
    assert value(found, "nixl_xfer_time_seconds", "_bucket", le="0.025") == 1
    assert value(found, "nixl_bytes_transferred", "_bucket", le="2048.0") == 1
    assert value(found, "nixl_num_descriptors", "_bucket", le="10.0") == 1
    assert value(found, "nixl_num_failed_transfers", "_total") == 3
    assert value(found, "nixl_num_kv_expired_reqs", "_total") == 4
