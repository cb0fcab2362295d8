"""What becomes of an instance whose address goes, and of one whose address comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from protos.tandem.v1 import instance_pb2, instance_pb2_grpc
from router.app import RouterApp
from router.request.validation import ServedModel
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.rig import Rig, settings_of, slow
from tests.waiting import until

QUICK_S = 0.02


class Changing:
    """A discovery whose addresses a test sets."""

    def __init__(self, *fakes: FakeInstance) -> None:
        self._sets: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self.now(*fakes)

    def now(self, *fakes: FakeInstance) -> None:
        self._sets.put_nowait(frozenset(fake.address for fake in fakes))

    async def addresses(self) -> AsyncIterator[frozenset[str]]:
        while True:
            yield await self._sets.get()


@asynccontextmanager
async def routing(
    model: ServedModel,
    folder: Path,
    decode: list[FakeInstance],
    prefill: list[FakeInstance] | None = None,
    **sections: Any,
) -> AsyncIterator[tuple[Rig, Changing, Changing]]:
    """A router whose pools a test changes; begins with all the fakes."""
    prefill = prefill or []
    async with AsyncExitStack() as stack:
        for fake in [*prefill, *decode]:
            await stack.enter_async_context(fake)
        prefills, decodes = Changing(*prefill), Changing(*decode)
        app = RouterApp(settings_of(folder, [], [], **sections), model, prefill=prefills, decode=decodes)
        async with started(app, prefill, decode) as rig:
            await rig.until_ready()
            yield rig, prefills, decodes
            await rig.until_router_is_idle()


@asynccontextmanager
async def started(app: RouterApp, prefill: list[FakeInstance], decode: list[FakeInstance]) -> AsyncIterator[Rig]:
    """The router runs while inside."""
    await app.start()
    rig = Rig(app, prefill, decode)
    try:
        yield rig
    finally:
        await rig.channel.close()
        await app.stop()


def fakes(role: Any, *behaviours: Behaviour) -> list[FakeInstance]:
    return [FakeInstance(role, f"{role}-{i}", behaviour=behaviour) for i, behaviour in enumerate(behaviours)]


@pytest.fixture(autouse=True)
def no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.pools.pool._LINGER_S", 0.05)


async def test_an_address_that_appears_is_used(model: ServedModel, model_folder: Path) -> None:
    decode = fakes("decode", Behaviour(), Behaviour())
    async with routing(model, model_folder, decode) as (rig, _, decodes):
        decodes.now(decode[0])
        await rig.until_ready(num_decode=1)
        await until(lambda: len(rig.app.pools.decode.instances) == 1)
        assert (await rig.generate()).trailers["tandem-decode"] == "decode-0"
        decodes.now(*decode)
        await rig.until_ready()


async def test_a_stream_outlives_its_instance_s_address(model: ServedModel, model_folder: Path) -> None:
    decode = fakes("decode", slow(), Behaviour(num_running=9))
    async with routing(model, model_folder, decode) as (rig, _, decodes):
        asking = asyncio.create_task(rig.generate(max_tokens=40))
        await decode[0].until("token", 2)
        decodes.now(decode[1])  # it drains, so the DNS does not name it any more
        await rig.until_ready(num_decode=1)
        assert (await rig.generate(max_tokens=2)).trailers["tandem-decode"] == "decode-1"
        assert decode[0].num_open_calls == 1
        assert len(rig.app.pools.decode.instances) == 2
        answer = await asking
        assert answer.is_exactly(40)
        assert answer.trailers["tandem-decode"] == "decode-0"
        assert not decode[0].recorded("decode cancelled")
        await until(lambda: len(rig.app.pools.decode.instances) == 1)  # and only then it is let go


async def test_kv_of_a_prefill_instance_whose_address_has_gone_is_still_read(
    model: ServedModel, model_folder: Path
) -> None:
    # Its call is still open, and closing it would give up the KV under its reader.
    prefill = fakes("prefill", Behaviour(linger_s=60.0))
    decode = fakes("decode", Behaviour(load_s=0.4))
    async with routing(model, model_folder, decode, prefill) as (rig, prefills, _):
        asking = asyncio.create_task(rig.generate())
        await prefill[0].until("token")
        prefills.now()
        async with asyncio.timeout(20):
            while not decode[0].recorded("loaded"):
                assert rig.app.pools.prefill.instances, "let go under its reader"
                await asyncio.sleep(0.01)
        assert (await asking).is_exactly(12)
        assert not decode[0].recorded("recomputed")
        await until(lambda: not rig.app.pools.prefill.instances)


async def test_an_instance_that_has_left_and_ended_is_not_reported_as_lost(
    model: ServedModel, model_folder: Path
) -> None:
    """Its call lasts as long as the request whose prompt it computed."""
    prefill, decode = fakes("prefill", Behaviour()), fakes("decode", slow())
    async with routing(model, model_folder, decode, prefill) as (rig, prefills, _):
        asking = asyncio.create_task(rig.generate(max_tokens=100))
        await decode[0].until("token", 2)
        [instance] = rig.app.pools.prefill.instances
        prefills.now()
        await rig.until_ready(num_prefill=0)
        await prefill[0].kill()
        await until(lambda: instance._lost is not None)
        assert instance.state == "leaving"
        assert (await asking).is_exactly(100)


async def test_an_instance_that_has_left_and_ended_counts_no_more_while_its_prompt_is_decoded(
    model: ServedModel, model_folder: Path
) -> None:
    """A resize is complete, and its place in the autoscaler's `max_instances` free, when the process has ended."""
    prefill, decode = fakes("prefill", Behaviour()), fakes("decode", slow())
    async with routing(model, model_folder, decode, prefill) as (rig, prefills, _):
        pool = rig.app.pools.prefill
        asking = asyncio.create_task(rig.generate(max_tokens=100))
        await decode[0].until("token", 2)
        [instance] = pool.instances
        key = instance.key
        assert key is not None
        prefills.now()
        await until(lambda: instance.state == "leaving")
        assert pool.processes == (instance,), "its process runs"
        await prefill[0].kill()
        await until(lambda: not pool.instances)
        assert not instance.calls.is_empty, "the prompt's call is over"
        assert pool.instance(key) is instance, "its connection is closed under a release"
        assert (await asking).is_exactly(100)
        await until(lambda: pool.instance(key) is None)


