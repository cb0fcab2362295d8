"""Several routers of the same pools: how many they are, what requests show, and one that sees what the others' show."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from protos.tandem.v1 import common_pb2, signals_pb2, signals_pb2_grpc
from router.app import RouterApp
from router.autoscaler.observation import Observer
from router.autoscaler.router_signals import (
    EMPTY_QUEUE,
    LatencySample,
    Peers,
    QueueSample,
    RecentLatencies,
    RouterSignals,
    Window,
    combined,
    quantile,
    summarised,
)
from router.autoscaler.settings import SignalSettings
from router.autoscaler.signals import demand_of
from router.dispatch.trace import RequestTrace
from router.metrics import RouterMetrics
from router.picking.disaggregation import Decision, Disaggregation, Reason
from router.picking.placement import Plan
from router.pools.discovery import ServiceDiscovery, StaticDiscovery
from router.pools.instance_info import InstanceView, Role
from router.pools.throughput import Work
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from router.request.request_log import RequestSummary, TokenGaps
from router.request.validation import ServedModel
from serving.channel import open_channel
from serving.logging import RequestEvent
from serving.settings import parse_address
from tests.channels import PATIENT
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.autoscaler.builders import instance, policy_of, settings_of
from tests.router.conftest import Run
from tests.router.rig import Rig, slow
from tests.router.rig import settings_of as router_settings
from tests.waiting import until

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
        observer = observer_of(second)
        await until(second.pools.decode.num_ready)
        await until(lambda: demand_of(observer.observe(SIZES)["decode"], policy_of()).num_enough == 0)
        await rig.app.stop()
        await until(lambda: second.peers.num_silent == 1)
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
        await until(lambda: second.peers.num_silent == 1)
        assert second.peers.signals() == []
        assert observer.observe(SIZES)["decode"].queue == EMPTY_QUEUE


async def test_each_router_counts_all_of_them_once(run: Run, model: ServedModel, model_folder: Path) -> None:
    async with run(signals=LISTENING) as rig, second_router(rig, model, model_folder) as second:
        await until(lambda: second.peers.num_routers == 2)  # it is not in its own list
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


# Latencies of recent requests


def test_a_quantile_is_that_of_the_weighted_samples() -> None:
    window = Window(60.0)
    for index, seconds in enumerate((0.4, 0.1, 0.3, 0.2)):
        window.add(float(index), seconds)
    assert [quantile(window.samples(4.0), part, 1) for part in (0.25, 0.5, 0.75, 1.0)] == [0.1, 0.2, 0.3, 0.4]
    window.add(4.0, 9.0, weight=100.0)
    assert quantile(window.samples(4.0), 0.5, 1) == 9.0


def test_old_samples_are_forgotten_and_few_tell_nothing() -> None:
    window = Window(30.0)
    for at_s in (0.0, 10.0, 20.0):
        window.add(at_s, at_s)
    assert quantile(window.samples(20.0), 1.0, 3) == 20.0
    assert quantile(window.samples(35.0), 1.0, 3) is None
    assert quantile(window.samples(35.0), 0.5, 2) == 10.0
    assert quantile(window.samples(51.0), 0.5, 1) is None


@given(samples=st.lists(st.floats(0, 1e6), min_size=1, max_size=50), part=st.floats(0.01, 1.0))
def test_at_least_the_asked_part_is_no_larger_than_the_quantile(samples: list[float], part: float) -> None:
    window = Window(60.0)
    for seconds in samples:
        window.add(0.0, seconds)
    found = quantile(window.samples(0.0), part, 1)
    assert found in samples
    assert sum(seconds <= found for seconds in samples) >= part * len(samples) - 1e-6
    assert sum(seconds < found for seconds in samples) < part * len(samples) + 1e-6


def plan(decode_up_s: float, prefill_up_s: float | None) -> Plan:
    def at(name: str, up_s: float) -> InstanceView:
        view = instance(name, up_s=up_s).view
        assert view is not None
        return view

    prefill = None if prefill_up_s is None else at("prefill-0", prefill_up_s)
    decision = Disaggregation(Decision.LOCAL, Reason.OFF, "as the test says")
    return Plan(at("decode-0", decode_up_s), prefill, decision, Work(0, 0), "as the test says")


@pytest.mark.parametrize(
    ("decode_up_s", "prefill_up_s", "counts"),
    [(100.0, 100.0, True), (100.0, None, True), (3.0, 100.0, False), (100.0, 3.0, False)],
)
def test_a_request_that_touched_an_instance_still_warming_up_does_not_count(
    decode_up_s: float, prefill_up_s: float | None, counts: bool
) -> None:
    metrics = RouterMetrics(recent=RecentLatencies(settings_of(min_samples=1)))
    trace = RequestTrace(metrics)
    request = GenerationRequest("l", "r", "m", (1,), SamplingParams(max_tokens=20))
    choice = Choice(request, 0)
    trace.picked(plan(decode_up_s, prefill_up_s))
    trace.first_token()
    trace.request = request
    trace.validated([choice])
    for index in range(11):
        choice.accept(common_pb2.TokenChunk(token_index=index, token_ids=[7]))
    trace.ended(RequestEvent.FINISHED)
    assert (metrics.recent.of("prefill") is not None) == counts
    assert (metrics.recent.of("decode") is not None) == counts
    assert metrics.ended["finished"] == 1


def test_itl_is_the_gap_after_the_first_token() -> None:
    recent = RecentLatencies(settings_of(min_samples=1))
    metrics = RouterMetrics(recent=recent)
    trace = RequestTrace(metrics)
    start_s = trace.timeline.marks[0][1]
    trace.timeline.mark(RequestEvent.FIRST_TOKEN, start_s + 5.0)
    trace.timeline.mark(RequestEvent.FINISHED, start_s + 6.0)
    gaps = TokenGaps(1.0, 10)
    summary = RequestSummary(1, "label", tuple(trace.timeline.marks), num_tokens=11, gaps=gaps, outcome="finished")
    metrics.request_ended(summary, trace.timeline, "local")
    assert recent.of("decode") == pytest.approx(0.1)


def test_long_answers_weigh_by_their_tokens() -> None:
    recent = RecentLatencies(settings_of(min_samples=1, latency_quantile=0.5), clock=lambda: 0.0)
    rng = random.Random(1)
    for _ in range(20):
        recent.ended(rng.uniform(0.5, 1.0), 1)
    recent.ended(0.02, 400)
    assert recent.of("decode") == 0.02


def test_the_start_of_a_later_choice_is_no_gap() -> None:
    """Of four choices, three begin 0.5 s after the first; each has a token every 0.1 s, and one has a single token."""
    params = SamplingParams(max_tokens=20, n=4)
    request = GenerationRequest("label", "id", "model", (1,), params)
    choices = [Choice(request, index) for index in range(4)]
    metrics = RouterMetrics(recent=RecentLatencies(settings_of(min_samples=1)))
    trace = RequestTrace(metrics)
    trace.request = request
    trace.validated(choices)
    trace.picked(plan(100.0, None))
    trace.first_token()
    for choice, start_s, num_tokens in zip(choices, (0.0, 0.5, 0.5, 0.5), (11, 6, 3, 1), strict=True):
        choice.begin_attempt()
        choice.now = iter([start_s + index * 0.1 for index in range(num_tokens)]).__next__
        for index in range(num_tokens):
            choice.accept(common_pb2.TokenChunk(stream_epoch=1, choice=choice.index, token_index=index, token_ids=[7]))
    trace.ended(RequestEvent.FINISHED)
    assert metrics.output_token["local"].count == 1
    assert metrics.output_token["local"].sum == pytest.approx(0.1)
    [sample] = metrics.recent.samples("decode")
    assert (sample.seconds, sample.weight) == (pytest.approx(0.1), 10 + 5 + 2)
