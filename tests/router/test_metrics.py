"""The router's metrics match its requests and its pools."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos.tandem.v1 import generation_pb2
from router.api.live.state import stages_of
from router.app import RouterApp
from router.metrics import RouterMetrics
from router.picking.disaggregation import Decision, Reason
from router.request.request_log import RequestLog, RequestSummary, TokenGaps
from router.request.validation import ServedModel
from serving.logging import RequestEvent, Timeline
from tests.fakes.behaviour import FULL, WRONG, Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.rig import PROMPT, SHORT, Rig, request_of, settings_of, slow
from tests.waiting import until

METRICS = {"listen": "127.0.0.1:0"}
DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def fetch(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        error.close()
        raise


async def scrape_text(rig: Rig) -> str:
    assert rig.app.metrics_address is not None
    return await asyncio.to_thread(fetch, rig.app.metrics_address)


async def scrape(rig: Rig) -> Samples:
    """Every sample by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(await scrape_text(rig))
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"tandem_router_{name}", frozenset(labels.items())]


async def until_ended(rig: Rig, num_requests: int) -> None:
    """A client sees the end of its call before it is counted."""
    await until(lambda: sum(rig.app.service.metrics.ended.values()) >= num_requests)


async def test_requests_are_counted_by_how_they_ended(run: Run) -> None:
    async with run(metrics=METRICS, prefill=0, decode=[FakeInstance("decode", behaviour=slow())]) as rig:
        await rig.generate(max_tokens=3)
        await rig.generate(max_tokens=2, n=2)
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.generate(request_of([10**6]))
        running = asyncio.create_task(rig.generate(request_id="mine", max_tokens=200))
        await rig.decode[0].until("token", 12)
        await rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["mine"]))
        await running
        call = rig.call(max_tokens=200)
        await anext(aiter(call))
        call.cancel()
        rig.decode[0].behaviour.refuse = WRONG
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.generate()
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.generate(timeout=0.001)
        await until_ended(rig, 6)
        samples = await scrape(rig)
        assert value(samples, "requests_ended_total", outcome="finished") == 2
        assert value(samples, "requests_ended_total", outcome="aborted") == 2
        assert value(samples, "requests_ended_total", outcome="invalid_argument") == 2
        assert value(samples, "requests_received_total") >= 6
        assert value(samples, "output_tokens_total") >= 7
        assert value(samples, "prompt_tokens_total") >= 2 * len(PROMPT)


async def test_what_can_end_a_request_is_exported_before_it_does(run: Run) -> None:
    """Prometheus' rate does not see the first events of a series that begins with them."""
    async with run(metrics=METRICS, prefill=0) as rig:
        samples = await scrape(rig)
        for outcome in ("finished", "aborted", "internal", "unknown", "data_loss", "unavailable", "resource_exhausted"):
            assert value(samples, "requests_ended_total", outcome=outcome) == 0
        for reason in ("queue_full", "no_instance", "late"):
            assert value(samples, "requests_refused_total", reason=reason) == 0
        assert not any("ok" in dict(labels).values() for _, labels in samples)


async def test_a_failure_is_counted_by_its_status(run: Run) -> None:
    async with run(metrics=METRICS, prefill=0) as rig:
        rig.decode[0].behaviour.refuse = FULL
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.generate()
        await until_ended(rig, 1)
        samples = await scrape(rig)
        assert value(samples, "requests_ended_total", outcome="resource_exhausted") == 1