async def test_an_instance_that_has_left_and_is_silent_counts_while_its_process_may_go_on(
    model: ServedModel, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = fakes("prefill", Behaviour()), fakes("decode", slow())
    pools = {"beat_timeout_s": 0.5}
    async with routing(model, model_folder, decode, prefill, pools=pools) as (rig, prefills, _):
        pool = rig.app.pools.prefill
        asking = asyncio.create_task(rig.generate(max_tokens=100))
        await decode[0].until("token", 2)
        [instance] = pool.instances
        prefills.now()
        await until(lambda: instance.state == "leaving")
        prefill[0].freeze()
        await instance.wait_lost(30.0)
        assert list(pool.instances) == [instance]
        monkeypatch.setattr("router.pools.instance._MAX_SILENCE_S", 0.0)
        assert not list(pool.instances)
        prefill[0].thaw()
        assert (await asking).is_exactly(100)


async def test_an_instance_that_drains_for_other_routers_stays_until_it_has_ended(
    model: ServedModel, model_folder: Path
) -> None:
    """Its process still counts for the autoscaler's `max_instances`."""
    decode = fakes("decode", Behaviour(), Behaviour())
    async with routing(model, model_folder, decode) as (rig, _, decodes):
        decode[0].behaviour.draining = True
        [draining] = [one for one in rig.app.pools.decode.instances if one.address == decode[0].address]
        await until(lambda: draining.state == "draining")
        decodes.now(decode[1])
        await until(lambda: draining.state == "leaving")
        reported = draining.view()
        assert reported is not None
        await until(lambda: (now := draining.view()) and now.load.sequence > reported.load.sequence + 10)
        assert draining in rig.app.pools.decode.processes
        await decode[0].kill()
        await until(lambda: len(rig.app.pools.decode.instances) == 1)


async def test_the_connection_of_an_idle_instance_outlives_its_address_for_a_while(
    model: ServedModel, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last call may have just ended, and the release that follows be on its way."""
    monkeypatch.setattr("router.pools.pool._LINGER_S", 60.0)
    decode = fakes("decode", Behaviour())
    async with routing(model, model_folder, decode) as (rig, _, decodes):
        assert (await rig.generate()).is_exactly(12)
        [instance] = rig.app.pools.decode.instances
        await until(lambda: instance.calls.is_empty)
        decodes.now()
        await until(lambda: instance.state == "leaving")
        stub = instance_pb2_grpc.InstanceServiceStub(instance.channel)
        answers = [await stub.GetInstanceInfo(instance_pb2.GetInstanceInfoRequest()) for _ in range(3)]
        assert {answer.instance_id for answer in answers} == {"decode-0"}


async def test_a_leaving_instance_that_dies_is_noticed(model: ServedModel, model_folder: Path) -> None:
    decode = fakes("decode", Behaviour(freeze_at=5, token_s=0.02), Behaviour(num_running=9))
    async with routing(model, model_folder, decode, pools={"beat_timeout_s": 2.0}) as (rig, _, decodes):
        asking = asyncio.create_task(rig.generate(max_tokens=20))
        await decode[0].until("token")
        decodes.now(decode[1])
        await decode[0].until("froze")
        answer = await asking
        assert answer.is_exactly(20)
        assert answer.trailers["tandem-decode"] == "decode-0,decode-1"
        await until(lambda: len(rig.app.pools.decode.instances) == 1)


async def test_an_address_that_comes_back_in_time_was_never_away(model: ServedModel, model_folder: Path) -> None:
    decode = fakes("decode", slow())
    async with routing(model, model_folder, decode) as (rig, _, decodes):
        asking = asyncio.create_task(rig.generate(max_tokens=40))
        await decode[0].until("token")
        instance = rig.app.pools.decode.instances[0]
        decodes.now()
        await rig.until_ready(num_decode=0)
        assert instance.state == "leaving"
        decodes.now(*decode)
        await rig.until_ready()
        assert (await asking).is_exactly(40)
        assert (await rig.generate()).is_exactly(12)
        assert rig.app.pools.decode.instances == (instance,)


async def test_two_addresses_of_one_process_are_one_instance(model: ServedModel, model_folder: Path) -> None:
    decode = fakes("decode", Behaviour(), Behaviour())
    async with routing(model, model_folder, decode[:1]) as (rig, _, decodes):
        port = decode[0].address.rpartition(":")[2]
        decodes._sets.put_nowait(frozenset({decode[0].address, f"localhost:{port}"}))
        await until(lambda: all(instance.state == "ready" for instance in rig.app.pools.decode.instances))
        await until(lambda: len(rig.app.pools.decode.instances) == 2)
        await until(rig.app.pools.decode.is_complete)
        assert rig.app.pools.decode.num_ready() == 1
        assert (await rig.generate()).is_exactly(12)


async def test_a_discovery_that_breaks_is_logged_and_begins_again_beside_its_last_instances(
    model: ServedModel, model_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(Changing):
        async def addresses(self) -> AsyncIterator[frozenset[str]]:
            yield await self._sets.get()
            raise RuntimeError("a fault that the test asked for")

    monkeypatch.setattr("router.pools.discovery._RETRY_S", 0.01)
    async with FakeInstance("decode") as fake, FakeInstance("decode", "another") as another:
        breaking = Breaking(fake)
        app = RouterApp(settings_of(model_folder, [], []), model, decode=breaking)
        async with started(app, [], [fake]) as rig:
            await rig.until_ready()
            await until(lambda: "no longer followed" in caplog.text)
            assert (await rig.generate()).is_exactly(12)
            breaking.now(fake, another)
            await rig.until_ready(num_decode=2)


async def test_addresses_that_cannot_be_dialled_are_tried_again(
    model: ServedModel, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.pools.discovery._RETRY_S", 0.01)
    async with FakeInstance("decode") as fake:
        port = fake.address.rpartition(":")[2]
        settings = settings_of(model_folder, [], [], pools={"decode": f"dns:localhost:{port}"})
        app = RouterApp(settings, model)
        dial, num_failures = app.pools.decode.dial, iter(range(3))

        def failing(address: str) -> grpc.aio.Channel:
            if next(num_failures, None) is not None:
                raise RuntimeError("a fault that the test asked for")
            return dial(address)

        monkeypatch.setattr(app.pools.decode, "dial", failing)
        async with started(app, [], [fake]) as rig:
            await rig.until_ready()


async def test_a_router_asks_the_dns_for_its_instances(model: ServedModel, model_folder: Path) -> None:
    async with FakeInstance("decode") as fake:
        port = fake.address.rpartition(":")[2]
        settings = settings_of(model_folder, [], [], pools={"decode": f"dns:localhost:{port}"})
        async with started(RouterApp(settings, model), [], [fake]) as rig:
            await rig.until_ready()
            assert (await rig.generate()).is_exactly(12)


async def test_the_adapters_of_the_last_instance_stay_known(model: ServedModel, model_folder: Path) -> None:
    """As its model does: a request for one is unavailable, not wrong."""
    fake = FakeInstance("decode", behaviour=Behaviour(lora_adapters=["poet"]))
    async with routing(model, model_folder, [fake]) as (rig, _, decodes):
        decodes.now()
        await fake.kill()
        await until(lambda: not rig.app.pools.decode.instances)
        assert rig.app.pools.lora_adapters() == {"poet"}
