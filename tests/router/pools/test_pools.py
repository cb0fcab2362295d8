"""The pools follow their instances: which are in, which are out, and readiness."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.tandem.v1 import common_pb2, generation_pb2
from router.app import RouterApp
from router.autoscaler.observation import counts_of, samples_of
from router.autoscaler.settings import DecodePolicy
from router.pools.instance import UpstreamInstance
from router.pools.settings import PoolSettings
from serving.settings import parse_address
from tests.fakes.behaviour import FULL, Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.failing import status_of
from tests.router.rig import PROMPT, Rig, request_of, slow
from tests.waiting import Stopwatch, until

SERVICE = "tandem.v1.GenerationService"


async def health(rig: Rig, service: str = SERVICE) -> str:
    request = health_pb2.HealthCheckRequest(service=service)
    response = await health_pb2_grpc.HealthStub(rig.channel).Check(request)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def until_health(rig: Rig, wanted: str, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while await health(rig) != wanted:
            await asyncio.sleep(0.01)


async def spread_of_a_burst(rig: Rig, fakes: list[FakeInstance], role: str, num_requests: int) -> list[int]:
    """The requests that each of the instances got, of a burst in which none ends."""
    calls = [rig.call(max_tokens=10) for _ in range(num_requests)]
    await until(lambda: sum(len(fake.recorded(role)) for fake in fakes) >= num_requests)
    for call in calls:
        call.cancel()
    return [len(fake.recorded(role)) for fake in fakes]


async def test_a_burst_between_two_reports_is_spread(run: Run) -> None:
    fakes = [FakeInstance("decode", f"decode-{i}", behaviour=slow(60.0), beat_s=0.4) for i in range(4)]
    async with run(prefill=0, decode=fakes, pools={"beat_timeout_s": 5.0}) as rig:
        assert await spread_of_a_burst(rig, fakes, "decode", 20) == [5, 5, 5, 5]


async def test_a_burst_is_spread_over_the_prefill_instances_as_well(run: Run) -> None:
    fakes = [FakeInstance("prefill", f"prefill-{i}", behaviour=Behaviour(prefill_s=60), beat_s=0.4) for i in range(3)]
    async with run(prefill=fakes, decode=1, pools={"beat_timeout_s": 5.0}) as rig:
        assert await spread_of_a_burst(rig, fakes, "prefill", 12) == [4, 4, 4]


async def test_reported_load_steers(run: Run) -> None:
    fakes = [FakeInstance("decode", "a", behaviour=Behaviour(num_waiting=5)), FakeInstance("decode", "b")]
    async with run(prefill=0, decode=fakes) as rig:
        answers = [await rig.generate() for _ in range(8)]
        assert Counter(answer.trailers["tandem-decode"] for answer in answers) == {"b": 8}


async def test_a_draining_instance_gets_no_new_requests_and_finishes_its_old(run: Run) -> None:
    fakes = [FakeInstance("decode", f"decode-{i}", behaviour=slow()) for i in range(2)]
    async with run(prefill=0, decode=fakes) as rig:
        running = [asyncio.create_task(rig.generate(max_tokens=25)) for _ in range(2)]
        await fakes[0].until("token")
        fakes[0].behaviour.draining = True
        await rig.until_ready(num_decode=1)
        assert [(await rig.generate(max_tokens=2)).trailers["tandem-decode"] for _ in range(3)] == ["decode-1"] * 3
        assert all(answer.is_exactly(25) for answer in await asyncio.gather(*running))
        assert not fakes[0].recorded("decode cancelled")


@pytest.mark.parametrize("fault", ["no beats", "frozen", "killed", "wedged"])
async def test_an_instance_in_trouble_is_out_and_comes_back(run: Run, fault: str) -> None:
    async with run(prefill=0, decode=2, pools={"beat_timeout_s": 0.5}) as rig:
        fake = rig.decode[0]
        if fault == "no beats":
            fake.behaviour.beats = False
        elif fault == "frozen":
            fake.freeze()
        elif fault == "killed":
            await fake.kill()
        else:
            fake.behaviour.core_silence_s = 30
        await rig.until_ready(num_decode=1)
        if fault == "no beats":
            await until(lambda: fake.num_watches >= 2)  # it is asked anew, and does not come back by an old report
        assert (await rig.generate()).trailers["tandem-decode"] == "decode-1"
        fake.behaviour.beats, fake.behaviour.core_silence_s = True, 0.0
        fake.thaw()
        if fault == "killed":
            await fake.restart()
        await rig.until_ready()


async def test_a_silent_instance_may_go_on_but_not_one_that_leaves_or_has_ended(run: Run) -> None:
    async with run(prefill=0, decode=1, pools={"beat_timeout_s": 0.5}) as rig:
        fake, [instance] = rig.decode[0], rig.app.pools.decode.instances
        assert not instance.may_go_on(60)
        fake.freeze()
        await rig.until_ready(num_decode=0)
        assert instance.out in ("no load report for 0.5 s", "nothing answers at its address")
        assert instance.may_go_on(60)
        assert not instance.may_go_on(0)
        instance.set_leaving(True)
        assert not instance.may_go_on(60)
        instance.set_leaving(False)
        await fake.kill()
        await until(lambda: not instance.may_go_on(60))
        fake.thaw()
        await fake.restart()
        await rig.until_ready()


class SilentWithReport:
    """A load stream whose next report arrives in the same turn of the event loop in which the silence is noticed."""

    def __init__(self, instance: UpstreamInstance) -> None:
        self._instance, self._reports = instance, instance._reports
        self.cancel = self._reports.cancel

    async def read(self) -> Any:
        message = await self._reports.read()
        self._instance._failure_detector.on_silent()
        return message


async def test_an_instance_is_watched_on_where_a_report_comes_as_its_silence_is_noticed(run: Run) -> None:
    async with run(prefill=0, decode=1, pools={"beat_timeout_s": 30.0}) as rig:
        fake, [instance] = rig.decode[0], rig.app.pools.decode.instances
        instance._reports = SilentWithReport(instance)
        await until(lambda: fake.num_watches == 2)
        await rig.until_ready()
        fake.behaviour.draining = True
        await until(lambda: instance.state == "draining")


async def test_a_router_asks_for_more_reports_than_it_needs(run: Run) -> None:
    async with run(prefill=0, decode=1, pools={"beat_timeout_s": 8.0}) as rig:
        assert rig.decode[0].max_interval_s == 2.0


# The issue's own figures: 2 s from the last beat, or from the core's last sign. What is above is what the machine adds.
LINE_S, MACHINE_S = 2.0, 1.5


@pytest.mark.parametrize("fault", ["frozen", "no beats", "wedged"])
async def test_with_its_real_settings_a_router_leaves_a_silent_instance_within_two_seconds(
    run: Run, fault: str
) -> None:
    real = PoolSettings().model_dump(include={"beat_timeout_s", "core_silence_timeout_s"})
    fakes = [
        FakeInstance("decode", "decode-0", behaviour=Behaviour(token_s=0.02), beat_s=0.25),
        FakeInstance("decode", "decode-1", behaviour=Behaviour(num_running=9), beat_s=0.25),
    ]
    async with run(prefill=0, decode=fakes, pools=real) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=120))
        await fakes[0].until("token", 5)
        instance, age_s = rig.app.pools.decode.instances[0], 0.0
        await until(lambda: instance.report_age_s < 0.1)  # so that no stall is part of its age
        if fault == "wedged":
            fakes[0].behaviour.token_s = 1000.0  # the engine computes no more, and its front goes on reporting it
            silence = asyncio.create_task(_growing_silence(fakes[0], time.monotonic()))
        else:
            fakes[0].behaviour.beats = False
            if fault == "frozen":
                fakes[0].freeze()
            age_s = instance.report_age_s
        watch = Stopwatch()
        await rig.until_ready(num_decode=1)
        assert age_s + watch.s < LINE_S + MACHINE_S
        if fault != "no beats":  # those still compute
            await fakes[1].until("token")
            assert age_s + watch.s < LINE_S + MACHINE_S
        assert (await asking).is_exactly(120)
        if fault == "wedged":
            silence.cancel()


async def _growing_silence(fake: FakeInstance, since_s: float) -> None:
    while True:
        fake.behaviour.core_silence_s = time.monotonic() - since_s
        await asyncio.sleep(0.05)


async def test_an_engine_in_a_long_step_that_it_predicted_is_not_left(run: Run) -> None:
    async with run(prefill=0, pools={"core_silence_timeout_s": 0.2}) as rig:
        fake = rig.decode[0]
        fake.behaviour.step_s, fake.behaviour.core_silence_s = 0.5, 2.0
        await asyncio.sleep(0.3)
        assert rig.app.pools.decode.num_ready() == 1
        fake.behaviour.core_silence_s = 2.6
        await rig.until_ready(num_decode=0)
        assert rig.app.pools.decode.instances[0].state == "wedged"
        fake.behaviour.core_silence_s = 0.0
        await rig.until_ready()


@asynccontextmanager
async def beside(rig: Rig, **pools: Any) -> AsyncIterator[Rig]:
    """A second router over the same instances, but for these settings of its pools."""
    settings = rig.app._settings
    settings = settings.model_copy(update={"pools": settings.pools.model_copy(update=pools)})
    app = RouterApp(settings, rig.app.service.model, rng=random.Random(1))
    await app.start()
    second = Rig(app, rig.prefill, rig.decode)
    try:
        await second.until_ready()
        yield second
        await second.until_router_is_idle()
    finally:
        await second.channel.close()
        await app.stop()


async def test_a_port_that_connects_and_says_nothing_is_never_ready(run: Run) -> None:
    async with run(prefill=0) as rig:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            async with beside(rig, decode=f"{rig.decode[0].address},{address}") as second:
                pool = second.app.pools.decode
                await until(lambda: any((one.address, one.state) == (address, "lost") for one in pool.instances))
                assert (await second.generate()).is_exactly(12)


async def test_an_instance_that_starts_or_is_restarted_is_reported_as_starting(run: Run) -> None:
    async with run(prefill=0) as rig, asyncio.timeout(20):
        [instance] = rig.app.pools.decode.instances
        await rig.decode[0].kill()
        await until(lambda: (instance.out or "").startswith("starting"))
        assert instance.state == "lost"
        await rig.decode[0].restart()
        await rig.until_ready()
        with socket.create_server(("127.0.0.1", 0)) as closed:
            address = f"127.0.0.1:{closed.getsockname()[1]}"
        async with beside(rig, decode=f"{rig.decode[0].address},{address}") as second:
            new = next(one for one in second.app.pools.decode.instances if one.address == address)
            await until(lambda: (new.out or "").startswith("starting"))
            assert new.state == "connecting", "a process that has never answered is not lost"


async def test_an_instance_at_two_addresses_counts_once_to_its_end(run: Run) -> None:
    """A name of an instance that listens on IPv4 and IPv6 has both."""
    fake = FakeInstance("decode", behaviour=Behaviour(slots=10))
    async with run(decode=[fake], prefill=0) as rig:
        _, port = parse_address(fake.address)
        async with beside(rig, decode=f"{fake.address},localhost:{port}") as second:
            pool = second.app.pools.decode

            def counts() -> tuple[int, int]:
                """Instances that end, and those that stay."""
                observed = second.app._observer.observe({"prefill": 0, "decode": 1})["decode"]
                counted = counts_of([*samples_of("decode", second.app.safeguards)], DecodePolicy())
                assert counted.num_ending == observed.num_ending
                return counted.num_ending, observed.num_present

            await until(lambda: [one.state for one in pool.instances] == ["ready", "ready"])
            assert (counts(), pool.is_complete()) == ((0, 1), True)
            fake.behaviour.draining = True
            await until(lambda: [one.state for one in pool.instances] == ["draining", "draining"])
            assert counts() == (1, 0)
            fake.behaviour.draining = False


async def test_two_routers_side_by_side_are_both_right(run: Run) -> None:
    prefill = [FakeInstance("prefill", f"prefill-{i}") for i in range(2)]
    decode = [FakeInstance("decode", f"decode-{i}", behaviour=slow(0.01)) for i in range(3)]
    async with run(prefill=prefill, decode=decode, pools={"beat_timeout_s": 5.0}) as first, beside(first) as second:
        prompts = [[20 + i, *PROMPT] for i in range(24)]
        asking = [
            asyncio.create_task(rig.generate(request_of(prompt, request_id="same", max_tokens=30)))
            for prompt in prompts
            for rig in (first, second)
        ]
        await decode[0].until("token", 20)
        await decode[0].kill()
        answers = await asyncio.gather(*asking)
        for answer, prompt in zip(answers, [prompt for prompt in prompts for _ in range(2)], strict=True):
            assert answer.is_exactly(30, prompt=prompt)
        assert any("," in answer.trailers["tandem-decode"] for answer in answers), "nothing ran where it was killed"


async def test_an_abort_by_label_is_one_router_s_own_business(run: Run) -> None:
    permits = asyncio.Semaphore(6)
    decode = [FakeInstance("decode", behaviour=slow(permits=permits))]
    async with run(prefill=0, decode=decode) as first, beside(first) as second:
        mine, theirs = (asyncio.create_task(rig.generate(request_id="same", max_tokens=40)) for rig in (first, second))
        await decode[0].until("decode", 2)
        await decode[0].until("token", 6)
        answer = await first.stub.Abort(generation_pb2.AbortRequest(request_ids=["same"]))
        assert answer.num_aborted == 1
        assert (await mine).finish().reason == common_pb2.FINISH_REASON_ABORT
        for _ in range(40):
            permits.release()
        assert (await theirs).is_exactly(40)


async def test_a_router_that_does_not_see_the_other_s_load_is_refused_and_goes_on(run: Run) -> None:
    # Reports are rare, so each router takes the first instance for free; the instance itself says no.
    decode = [FakeInstance("decode", f"decode-{i}", behaviour=Behaviour(num_running=i)) for i in range(2)]
    async with run(prefill=0, decode=decode) as first, beside(first) as second:
        decode[0].behaviour.refuse = FULL
        for rig in (first, second):
            answer = await rig.generate()
            assert answer.is_exactly(12)
            assert answer.trailers["tandem-decode"] == "decode-0,decode-1"


async def test_a_restarted_instance_is_another_one(run: Run) -> None:
    async with run(prefill=0, disaggregation={"speed_smoothing": 0.5}) as rig:
        before = rig.app.pools.decode.views()[0].key
        rig.app.pools.decode.instances[0].throughput.prefilled(1000, 0, 1.0)
        assert rig.app.pools.decode.views()[0].throughput.prefill_per_s == pytest.approx(1000)
        await rig.decode[0].kill()
        await rig.until_ready(num_decode=0)
        await rig.decode[0].restart()
        await rig.until_ready()
        after = rig.app.pools.decode.views()[0].key
        assert (after.address, after.epoch) == (before.address, "decode-0-epoch-2")
        assert rig.app.pools.decode.instance(before) is None
        assert rig.app.pools.decode.views()[0].throughput.prefill_per_s is None
        assert (await rig.generate()).is_exactly(12)


async def test_requests_that_find_no_partner_log_it_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    odd = FakeInstance("prefill", "odd", identity={"layout_digest": "l1", "fingerprint": "f1"})
    with caplog.at_level(logging.WARNING, "router"):
        async with run(prefill=[odd], disaggregation={"mode": "always"}) as rig:
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError, match="no prefill instance is available"):
                    await rig.generate()
    assert sum("layout_digest" in record.getMessage() for record in caplog.records) == 2  # of the pair, of the request


def version(role: Literal["prefill", "decode"], name: str) -> FakeInstance:
    return FakeInstance(role, f"{role}-{name}", identity={"fingerprint": name})


async def test_each_request_pairs_within_its_own_version(run: Run) -> None:
    roles: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    fakes = [version(role, name) for role in roles for name in ("old", "new")]
    async with run(prefill=fakes[:2], decode=fakes[2:]) as rig:
        for answer in await asyncio.gather(*(rig.generate(request_of()) for _ in range(20))):
            prefill, decode = answer.trailers["tandem-prefill"], answer.trailers["tandem-decode"]
            assert prefill.removeprefix("prefill") == decode.removeprefix("decode")
        assert all(fake.recorded("token") for fake in fakes)


async def test_no_request_is_refused_that_a_matching_pair_could_serve(run: Run) -> None:
    decode = [version("decode", "old"), version("decode", "new")]
    async with run(prefill=[version("prefill", "old")], decode=decode, disaggregation={"mode": "always"}) as rig:
        answers = await asyncio.gather(*(rig.generate(request_of()) for _ in range(40)), return_exceptions=True)
        assert [one for one in answers if isinstance(one, BaseException)] == []
        assert not decode[1].recorded("decode")
        assert rig.app.admission.capacity().num_instances == 1, "what cannot be used is no capacity"


async def test_always_is_ready_only_with_a_pair(run: Run) -> None:
    fakes = {"prefill": [version("prefill", "old")], "decode": [version("decode", "new")]}
    async with run(**fakes, disaggregation={"mode": "always"}) as rig:
        assert not rig.app.is_ready()


async def test_an_instance_in_the_wrong_pool_is_out(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async with run(prefill=0, decode=[FakeInstance("prefill")], wait=False) as rig:
        await until(lambda: "its role is prefill, not decode" in caplog.text)
        assert rig.app.pools.decode.num_ready() == 0


async def test_an_instance_that_reads_ids_as_other_text_is_out(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async with run(prefill=0, decode=[FakeInstance("decode", identity={"tokenizer_digest": "bad"})], wait=False) as rig:
        await until(lambda: "its tokenizer_digest is bad, the router's " in caplog.text)
        assert rig.app.pools.decode.num_ready() == 0


async def test_the_limits_are_the_tightest_of_the_pool(run: Run) -> None:
    fakes = [FakeInstance("decode", "a", max_model_len=64), FakeInstance("decode", "b")]
    async with run(prefill=0, decode=fakes) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(request_of([20] * 64))
        assert "context 64" in str(raised.value.details())


async def test_where_every_request_is_split_the_limits_are_those_of_the_longest_prefill_instance_too(run: Run) -> None:
    fakes = [FakeInstance("prefill", f"prefill-{length}", max_model_len=length) for length in (32, 64)]
    fakes.append(FakeInstance("prefill", "unpaired", max_model_len=128, identity={"weights_digest": "other"}))
    async with run(prefill=fakes, decode=1, disaggregation={"mode": "always"}) as rig:
        error = await status_of(rig, prompt=PROMPT[:20], max_tokens=45)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(error.details()).startswith("max_tokens: prompt 20 + max_tokens 45 > context 64")
        as_many_as_fit = request_of(PROMPT[:20])
        as_many_as_fit.sampling.ClearField("max_tokens")
        answer = await rig.generate(as_many_as_fit)
        assert answer.is_exactly(44, prompt=PROMPT[:20])
        assert answer.trailers["tandem-prefill"] == "prefill-64"


async def test_what_only_a_decode_instance_can_hold_is_not_split(run: Run) -> None:
    async with run(prefill=[FakeInstance("prefill", max_model_len=len(PROMPT) + 11)], decode=1) as rig:
        assert (await rig.generate(max_tokens=12)).is_exactly(12)
        assert not rig.prefill[0].recorded("prefill")
        other = PROMPT[::-1]
        assert (await rig.generate(prompt=other, max_tokens=11)).is_exactly(11, prompt=other)
        assert rig.prefill[0].recorded("prefill")


async def test_readiness_follows_the_decode_pool(run: Run) -> None:
    async with run(prefill=0) as rig:
        await until_health(rig, "SERVING")
        await rig.decode[0].kill()
        await until_health(rig, "NOT_SERVING")
        assert await health(rig, "") == "SERVING"  # alive
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        await rig.decode[0].restart()
        await until_health(rig, "SERVING")


async def test_always_is_ready_only_with_a_prefill_instance(run: Run) -> None:
    async with run(disaggregation={"mode": "always"}) as rig:
        await until_health(rig, "SERVING")
        await rig.prefill[0].kill()
        await until_health(rig, "NOT_SERVING")


async def test_empty_pools_are_not_ready(run: Run) -> None:
    async with run(prefill=0, decode=0) as rig:
        assert await health(rig) == "NOT_SERVING"