async def test_latencies_are_those_of_the_fakes(run: Run) -> None:
    prefill = [FakeInstance("prefill", behaviour=Behaviour(prefill_s=0.3))]
    decode = [FakeInstance("decode", behaviour=Behaviour(load_s=0.2, token_s=0.02, reserve_s=0.1))]
    async with run(metrics=METRICS, prefill=prefill, decode=decode) as rig:
        started_s = time.monotonic()
        await rig.generate(max_tokens=11)
        await rig.generate(request_of(SHORT, max_tokens=11))
        most_s = time.monotonic() - started_s
        await until_ended(rig, 2)
        samples = await scrape(rig)

        def spent(name: str, **labels: str) -> float:
            assert value(samples, f"{name}_count", **labels) == 1
            assert value(samples, f"{name}_bucket", **labels, le="+Inf") == 1
            assert value(samples, f"{name}_bucket", **labels, le="0.001") == 0
            return value(samples, f"{name}_sum", **labels)

        assert 0.4 <= spent("time_to_first_token_seconds", path="split") < most_s
        assert 0.02 <= spent("time_to_first_token_seconds", path="local") < most_s
        assert 0.02 <= spent("time_per_output_token_seconds", path="local") < most_s
        # An instance may begin a moment before the router marks that it has asked it to.
        assert 0.05 <= spent("stage_seconds", stage="reservation") < most_s
        assert 0.25 <= spent("stage_seconds", stage="prefill") < most_s
        assert 0.15 <= spent("stage_seconds", stage="hand_over") < most_s
        assert value(samples, "stage_seconds_count", stage="whole") == 2
        assert value(samples, "stage_seconds_count", stage="admission") == 2
        assert value(samples, "queue_wait_seconds_count") == 2


async def test_the_time_to_first_token_is_observed_at_the_token_and_once(run: Run) -> None:
    async with run(metrics=METRICS, prefill=0, decode=[FakeInstance("decode", behaviour=slow(0.1))]) as rig:
        running = asyncio.create_task(rig.generate(max_tokens=100, n=2))
        await rig.decode[0].until("token", 6)
        await until(lambda: rig.app.service.metrics.first_token["local"].count > 0)
        samples = await scrape(rig)
        assert value(samples, "time_to_first_token_seconds_count", path="local") == 1
        assert not rig.app.service.metrics.ended
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until_ended(rig, 1)
        samples = await scrape(rig)
        assert value(samples, "time_to_first_token_seconds_count", path="local") == 1
        assert value(samples, "time_without_first_token_seconds_count") == 0


async def test_requests_that_end_without_a_first_token_are_counted_by_how_long_they_lasted(run: Run) -> None:
    """One waits at an instance and one in the queue until their clients give up; one ends as it should."""
    decode = [FakeInstance("decode", behaviour=Behaviour(prefill_s=60.0))]
    async with run(metrics=METRICS, prefill=0, decode=decode, admission={"max_requests": 1}) as rig:
        waiting = asyncio.create_task(rig.generate())
        await rig.decode[0].until("call", 1)
        queued = asyncio.create_task(rig.generate())
        await until(lambda: rig.app.admission.num_queued == 1)
        await asyncio.sleep(0.3)
        for task in (queued, waiting):
            task.cancel()
        await asyncio.gather(queued, waiting, return_exceptions=True)
        await until_ended(rig, 2)
        rig.decode[0].behaviour.prefill_s = 0.0
        await rig.generate(max_tokens=3)
        await until_ended(rig, 3)
        samples = await scrape(rig)
        assert value(samples, "time_to_first_token_seconds_count", path="local") == 1
        assert value(samples, "time_without_first_token_seconds_count") == 2
        assert value(samples, "time_without_first_token_seconds_bucket", le="0.25") == 0


async def test_decisions_and_failovers_are_counted(run: Run) -> None:
    decode = [
        FakeInstance("decode", "decode-0", behaviour=Behaviour(die_at=5)),
        FakeInstance("decode", "decode-1", behaviour=Behaviour(num_running=9)),
    ]
    prefill = [
        FakeInstance("prefill", "prefill-0", behaviour=Behaviour(refuse=FULL)),
        FakeInstance("prefill", "prefill-1", behaviour=Behaviour(num_running=9)),
    ]
    async with run(metrics=METRICS, prefill=prefill, decode=decode, disaggregation={"mode": "always"}) as rig:
        assert (await rig.generate(max_tokens=20)).is_exactly(20)
        await until_ended(rig, 1)
        samples = await scrape(rig)
        assert value(samples, "failovers_total", kind="retried") == 1
        assert value(samples, "failovers_total", kind="resumed") == 1
        assert value(samples, "disaggregation_decisions_total", decision="disaggregate", reason="on") == 3


