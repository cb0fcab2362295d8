"""An instance's metrics match what its core and its requests did."""

from __future__ import annotations

import asyncio
import re
import select
import socket
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import decode_service.service
import prefill_service.service
from engine.core.messages import (
    KVMoved,
    KVTotals,
    LoadedEvent,
    ReservedEvent,
    Seed,
    TokensEvent,
    TransferEvent,
)
from instance.server import InstanceServer, Role
from kv_transfer.transfer.connector import (
    MAX_REASONS,
    OTHER,
    FailureCounter,
    MoveCounters,
    ReadCounters,
    TransferCounters,
)
from protos.tandem.v1 import prefill_pb2
from serving.histogram import Histogram
from serving.lifecycle import StopSignals
from serving.metrics import MetricsSettings
from tests.instance.rig import Decoding, Rig, instance_request, model_folder, running, settings_of
from tests.instance.scripted_core import ScriptedCore
from tests.waiting import until

ROLES = {"prefill": prefill_service.service.ROLE, "decode": decode_service.service.ROLE}
METRICS = MetricsSettings(listen="127.0.0.1:0")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
async def decode(folder: Path) -> AsyncIterator[Rig]:
    async with running(folder, ROLES["decode"], metrics=METRICS) as rig:
        yield rig


def _get(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=3) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        return str(response.read().decode())


async def scrape(server: InstanceServer) -> Samples:
    """Every sample by name and labels."""
    assert server.metrics_server.address is not None
    text = await asyncio.to_thread(_get, server.metrics_server.address)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


async def test_the_cores_report_is_served_under_prometheus_names(decode: Rig) -> None:
    totals = KVTotals(
        connector="scripted",
        saved=KVMoved(3, 3072, 0.25, {"store_enospc": 2}),
        loaded=KVMoved(5, 5120, 0.5, {"missing": 1, "page_digest": 4}),
        num_shared_blocks=7,
    )
    decode.core.emit(
        num_waiting=1,
        num_running=2,
        num_loading=3,
        free_blocks=40,
        cached_blocks=8,
        running_blocks=12,
        held_blocks=3,
        quarantined_blocks=1,
        num_transfers=2,
        num_expired_leases=6,
        num_recomputed_blocks=9,
        kv_totals=[totals, KVTotals(), KVTotals(num_shared_blocks=1)],
    )
    await until(lambda: decode.server.engine.load.num_transfers == 2)
    samples = await scrape(decode.server)
    kv: dict[str, Any] = {"connector": "scripted"}
    for name, labels, expected in [
        ("tandem_kv_transfer_blocks_total", {"direction": "load"}, 5),
        ("tandem_kv_transfer_bytes_total", {"direction": "save"}, 3072),
        ("tandem_kv_transfer_seconds_total", {"direction": "load"}, 0.5),
        ("tandem_kv_transfer_failures_total", {"direction": "save", "reason": "store_enospc"}, 2),
        ("tandem_kv_transfer_failures_total", {"direction": "load", "reason": "page_digest"}, 4),
        ("tandem_kv_shared_blocks_total", {}, 7),
        ("tandem_kv_recomputed_blocks_total", {}, 9),
        ("tandem_kv_expired_leases_total", {}, 6),
        ("tandem_kv_leases", {}, 2),
    ]:
        assert value(samples, name, **kv, **labels) == expected, (name, labels)
    assert value(samples, "tandem_kv_shared_blocks_total", connector="#2") == 1  # the same one twice in a list
    blocks = {name: value(samples, "tandem_kv_blocks", **{"class": name}) for name in ("free", "held", "quarantined")}
    assert blocks == {"free": 40, "held": 3, "quarantined": 1}
    assert value(samples, "tandem_engine_requests", state="loading") == 3
    vllm = {"model_name": "demo", "engine": "0"}
    assert value(samples, "vllm:num_requests_waiting", **vllm) == 4
    assert value(samples, "vllm:kv_cache_usage_perc", **vllm) == 16 / 64
    instance = {"instance_id": decode.server.instance_id, "role": "decode", "model": "demo", **kv}
    assert value(samples, "tandem_instance_info", **instance) == 1
    assert value(samples, "tandem_engine_silence_seconds") < 5
    assert any(name == "process_resident_memory_bytes" for name, _ in samples)


async def test_each_stage_of_a_request_is_observed_once(decode: Rig, folder: Path) -> None:
    async with running(folder, ROLES["prefill"]) as prefill:
        call = Decoding(decode)
        await call.start(prefill)
        await decode.core.request()
        decode.core.emit(ReservedEvent("r1", num_cached_tokens=0, num_local_blocks=0))
        await call.next()
        prefill.core.emit(TransferEvent("t1", 2, num_tokens=10))
        decode.core.emit(LoadedEvent("r1", num_external_tokens=10, num_recomputed_blocks=0))
        await call.next()
        await call.seed(72)
        await decode.core.wait_for(Seed)
        decode.core.emit(TokensEvent("r1", [73]), TokensEvent("r1", [74]), TokensEvent("r1", [75], "length"))
        await call.rest()
    samples = await scrape(decode.server)
    for stage in ("reserve", "load", "first_token"):
        assert value(samples, "tandem_request_stage_seconds_count", stage=stage) == 1
        assert value(samples, "tandem_request_stage_seconds_bucket", stage=stage, le="160.0") == 1
        assert 0 < value(samples, "tandem_request_stage_seconds_sum", stage=stage) < 60
    assert value(samples, "tandem_requests_ended_total", reason="length") == 1
    assert value(samples, "tandem_decode_seeded_requests_total") == 1
    assert value(samples, "tandem_decode_loaded_transfers_total") == 1


