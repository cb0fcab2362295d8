"""Start of the router: it reports SERVING when it knows its instances, not when it knows one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.app import RouterApp
from router.request.validation import ServedModel
from router.settings import RouterSettings
from serving.settings import MAX_TIME_S, SettingsError, load
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.rig import Rig, settings_of
from tests.waiting import until


async def is_serving(rig: Rig) -> bool:
    request = health_pb2.HealthCheckRequest(service="tandem.v1.GenerationService")
    response = await health_pb2_grpc.HealthStub(rig.channel).Check(request)
    return response.status == health_pb2.HealthCheckResponse.SERVING


async def until_serving(rig: Rig) -> None:
    async with asyncio.timeout(20):
        while not await is_serving(rig):
            await asyncio.sleep(0.01)


async def test_it_waits_for_the_rest_of_its_instances(run: Run) -> None:
    late = FakeInstance("decode", "late")
    late.freeze()
    async with run(prefill=0, decode=[FakeInstance("decode"), late], wait=False, pools={"settle_s": 60}) as rig:
        await rig.until_ready(num_decode=1)
        await asyncio.sleep(0.3)
        assert not await is_serving(rig)
        late.thaw()
        await until_serving(rig)
        assert rig.app.pools.decode.num_ready() == 2


async def test_it_does_not_wait_for_ever(run: Run) -> None:
    dead = FakeInstance("decode", "dead")
    dead.freeze()
    async with run(prefill=0, decode=[FakeInstance("decode"), dead], wait=False, pools={"settle_s": 0.3}) as rig:
        started_s = time.monotonic()
        await until_serving(rig)
        assert time.monotonic() - started_s >= 0.3
        assert (await rig.generate()).is_exactly(12)


TIMES = [
    ("server", "max_deadline_s", MAX_TIME_S),
    ("pools", "beat_timeout_s", MAX_TIME_S),
    ("pools", "max_backoff_s", 2_147_483),
    ("signals", "interval_s", MAX_TIME_S),
    ("quarantine", "ttl_s", MAX_TIME_S),
    ("admission", "max_retry_after_s", MAX_TIME_S),
]
"""The longest ones that are allowed."""


async def test_it_serves_with_the_longest_times_that_are_allowed(run: Run) -> None:
    sections: dict[str, dict[str, float]] = {}
    for section, name, longest_s in TIMES:
        sections.setdefault(section, {})[name] = longest_s
    async with run(prefill=1, decode=1, **sections) as rig:
        assert (await rig.generate()).is_exactly(12)


@pytest.mark.parametrize(("section", "name", "longest_s"), TIMES)
def test_longer_times_are_refused(section: str, name: str, longest_s: float) -> None:
    with pytest.raises(SettingsError, match=rf"{section}\.{name} = .* should be less than or equal to"):
        load(RouterSettings, flags={("router", "model"): "m", (section, name): 1.001 * longest_s})


@asynccontextmanager
async def starting_worker(
    model: ServedModel, model_folder: Path, decode: FakeInstance, **pools: Any
) -> AsyncIterator[tuple[RouterApp, asyncio.Task[None]]]:
    settings = settings_of(model_folder, [], [decode], router={"workers": 2}, pools=pools)
    app = RouterApp(settings, model)
    start = asyncio.create_task(app.start())
    try:
        yield app, start
    finally:
        await start
        await app.stop()


async def test_a_worker_listens_when_it_knows_the_pools(model: ServedModel, model_folder: Path) -> None:
    async with FakeInstance("decode") as decode:
        decode.freeze()
        async with starting_worker(model, model_folder, decode) as (app, start):
            await until(lambda: app.pools.decode.instances)
            await asyncio.sleep(0.3)
            assert not start.done()
            decode.thaw()
            await start
            rig = Rig(app, [], [decode])
            assert await is_serving(rig)
            assert (await rig.generate()).is_exactly(12)
            await rig.channel.close()


async def test_a_worker_without_instances_listens_after_a_while(model: ServedModel, model_folder: Path) -> None:
    """Its operators' calls and its health are answered."""
    async with FakeInstance("decode") as decode:
        decode.freeze()
        times = {"beat_timeout_s": 0.1, "settle_s": 0.1}
        async with starting_worker(model, model_folder, decode, **times) as (app, start):
            await start
            rig = Rig(app, [], [decode])
            assert not await is_serving(rig)
            await rig.channel.close()