@pytest.mark.parametrize("fault", [{"die_at": 5}, {"refuse": FULL}], ids=["resumed", "retried"])
async def test_a_failover_that_finds_no_instance_is_not_counted(
    run: Run, caplog: pytest.LogCaptureFixture, fault: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO)
    decode = [FakeInstance("decode", behaviour=Behaviour(**fault))]
    async with run(metrics=METRICS, prefill=0, decode=decode, failover={"resume_wait_s": 0.1}) as rig:
        log = rig.app.service.metrics.log = RequestLog()
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.generate(max_tokens=20)
        await until_ended(rig, 1)
        samples = await scrape(rig)
        assert [value(samples, "failovers_total", kind=kind) for kind in ("retried", "resumed")] == [0, 0]
        (ended,) = (record for record in caplog.records if record.__dict__.get("event") == "failed")
        assert ended.__dict__["fields"]["num_resumptions"] == 0
        if "die_at" in fault:
            assert stages_of(log.ended[0])[-1][0] == "pick", "the live page shows the wait for an instance"


async def test_the_prefill_of_an_attempt_that_died_does_not_count_for_the_next_one(run: Run) -> None:
    dies = FakeInstance("prefill", behaviour=Behaviour(die_at=0))
    async with run(prefill=[dies]) as rig:
        assert (await rig.generate()).is_exactly(12)
        await until_ended(rig, 1)
        assert dies.recorded("died")
        stages = rig.app.service.metrics.stages
        assert (stages["prefill"].count, stages["reservation"].count, stages["whole"].count) == (0, 1, 1)


async def test_the_pools_are_reported_as_the_router_sees_them(run: Run) -> None:
    loaded = Behaviour(num_waiting=2, num_running=3, num_waiting_tokens=500, num_without_room=1)
    decode = [FakeInstance("decode", "decode-0", behaviour=loaded), FakeInstance("decode", "decode-1")]
    measured = {"speed_smoothing": 0.5}
    async with run(metrics=METRICS, decode=decode, disaggregation=measured) as rig:
        await rig.generate(request_of())
        decode[0].behaviour.draining = True
        await decode[1].kill()
        await rig.until_ready(num_decode=0)
        samples = await scrape(rig)
        assert value(samples, "instances", role="prefill", state="ready") == 1
        assert value(samples, "instances", role="decode", state="ready") == 0
        assert value(samples, "instances", role="decode", state="draining") == 1
        assert value(samples, "instances", role="decode", state="lost") == 1
        whose = {"role": "decode", "instance": "decode-0"}
        assert value(samples, "instance_requests", **whose, state="waiting") == 2
        assert value(samples, "instance_requests", **whose, state="running") == 3
        assert value(samples, "instance_waiting_tokens", **whose) == 500
        assert value(samples, "instance_requests_without_room", **whose) == 1
        assert 0 <= value(samples, "instance_beat_age_seconds", **whose) < 20
        assert value(samples, "instance_tokens_per_second", role="prefill", instance="prefill-0", kind="prefill") > 0
        assert value(samples, "instance_tokens_per_second", role="decode", instance="decode-1", kind="hand_over") > 0


async def test_instances_that_share_a_name_have_series_of_their_own(run: Run) -> None:
    decode = [FakeInstance("decode", "same"), FakeInstance("decode", "same")]
    decode[1]._num_starts = 1  # another epoch: two processes, not one at two addresses
    async with run(metrics=METRICS, prefill=0, decode=decode, wait=False) as rig:
        await until(lambda: [one.name for one in rig.app.pools.decode.instances] == ["same", "same"])
        families = text_string_to_metric_families(await scrape_text(rig))
    ages = [one for family in families for one in family.samples if one.name.endswith("instance_beat_age_seconds")]
    assert {one.labels["instance"] for one in ages} == {fake.address for fake in decode}


async def test_current_requests_are_reported(run: Run) -> None:
    async with run(metrics=METRICS, prefill=0, decode=[FakeInstance("decode", behaviour=slow(0.1))]) as rig:
        running = [asyncio.create_task(rig.generate(max_tokens=30)) for _ in range(3)]
        await rig.decode[0].until("token", 3)
        samples = await scrape(rig)
        assert value(samples, "requests", state="in_flight") == 3
        assert value(samples, "requests", state="queued") == 0
        assert value(samples, "tokens", state="in_flight") > 300
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await rig.until_idle(20)