async def test_a_request_that_did_not_come_so_far_is_not_observed(folder: Path) -> None:
    async with running(folder, ROLES["prefill"], metrics=METRICS) as rig:
        hand_over = prefill_pb2.HandOver(transfer_id="t1", lease_s=2.0)
        call = rig.prefill.Prefill(prefill_pb2.PrefillRequest(request=instance_request(), hand_over=hand_over))
        await call.read()
        call.cancel()
        await until(lambda: rig.server.metrics.num_cancelled)
        samples = await scrape(rig.server)
        assert value(samples, "tandem_request_stage_seconds_count", stage="first_token") == 0
        assert value(samples, "tandem_requests_ended_total", reason="cancelled") == 1
        assert value(samples, "tandem_prefill_given_up_leases_total") == 1


async def test_the_documentation_names_what_is_served_and_nothing_else(folder: Path) -> None:
    served = set()
    for role in ROLES.values():
        async with running(folder, role, metrics=METRICS) as rig:
            totals = KVTotals("nixl", loaded=KVMoved(failures={"missing": 1}), reads=ReadCounters().totals())
            rig.core.emit(kv_totals=[totals])
            await until(lambda: rig.server.engine.load.kv_totals)
            served |= {re.sub("_(bucket|sum|count)$", "", name) for name, _ in await scrape(rig.server)}
    instances, _, _ = DOCS.read_text().partition("## The router")
    table = re.findall(r"^\| `((?:tandem_|vllm:)\w+)` \|", instances, re.MULTILINE)
    assert len(set(table)) == len(table)
    assert set(table) == {name for name in served if not name.startswith("process_")}


async def test_metrics_are_off_unless_asked_for(folder: Path) -> None:
    async with running(folder, ROLES["decode"]) as rig:
        assert rig.server.metrics_server.address is None


@pytest.mark.parametrize("role", ROLES.values(), ids=ROLES)
async def test_a_taken_port_keeps_an_instance_from_starting(folder: Path, role: Role) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        core = ScriptedCore()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = settings_of(folder, metrics=MetricsSettings(listen=listen))
        with pytest.raises(OSError, match=f"cannot serve metrics on {listen}"):
            await InstanceServer.start(settings, role, StopSignals(), engine=core.engine())
        assert core.closed


@pytest.mark.parametrize("listen", ["9090", "host:port", "::1:80", "127.0.0.1:70000"])
def test_a_wrong_address_is_refused(listen: str) -> None:
    with pytest.raises(ValueError, match="must be host:port"):
        MetricsSettings(listen=listen)


async def test_silent_scrapers_are_bounded_and_delay_no_others(decode: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.metrics._Handler.timeout", 60.0)
    assert decode.server.metrics_server.address is not None
    host, port = decode.server.metrics_server.address.split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(7)]
    try:
        assert value(await scrape(decode.server), "tandem_requests_received_total") == 0
        http = decode.server.metrics_server._server
        assert http is not None
        await until(lambda: http._places._value == 1)  # the scrape has left its place
        silent += [socket.create_connection((host, int(port))) for _ in range(2)]
        refused, _, _ = await asyncio.to_thread(select.select, silent, [], [], 30.0)
        assert [one.recv(1) for one in refused] == [b""]  # eight are allowed: one of the nine is closed
    finally:
        for connection in silent:
            connection.close()


async def test_scrapes_that_get_no_thread_keep_no_place(decode: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the limit on processes is reached for a while."""
    assert decode.server.metrics_server.address is not None
    host, port = decode.server.metrics_server.address.split(":")

    def fails(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    def rejected_scrape() -> bytes:
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            return connection.recv(1)

    with monkeypatch.context() as patch:
        patch.setattr("serving.metrics.ThreadingWSGIServer.process_request", fails)
        for _ in range(9):  # eight places
            assert await asyncio.to_thread(rejected_scrape) == b""
    assert value(await scrape(decode.server), "tandem_requests_received_total") == 0


def test_words_of_failures_are_bounded() -> None:
    counter = FailureCounter()
    for index in range(2 * MAX_REASONS):
        counter[f"store_{index}"] += 1
    counter["store_0"] += 1
    counter["x" * 100] += 5
    assert len(counter) == MAX_REASONS + 1
    assert (counter["store_0"], counter[OTHER]) == (2, MAX_REASONS + 5)
    counters = TransferCounters(loaded=MoveCounters(failures=counter))
    assert counters.totals("mine").loaded.failures == dict(counter)


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.1, 0.5, 1.0, 7.0):
        histogram.observe(seconds)
    assert histogram.buckets() == [("0.1", 1), ("1.0", 3), ("+Inf", 4)]
    assert (histogram.count, histogram.sum) == (4, 8.6)
