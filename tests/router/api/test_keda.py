"""KEDA's external scaler: a client of its proto sizes the pools, down to none, with requests that wait meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.externalscaler import externalscaler_pb2 as keda
from protos.externalscaler import externalscaler_pb2_grpc as keda_grpc
from protos.tandem.v1 import generation_pb2
from router.app import RouterApp
from router.request.validation import ServedModel
from serving.channel import open_channel
from tandem.client.health import READY, health
from tests.channels import PATIENT
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.autoscaler.test_router_signals import second_router
from tests.router.conftest import Run
from tests.router.rig import TIMEOUT_S, Rig, request_of, slow
from tests.router.rig import settings_of as router_settings
from tests.waiting import until

ACTIVE_S = 0.3
SIGNALS = {"listen": "127.0.0.1:0", "interval_s": 0.05, "active_s": ACTIVE_S}
WARM = {"prefill": {"warm_up_s": 0.0}, "decode": {"warm_up_s": 0.0}}
WAITING = {"instance_wait_s": 60.0}
POOLS = ("prefill", "decode")


def reference(pool: str) -> keda.ScaledObjectRef:
    return keda.ScaledObjectRef(name=f"tandem-{pool}", namespace="llm", scalerMetadata={"pool": pool})


class Keda:
    """KEDA's side of one router's scaler."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = keda_grpc.ExternalScalerStub(channel)

    async def is_active(self, pool: str = "decode") -> bool:
        return (await self._stub.IsActive(reference(pool), timeout=TIMEOUT_S)).result

    async def wanted(self, pool: str = "decode") -> float:
        """Instances, as an HPA computes them of the metric."""
        [spec] = (await self._stub.GetMetricSpec(reference(pool), timeout=TIMEOUT_S)).metricSpecs
        request = keda.GetMetricsRequest(scaledObjectRef=reference(pool), metricName=spec.metricName)
        [value] = (await self._stub.GetMetrics(request, timeout=TIMEOUT_S)).metricValues
        assert value.metricName == spec.metricName == f"tandem-{pool}-instances"
        assert value.metricValue / spec.targetSize == value.metricValueFloat / spec.targetSizeFloat
        return value.metricValueFloat / spec.targetSizeFloat

    async def pushed(self, pool: str = "decode") -> AsyncIterator[bool]:
        async for message in self._stub.StreamIsActive(reference(pool)):
            yield message.result

    async def until_wanted(self, size: int) -> None:
        """After a stall a router may be silent for a moment."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                with suppress(grpc.aio.AioRpcError):
                    if await self.wanted() == size:
                        return
                await asyncio.sleep(0.01)

    async def refusal(self, pool: str, metric: str) -> grpc.aio.AioRpcError:
        request = keda.GetMetricsRequest(scaledObjectRef=reference(pool), metricName=metric)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self._stub.GetMetrics(request, timeout=TIMEOUT_S)
        return refused.value


@asynccontextmanager
async def scaler_of(app: Any) -> AsyncIterator[Keda]:
    async with open_channel(app.signals_address, PATIENT) as channel:
        yield Keda(channel)


@asynccontextmanager
async def asleep(run: Run, **admission: Any) -> AsyncIterator[tuple[Rig, Keda, FakeInstance]]:
    """A router whose only decode instance has not started yet."""
    async with FakeInstance("decode", "decode-0", behaviour=Behaviour(slots=10)) as decode:
        await decode.kill()
        sections: dict[str, Any] = {"signals": SIGNALS, "autoscaler": WARM, "admission": {**WAITING, **admission}}
        async with (
            run(decode=[], pools={"decode": decode.address}, **sections) as rig,
            scaler_of(rig.app) as scaler,
        ):
            yield rig, scaler, decode


def fake(role: Any, index: int, **load: Any) -> FakeInstance:
    return FakeInstance(role, f"{role}-{index}", behaviour=Behaviour(slots=10, **load))


async def test_the_metric_is_the_number_of_instances_that_the_load_needs(run: Run) -> None:
    prefill = [fake("prefill", 0)]
    decode = [fake("decode", 0, num_waiting=8), fake("decode", 1, num_running=5)]
    async with (
        run(prefill=prefill, decode=decode, signals=SIGNALS, autoscaler=WARM) as rig,
        scaler_of(rig.app) as scaler,
    ):
        assert await scaler.wanted("decode") == 5  # (4*8 + 5) / 10 / 0.75
        assert await scaler.wanted("prefill") == 1
        decode[0].behaviour.num_waiting = 0
        async with asyncio.timeout(20):
            while await scaler.wanted("decode") != 1:
                await asyncio.sleep(0.01)


async def test_the_bounds_of_both_pools_together_hold(run: Run) -> None:
    busy = [fake("decode", 0, num_waiting=9)]
    autoscaler = {**WARM, "max_instances": 3}
    async with (
        run(prefill=[fake("prefill", 0)], decode=busy, signals=SIGNALS, autoscaler=autoscaler) as rig,
        scaler_of(rig.app) as scaler,
    ):
        assert (await scaler.wanted("prefill"), await scaler.wanted("decode")) == (1, 2)


async def test_without_valid_data_there_is_no_metric_and_the_size_stays(run: Run) -> None:
    async with run(signals=SIGNALS) as rig, scaler_of(rig.app) as scaler:  # instances that are still cold
        refused = await scaler.refusal("decode", "tandem-decode-instances")
        assert refused.code() == grpc.StatusCode.UNAVAILABLE
        assert "should stay" in str(refused.details())


async def test_before_any_instance_counts_a_load_beyond_all_of_them_makes_the_pool_grow(run: Run) -> None:
    busy = fake("decode", 0, num_waiting=8)
    autoscaler = {"decode": {"warm_up_s": 0.0, "min_ready_s": 3600.0}}
    async with run(decode=[busy], signals=SIGNALS, autoscaler=autoscaler) as rig, scaler_of(rig.app) as scaler:
        await scaler.until_wanted(5)  # 4*8 / 10 / 0.75
        busy.behaviour.num_waiting = 0
        await until(lambda: all(view.load.num_waiting == 0 for view in rig.app.pools.decode.views()))
        refused = await scaler.refusal("decode", "tandem-decode-instances")
        assert refused.code() == grpc.StatusCode.UNAVAILABLE
        assert "no warm instance has been ready for 3600 s" in str(refused.details())


@asynccontextmanager
async def with_a_starting_pod(
    rig: Rig, model: ServedModel, folder: Path, **signals: Any
) -> AsyncIterator[tuple[RouterApp, Keda]]:
    """A second router of the same instances, which knows the address of one decode instance more."""
    async with FakeInstance("decode", "decode-new") as new:
        await new.kill()
        pools = {"decode": ",".join(fake.address for fake in [*rig.decode, new])}
        sections: dict[str, Any] = {"pools": pools, "signals": {**SIGNALS, **signals}, "autoscaler": WARM}
        app = RouterApp(router_settings(folder, rig.prefill, [], **sections), model)
        await app.start()
        try:
            await until(lambda: app.pools.decode.num_ready() == len(rig.decode))
            async with scaler_of(app) as scaler:
                yield app, scaler
        finally:
            await app.stop()
            await new.restart()


async def test_an_instance_that_starts_is_not_demanded_by_itself(
    run: Run, model: ServedModel, model_folder: Path
) -> None:
    """It may be one that a rollout has added for a time."""
    busy = fake("decode", 0, num_running=7)  # one instance is wanted, and two are enough
    async with (
        run(decode=[busy], signals=SIGNALS) as rig,
        with_a_starting_pod(rig, model, model_folder) as (app, scaler),
    ):
        assert len(app.pools.decode.processes) == 2
        assert await scaler.wanted() == 1
        busy.behaviour.num_running = 9
        async with asyncio.timeout(20):
            while await scaler.wanted() != 2:
                await asyncio.sleep(0.01)


async def test_while_a_router_is_silent_the_size_stays_unless_growth_is_demanded(
    run: Run, model: ServedModel, model_folder: Path
) -> None:
    busy = [fake("decode", 0, num_running=1), fake("decode", 1)]
    async with (
        run(decode=busy, signals=SIGNALS) as rig,
        with_a_starting_pod(rig, model, model_folder, routers=rig.app.signals_address) as (app, scaler),
    ):
        await until(app.peers.signals)
        await scaler.until_wanted(1)
        await rig.app.stop()
        await until(lambda: app.peers.num_silent)
        refused = await scaler.refusal("decode", "tandem-decode-instances")
        assert refused.code() == grpc.StatusCode.UNAVAILABLE
        assert "the size of the decode pool should stay: 1 routers do not answer" in str(refused.details())
        busy[0].behaviour.num_waiting = 7  # (4*7 + 1) / 10 / 0.75
        await until(lambda: any(view.load.num_waiting == 7 for view in app.pools.decode.views()))
        assert await scaler.wanted() == 4


async def test_while_an_instance_is_lost_the_size_stays(run: Run) -> None:
    decode = [fake("decode", 0, num_running=1), fake("decode", 1)]
    async with run(decode=decode, signals=SIGNALS, autoscaler=WARM) as rig, scaler_of(rig.app) as scaler:
        await decode[1].kill()
        await until(lambda: rig.app.pools.decode.num_ready() == 1)
        refused = await scaler.refusal("decode", "tandem-decode-instances")
        assert "1 instances are silent" in str(refused.details())


@pytest.mark.parametrize(("pool", "metric"), [("decod", "tandem-decode-instances"), ("decode", "s0-tandem"), ("", "")])
async def test_a_trigger_without_a_pool_or_with_another_metric_is_rejected(run: Run, pool: str, metric: str) -> None:
    async with run(signals=SIGNALS) as rig, scaler_of(rig.app) as scaler:
        assert (await scaler.refusal(pool, metric)).code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_makes_the_pools_active_and_some_time_after_it_they_are_not(run: Run) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.02))
    async with run(decode=[decode], signals=SIGNALS) as rig, scaler_of(rig.app) as scaler:
        async with asyncio.timeout(30):
            pushed = scaler.pushed()
            assert await anext(pushed) is False
            assert not await scaler.is_active("prefill")
            asking = asyncio.create_task(rig.generate(max_tokens=20))
            assert await anext(pushed) is True
            await asking
            assert await anext(pushed) is False
            assert not await scaler.is_active()


async def test_a_stream_ends_while_the_router_drains(run: Run) -> None:
    """So that KEDA asks another router meanwhile."""
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run(decode=[decode], signals=SIGNALS) as rig, scaler_of(rig.app) as scaler:
        pushed = scaler.pushed()
        await anext(pushed)
        asking = asyncio.create_task(rig.generate(max_tokens=20))
        assert await anext(pushed) is True
        draining = asyncio.create_task(rig.app.drain())
        async with asyncio.timeout(20):
            assert [one async for one in pushed] == []
        assert not draining.done()
        await asking
        await draining


async def test_another_routers_requests_count_and_a_silent_router_may_have_some(
    run: Run, model: ServedModel, model_folder: Path
) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05))
    async with run(decode=[decode], signals=SIGNALS) as rig, second_router(rig, model, model_folder) as second:
        await until(second.peers.signals)
        async with scaler_of(second) as scaler:
            async with asyncio.timeout(20):
                while await scaler.is_active():  # a pause of this process makes the other router silent
                    await asyncio.sleep(0.05)
            asking = asyncio.create_task(rig.generate(max_tokens=20))
            async with asyncio.timeout(20):
                async for is_active in scaler.pushed():
                    if is_active:
                        break
            await asking
            await rig.app.stop()
            await until(lambda: second.peers.num_silent)
            assert await scaler.is_active()


# From zero


async def test_requests_wait_for_the_first_instance_and_none_is_lost(run: Run) -> None:
    async with asleep(run) as (rig, scaler, decode):
        pushed = scaler.pushed()
        assert await anext(pushed) is False
        asking = [asyncio.create_task(rig.generate(max_tokens=6, seed=seed)) for seed in range(4)]
        async with asyncio.timeout(20):
            assert await anext(pushed) is True
            while rig.app.admission.num_held < len(asking):
                await asyncio.sleep(0.01)
        await decode.restart()
        for seed, answer in enumerate(await asyncio.gather(*asking)):
            assert answer.is_exactly(6, seed=seed)
        assert rig.app.admission.num_held == 0


async def test_a_router_of_an_empty_pool_is_ready_if_requests_may_wait(run: Run) -> None:
    service = "tandem.v1.GenerationService"
    async with asleep(run) as (rig, _, _):
        async with asyncio.timeout(20):
            while await asyncio.to_thread(health, rig.app.address, service) != READY:
                await asyncio.sleep(0.05)


async def test_no_more_wait_than_may(run: Run) -> None:
    async with asleep(run, max_queued=1) as (rig, _, decode):
        first = asyncio.create_task(rig.generate(max_tokens=6))
        await until(lambda: rig.app.admission.num_held)
        hints_ms = set[int]()
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rig.generate(max_tokens=6)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "wait already for the first decode instance" in str(refused.value.details())
            hints_ms.add(int(dict(tuple(refused.value.trailing_metadata() or ()))["grpc-retry-pushback-ms"]))
        longest_ms = 1000 * rig.app.admission.settings.max_retry_after_s
        assert all(longest_ms <= hint_ms <= 1.5 * longest_ms for hint_ms in hints_ms)
        assert len(hints_ms) > 1, "they come back together"
        await decode.restart()
        assert (await first).is_exactly(6)


async def test_the_wait_ends(run: Run) -> None:
    async with asleep(run, instance_wait_s=0.2) as (rig, _, decode):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.generate(max_tokens=6)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert rig.app.admission.num_rejected["no_instance"] == 1
        assert rig.app.admission.num_held == 0
        await decode.restart()
        await rig.until_ready(num_decode=1)


async def test_the_wait_counts_towards_the_deadline(run: Run) -> None:
    async with asleep(run) as (rig, _, decode):
        handler = rig.app.service.handler()

        async def sink(message: generation_pb2.GenerateResponse) -> None:
            pass

        asking = asyncio.create_task(handler.handle(request_of(), sink, metadata=None, remaining_s=30.0))
        await until(lambda: rig.app.admission.num_held)
        held_s = time.monotonic()
        await asyncio.sleep(0.2)
        await decode.restart()
        await asking
        assert (handler.request.deadline_s or 0.0) <= held_s + 30.0


async def test_a_client_that_goes_waits_no_longer(run: Run) -> None:
    async with asleep(run) as (rig, _, decode):
        call = rig.call(max_tokens=6)
        reading = asyncio.create_task(call.read())
        await until(lambda: rig.app.admission.num_held)
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: not rig.app.admission.num_held)
        await decode.restart()
        await rig.until_ready(num_decode=1)


async def test_an_abort_ends_the_wait_of_its_own_request_alone(run: Run) -> None:
    async with asleep(run) as (rig, _, decode):
        mine, other, unnamed = (
            asyncio.create_task(rig.generate(request_id=label, max_tokens=6)) for label in ("mine", "other", "")
        )
        await until(lambda: rig.app.admission.num_held == 3)
        answer = await rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["mine", ""]))
        assert answer.num_aborted == 1
        with pytest.raises(grpc.aio.AioRpcError, match="aborted before it was validated") as aborted:
            await mine
        assert aborted.value.code() == grpc.StatusCode.ABORTED
        assert rig.app.service.metrics.ended == {"aborted": 1}
        assert rig.app.admission.num_held == 2
        await decode.restart()
        for running in (other, unnamed):
            assert (await running).is_exactly(6)
        assert rig.app.service.abort_registry.num_requests == 0