async def test_a_resumption_is_no_retry_and_tokens_are_counted_by_their_kind(run: Run) -> None:
    decode = [
        FakeInstance("decode", "decode-0", behaviour=Behaviour(die_at=5)),
        FakeInstance("decode", "decode-1", behaviour=Behaviour(num_running=9)),
    ]
    decode[1:1] = [FakeInstance("decode", "decode-2", behaviour=Behaviour(die_at=9, num_running=5))]
    async with run(metrics=METRICS, prefill=0, decode=decode) as rig:
        assert (await rig.generate(max_tokens=20)).is_exactly(20)
        await until_ended(rig, 1)
        samples = await scrape(rig)
        assert [value(samples, "failovers_total", kind=kind) for kind in ("retried", "resumed")] == [0, 2]
        assert value(samples, "prompt_tokens_total") == len(PROMPT)
        assert value(samples, "output_tokens_total") == 20


async def test_a_resumption_counts_before_its_answer_has_ended(run: Run) -> None:
    decode = [
        FakeInstance("decode", "decode-0", behaviour=Behaviour(die_at=5)),
        FakeInstance("decode", "decode-1", behaviour=Behaviour(num_running=9, permits=asyncio.Semaphore(0))),
    ]
    async with run(metrics=METRICS, prefill=0, decode=decode) as rig:
        running = asyncio.create_task(rig.generate(max_tokens=20))
        await decode[1].until("decode")
        samples = await scrape(rig)
        assert value(samples, "failovers_total", kind="resumed") == 1
        assert value(samples, "failovers_under_way") == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until_ended(rig, 1)
        assert value(await scrape(rig), "failovers_total", kind="resumed") == 1


