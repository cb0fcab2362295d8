"""Several routers of the same pools: how many they are, and one that sees what the others' requests show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protos.tandem.v1 import signals_pb2, signals_pb2_grpc
from router.app import RouterApp
from router.autoscaler.observation import Observer
from router.autoscaler.router_signals import (
    EMPTY_QUEUE,
    LatencySample,
    Peers,
    QueueSample,
    RecentLatencies,
    RouterSignals,
    combined,
    quantile,
    summarised,
)
from router.autoscaler.settings import SignalSettings
from router.autoscaler.signals import demand_of
from router.pools.discovery import ServiceDiscovery, StaticDiscovery
from router.pools.instance_info import Role
from router.request.validation import ServedModel
from serving.channel import open_channel
from serving.settings import parse_address
from tests.channels import PATIENT
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.autoscaler.builders import policy_of, settings_of
from tests.router.conftest import Run
from tests.router.rig import Rig, slow
from tests.router.rig import settings_of as router_settings

LISTENING: dict[str, Any] = {"listen": "127.0.0.1:0", "interval_s": 0.05}
SIZES: dict[Role, int] = {"prefill": 1, "decode": 1}


@asynccontextmanager
async def second_router(rig: Rig, model: ServedModel, folder: Path) -> AsyncIterator[RouterApp]:
    """Of the same instances; it knows the first one, and is not in the list itself."""
    signals = {**LISTENING, "routers": rig.app.signals_address}
    app = RouterApp(router_settings(folder, rig.prefill, rig.decode, signals=signals), model)
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


@asynccontextmanager
async def peers_of(own_id: str, discovery: ServiceDiscovery) -> AsyncIterator[Peers]:
    peers = Peers(own_id, discovery, open_channel, SignalSettings(**LISTENING))
    running = asyncio.create_task(peers.run())
    try:
        yield peers
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def observer_of(app: RouterApp) -> Observer:
    settings = settings_of(min_samples=1, prefill={"warm_up_s": 0.0}, decode={"warm_up_s": 0.0})
    return Observer(app.safeguards, app.admission, RecentLatencies(settings), settings, app.peers)


async def test_a_router_sees_the_queue_and_the_latencies_of_another_one(
    run: Run, model: ServedModel, model_folder: Path
) -> None:
    """All clients use the first router; the second one, which may lead, has no request."""
    decode = FakeInstance("decode", behaviour=slow(0.05, slots=1))
    prefill = FakeInstance("prefill", behaviour=Behaviour(slots=10))
    autoscaler = {"prefill": {"warm_up_s": 0.0}, "decode": {"warm_up_s": 0.0}}
    one_at_a_time = {"sequence_fraction": 1.0, "queue_timeout_s": 60.0}
    async with (
        run(
            prefill=[prefill], decode=[decode], signals=LISTENING, admission=one_at_a_time, autoscaler=autoscaler
        ) as rig,
        second_router(rig, model, model_folder) as second,
    ):
        observer = observer_of(second)
        await rig.generate(max_tokens=3)
        running = [asyncio.create_task(rig.generate(max_tokens=40)) for _ in range(3)]

        def sees_all() -> bool:
            observed = observer.observe(SIZES)
            shown = (observed["decode"].queue.delay_s, observed["prefill"].latency_s, observed["decode"].latency_s)
            return observed["decode"].queue.num_queued == 2 and None not in shown

        await until(sees_all)
        assert second.admission.num_queued == 0
        await asyncio.gather(*running)
        await until(lambda: observer.observe(SIZES)["decode"].queue == EMPTY_QUEUE)


async def test_while_a_router_is_silent_nothing_shrinks_and_others_still_grow(
    run: Run, model: ServedModel, model_folder: Path
) -> None:
    decode = FakeInstance("decode", behaviour=Behaviour(slots=10))
    async with (
        run(decode=[decode], signals=LISTENING) as rig,
        second_router(rig, model, model_folder) as second,
    ):
        assert second.peers is not None
        observer = observer_of(second)
        await until(second.pools.decode.num_ready)
        await until(lambda: demand_of(observer.observe(SIZES)["decode"], policy_of()).num_enough == 0)
        await rig.app.stop()
        await until(lambda: second.peers and second.peers.num_silent == 1)
        demand = demand_of(observer.observe(SIZES)["decode"], policy_of())
        assert demand.num_enough is None
        assert "1 routers do not answer" in demand.enough_for


async def test_the_queue_and_the_latencies_of_a_silent_router_count_no_more(
    run: Run, model: ServedModel, model_folder: Path
) -> None:
    """A router that died with a queue would let a pool grow to its largest size."""
    decode = FakeInstance("decode", behaviour=slow(0.05, slots=1))
    prefill = FakeInstance("prefill", behaviour=Behaviour(slots=10))
    one_at_a_time = {"sequence_fraction": 1.0, "queue_timeout_s": 60.0}
    async with (
        run(prefill=[prefill], decode=[decode], signals=LISTENING, admission=one_at_a_time) as rig,
        second_router(rig, model, model_folder) as second,
    ):
        observer = observer_of(second)
        running = [asyncio.create_task(rig.generate(max_tokens=40)) for _ in range(3)]
        await until(lambda: observer.observe(SIZES)["decode"].queue.num_queued == 2)
        await rig.app.stop()
        await asyncio.gather(*running, return_exceptions=True)
        await until(lambda: second.peers and second.peers.num_silent == 1)
        assert second.peers is not None
        assert second.peers.signals() == []
        assert observer.observe(SIZES)["decode"].queue == EMPTY_QUEUE


async def test_each_router_counts_all_of_them_once(run: Run, model: ServedModel, model_folder: Path) -> None:
    async with run(signals=LISTENING) as rig, second_router(rig, model, model_folder) as second:
        assert second.peers is not None
        await until(lambda: second.peers and second.peers.num_routers == 2)  # it is not in its own list
        first, other = rig.app.signals_address, second.signals_address
        assert first is not None
        assert other is not None
        async with peers_of("a third one", StaticDiscovery([first, other])) as peers:
            await until(lambda: peers.num_routers == 3)
        own_id = (await asked(first)).router_id
        async with peers_of(own_id, StaticDiscovery([first, other])) as peers:
            await until(lambda: (peers.num_routers, peers.num_silent, len(peers.signals())) == (2, 0, 1))


async def test_a_router_at_two_addresses_is_one(run: Run, model: ServedModel, model_folder: Path) -> None:
    """A name of a router that listens on IPv4 and IPv6 has both."""
    async with run(signals=LISTENING) as rig:
        _, port = parse_address(rig.app.signals_address or "")
        addresses = [f"127.0.0.1:{port}", f"localhost:{port}"]
        async with peers_of("another one", StaticDiscovery(addresses)) as peers:
            await until(
                lambda: (len(peers.hosts), peers.num_routers, peers.num_silent, len(peers.signals())) == (2, 2, 0, 1)
            )
        own_id = (await asked(addresses[0])).router_id
        async with peers_of(own_id, StaticDiscovery(addresses)) as peers:
            await until(lambda: len(peers.hosts) == 2)
            assert (peers.num_routers, peers.signals()) == (1, [])


class BrokenOnce:
    """A discovery that an exception ends the first time."""

    def __init__(self, *addresses: str) -> None:
        self.num_begun = 0
        self._addresses = frozenset(addresses)

    async def addresses(self) -> AsyncIterator[frozenset[str]]:
        self.num_begun += 1
        if self.num_begun == 1:
            raise RuntimeError("a fault that the test asked for")
        yield self._addresses


async def test_the_other_routers_are_followed_again_after_an_error(run: Run) -> None:
    async with run(signals=LISTENING) as rig:
        discovery = BrokenOnce(rig.app.signals_address or "")
        async with peers_of("another one", discovery) as peers:
            await until(lambda: len(peers.signals()) == 1)
    assert discovery.num_begun == 2


async def asked(address: str) -> signals_pb2.GetSignalsResponse:
    async with open_channel(address, PATIENT) as channel:
        return await signals_pb2_grpc.SignalsServiceStub(channel).GetSignals(signals_pb2.GetSignalsRequest())


async def test_the_shares_of_admission_follow_the_number_of_routers(
    run: Run, model: ServedModel, model_folder: Path
) -> None:
    async with run(signals=LISTENING) as rig, second_router(rig, model, model_folder) as second:
        assert second.admission.num_routers is not None
        await until(lambda: second.admission.num_routers is not None and second.admission.num_routers() == 2)
        assert rig.app.admission.num_routers is None  # it knows no other one: the setting counts


# Pure


@pytest.mark.parametrize(
    ("queues", "expected"),
    [
        ([], EMPTY_QUEUE),
        ([EMPTY_QUEUE, QueueSample(3, 2.0)], QueueSample(3, 2.0)),
        ([QueueSample(1, 4.0), QueueSample(3, 2.0)], QueueSample(4, 2.5)),
        ([QueueSample(1, None), QueueSample(3, 2.0)], QueueSample(4, 2.0)),
        ([QueueSample(1, None), EMPTY_QUEUE], QueueSample(1, None)),
    ],
)
def test_queues_are_one_and_an_empty_one_hides_none(queues: list[QueueSample], expected: QueueSample) -> None:
    assert combined(queues) == expected


SAMPLES = st.lists(
    st.builds(LatencySample, st.floats(1e-5, 1e4), st.floats(0.5, 1e3), st.just(1)), min_size=1, max_size=60
)


TIED = [
    *(LatencySample(1.0, weight + 0.9926573149322167, 1) for weight in (1.0, 9.0, 999.0)),
    *(LatencySample(2.0, weight + 0.9926573149322167, 1) for weight in (1.0, 10.0, 998.0)),
]


@given(samples=SAMPLES, part=st.sampled_from([0.5, 0.9, 0.99]))
@example(samples=TIED, part=0.5)
def test_a_quantile_of_what_is_sent_is_off_by_two_per_cent(samples: list[LatencySample], part: float) -> None:
    sent = RouterSignals(latencies={"prefill": samples}).to_wire("a")
    received = RouterSignals.from_wire(signals_pb2.GetSignalsResponse.FromString(sent.SerializeToString()))
    found = quantile(received.latencies["prefill"], part, 1)
    # where the weights below it are the fraction itself, their rounding decides between two neighbours
    least, most = (quantile(samples, part + rounding, 1) for rounding in (-1e-9, 1e-9))
    assert found is not None
    assert least is not None
    assert most is not None
    assert least / 1.03 <= found <= most * 1.03
    assert sum(one.num_requests for one in summarised(samples)) == len(samples)


def test_signals_are_the_same_after_the_way() -> None:
    samples: Any = {"prefill": [LatencySample(0.5)], "decode": [LatencySample(0.02, 40.0)]}
    for signals in (
        RouterSignals(QueueSample(4, 1.5), "decode", samples),
        RouterSignals(QueueSample(4, None), None, samples),
        RouterSignals(EMPTY_QUEUE, None, samples, is_serving=False),
    ):
        assert RouterSignals.from_wire(signals.to_wire("a")) == signals


def test_a_router_of_a_version_that_does_not_say_whether_it_serves_counts_as_serving() -> None:
    assert RouterSignals.from_wire(signals_pb2.GetSignalsResponse(router_id="old")).is_serving