async def test_an_instance_that_was_never_reached_has_no_age_of_a_report(run: Run) -> None:
    """Infinite, it would be above every threshold and off every axis while an instance starts."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        async with run(metrics=METRICS, prefill=0, pools={"prefill": address}) as rig:
            await until(lambda: len(rig.app.pools.prefill.instances) == 1)
            samples = await scrape(rig)
            assert value(samples, "instances", role="prefill", state="connecting") == 1
            ages = [labels for name, labels in samples if name.endswith("instance_beat_age_seconds")]
            assert [dict(labels)["role"] for labels in ages] == ["decode"]


async def test_what_waits_is_reported_by_requests_tokens_and_tenants(run: Run) -> None:
    permits = asyncio.Semaphore(0)
    behaviour = Behaviour(permits=permits, load_age_s=1000.0)  # reports are older than the request
    decode = [FakeInstance("decode", "decode-0", behaviour=behaviour)]
    admission = {"max_requests": 1, "tenant_key": "x-tenant", "yield_after_s": 1000.0}
    async with run(metrics=METRICS, prefill=0, decode=decode, admission=admission) as rig:
        running = asyncio.create_task(rig.generate(max_tokens=10))
        await decode[0].until("decode")
        calls = [
            rig.stub.Generate(request_of(max_tokens=7), timeout=20, metadata=(("x-tenant", tenant),))
            for tenant in ("alice", "alice", "bob")
        ]
        await until(lambda: rig.app.admission.num_queued == 3)
        samples = await scrape(rig)
        assert value(samples, "requests", state="queued") == 3
        assert value(samples, "tokens", state="queued") == 3 * (len(PROMPT) + 7)
        assert value(samples, "waiting_tenants") == 2
        whose = {"role": "decode", "instance": "decode-0"}
        assert value(samples, "instance_requests", **whose, state="unreported") == 1
        for call in calls:
            call.cancel()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_requests_that_wait_for_the_first_instance_are_reported_as_queued(run: Run) -> None:
    async with run(metrics=METRICS, prefill=0, decode=0, admission={"instance_wait_s": 60.0}) as rig:
        waiting = asyncio.create_task(rig.generate())
        await until(lambda: rig.app.admission.num_held == 1)
        assert value(await scrape(rig), "requests", state="queued") == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_what_was_ejected_paused_rejected_and_resumed_is_reported(run: Run) -> None:
    async with run(metrics=METRICS, prefill=0, decode=2) as rig:
        key = rig.app.pools.decode.instances[0].key
        assert key is not None
        rig.app.safeguards.outliers["decode"].crashed(key, rig.app.pools.decode.views())
        rig.app.admission.num_paused = 3
        rig.app.safeguards.poison._rejected_until_s[b"digest"] = math.inf
        permits = [rig.app.safeguards.budget.resume() for _ in range(2)]
        samples = await scrape(rig)
        assert value(samples, "instances", role="decode", state="ejected") == 1
        assert value(samples, "instances", role="decode", state="ready") == 1
        assert value(samples, "instances", role="prefill", state="ejected") == 0
        assert value(samples, "streams_paused_total") == 3
        assert value(samples, "quarantined_requests") == 1
        assert value(samples, "failovers_under_way") == 2
        for permit in permits:
            permit.close()


async def test_the_document_names_every_metric_and_no_other(run: Run) -> None:
    async with run(metrics=METRICS, disaggregation={"speed_smoothing": 0.5}) as rig:
        await rig.generate()
        rig.decode[0].behaviour.refuse = FULL
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.generate()
        await until_ended(rig, 2)
        text = await scrape_text(rig)
    served = {
        family.name + ("_total" if family.type == "counter" else "_info" if family.type == "info" else "")
        for family in text_string_to_metric_families(text)
    }
    table = re.findall(r"^\| `(tandem_router\w*)` \|", DOCS.read_text(), re.MULTILINE)
    assert len(set(table)) == len(table)
    assert set(table) == {name for name in served if name.startswith("tandem_")}


async def test_labels_are_few(run: Run) -> None:
    """Whatever clients send, no label comes of it."""
    async with run(metrics=METRICS) as rig:
        await rig.generate(request_of(request_id="conspicuous"), timeout=20)
        await until_ended(rig, 1)
        text = await scrape_text(rig)
    assert "conspicuous" not in text
    served = len(set(Decision) - {Decision.REFUSE})
    assert served * len(Reason) + 1 <= 30, "a refusal has one reason"


async def test_metrics_are_off_unless_asked_for(run: Run) -> None:
    async with run() as rig:
        assert rig.app.metrics_address is None


async def test_a_taken_port_keeps_a_router_from_starting(model: ServedModel, model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        app = RouterApp(settings_of(model_folder, [], [], metrics={"listen": listen}), model)
        with pytest.raises(OSError, match=f"cannot serve metrics on {listen}"):
            await app.start()
        await app.stop()


async def test_a_router_whose_event_loop_is_blocked_reports_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("router.metrics._LOOP_TIMEOUT_S", 0.1)
    with ThreadPoolExecutor(1) as threads:
        async with run(metrics=METRICS) as rig:
            assert rig.app.metrics_address is not None
            scraping = threads.submit(fetch, rig.app.metrics_address)
            with pytest.raises(urllib.error.HTTPError):
                scraping.result()  # blocks the event loop
    [failed] = [record for record in caplog.records if "scrape" in record.getMessage()]
    assert failed.getMessage().endswith("TimeoutError: the event loop has not answered for 0.1 s")
    assert (failed.exc_info or None, capsys.readouterr().err) == (None, "")


def test_a_token_costs_the_metrics_nothing() -> None:
    """They count requests and decisions, and nothing in between."""
    methods = {
        name for name in vars(RouterMetrics) if not name.startswith("_") and callable(getattr(RouterMetrics, name))
    }
    assert methods == {"decided", "picked", "request_ended"}


def test_one_token_has_no_gap() -> None:
    metrics, timeline = RouterMetrics(), Timeline()
    for at_s, event in enumerate((RequestEvent.RECEIVED, RequestEvent.FIRST_TOKEN, RequestEvent.FINISHED)):
        timeline.mark(event, float(at_s))
    one = RequestSummary(1, "label", tuple(timeline.marks), num_tokens=1, outcome="finished")
    metrics.request_ended(one, timeline, "local")
    assert metrics.output_token["local"].count == 0
    metrics.request_ended(replace(one, num_tokens=22, gaps=TokenGaps(2.0, 20)), timeline, "local")
    assert metrics.output_token["local"].sum == pytest.approx(0.1)  # eleven tokens each, ten gaps, one second
