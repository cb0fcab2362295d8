"""Leader election: one leader at a time, whatever the clocks say and whichever answers are lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.autoscaler.resizer import ActuatorError
from router.kubernetes import cluster as cluster_module
from router.kubernetes.actuator import PAUSED, Election
from tests.chart.fake_kube.faults import Fault
from tests.router.kubernetes.release import LEASE, FakeRelease, fake_release

TTL_S = 15.0


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_MAX_WAIT_S", 0.01)


@dataclass
class Time:
    """One clock for all routers of a test."""

    at_s: float = 0.0

    def __call__(self) -> float:
        return self.at_s


@dataclass
class Candidate:
    """A router that takes the lead as the autoscaler does: it counts from when it asked."""

    name: str
    election: Election
    clock: Time
    until_s: float = field(default=float("-inf"))

    @classmethod
    def of(cls, found: FakeRelease, name: str, clock: Time) -> Candidate:
        return cls(name, Election(found.cluster(), LEASE, clock), clock)

    async def try_it(self) -> bool:
        asked_s, self.until_s = self.clock(), float("-inf")
        if await self.election.take(self.name, TTL_S):
            self.until_s = asked_s + TTL_S
        return self.leads

    @property
    def leads(self) -> bool:
        return self.clock() < self.until_s


async def test_the_first_leads_until_it_no_longer_renews() -> None:
    async with fake_release() as found:
        clock = Time()
        one, two = (Candidate.of(found, name, clock) for name in ("one", "two"))
        assert [await one.try_it(), await two.try_it()] == [True, False]
        clock.at_s = 10.0
        assert [await one.try_it(), await two.try_it()] == [True, False]
        clock.at_s = 25.0  # fifteen seconds after the last renewal that `two` has seen
        assert not await two.try_it()
        clock.at_s = 25.1
        assert [await two.try_it(), await one.try_it()] == [True, False]
        spec = found.kube.store.get("Lease", LEASE)["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"], spec["leaseDurationSeconds"]) == ("two", 2, 15)


async def test_an_annotation_of_the_lease_pauses_every_router_and_its_end_lets_them_go_on() -> None:
    async with fake_release() as found:
        candidates = [Candidate.of(found, name, Time()) for name in ("one", "two")]
        for value, is_paused in (("true", True), ("false", False), ("", True), (None, False)):
            note = {} if value is None else {PAUSED: value}
            lease = found.kube.store.get("Lease", LEASE)
            found.kube.store.changed(lease, lambda new, note=note: new["metadata"].update(annotations=note))  # type: ignore[misc]
            assert [await one.try_it() for one in candidates] == [True, False]
            assert [one.election.pause is not None for one in candidates] == [is_paused] * 2


async def test_a_newcomer_waits_out_a_lease_however_old_it_says_it_is() -> None:
    """The holder's clock may be hours behind."""
    async with fake_release() as found:
        clock = Time(1000.0)
        assert await Candidate.of(found, "one", clock).try_it()
        lease = found.kube.store.get("Lease", LEASE)
        found.kube.store.changed(lease, lambda new: new["spec"].update(renewTime="2001-01-01T00:00:00.000000Z"))
        newcomer = Candidate.of(found, "two", clock)
        assert not await newcomer.try_it()
        clock.at_s += TTL_S + 0.1
        assert await newcomer.try_it()


async def test_a_lease_that_was_given_up_is_free() -> None:
    async with fake_release() as found:
        clock = Time()
        assert await Candidate.of(found, "one", clock).try_it()
        lease = found.kube.store.get("Lease", LEASE)
        found.kube.store.changed(lease, lambda new: new["spec"].update(holderIdentity=""))
        assert await Candidate.of(found, "two", clock).try_it()


@pytest.mark.parametrize("is_there", [False, True])
async def test_of_many_routers_that_find_it_free_one_gets_it(is_there: bool) -> None:
    async with fake_release() as found:
        clock = Time()
        candidates = [Candidate.of(found, f"router-{number}", clock) for number in range(6)]
        if is_there:
            assert await candidates[0].try_it()
            await asyncio.gather(*(one.try_it() for one in candidates[1:]))
            clock.at_s = TTL_S + 0.1
        found.kube.order("get", "leases", delay_s=0.05, times=None)  # all read before the first one writes
        won = await asyncio.gather(*(one.try_it() for one in candidates[1:]))
        assert sum(won) == 1


async def test_a_lead_whose_answer_was_lost_is_known_at_the_next_try() -> None:
    async with fake_release() as found:
        clock = Time()
        one = Candidate.of(found, "one", clock)
        fault = found.kube.order("patch", "leases", 500, is_done=True, times=1)
        assert not await one.try_it()  # it exists already, without a holder
        assert fault.num_met == 1
        assert await one.try_it()


async def test_a_missing_lease_is_named() -> None:
    async with fake_release() as found:
        found.kube.store.delete(found.kube.store.get("Lease", LEASE))
        with pytest.raises(ActuatorError, match=f"no Lease {LEASE} in default"):
            await Candidate.of(found, "one", Time()).try_it()


async def test_what_others_wrote_on_the_lease_stays() -> None:
    async with fake_release() as found:
        lease = found.kube.store.get("Lease", LEASE)
        found.kube.store.changed(lease, lambda new: new["metadata"].update(labels={"team": "serving"}))
        assert await Candidate.of(found, "one", Time()).try_it()
        assert found.kube.store.get("Lease", LEASE)["metadata"]["labels"] == {"team": "serving"}


async def test_without_an_answer_no_router_leads() -> None:
    async with fake_release() as found:
        clock = Time()
        one = Candidate.of(found, "one", clock)
        assert await one.try_it()
        found.kube.order("patch", "leases", 500, times=None)
        with pytest.raises(ActuatorError):
            await one.try_it()
        assert not one.leads


async def test_a_stale_answer_takes_no_lead() -> None:
    async with fake_release() as found:
        clock = Time()
        one, two = (Candidate.of(found, name, clock) for name in ("one", "two"))
        assert await one.try_it()
        old = found.kube.store.revision
        assert not await two.try_it()
        clock.at_s = 14.0
        assert await one.try_it()
        clock.at_s = 16.0
        fault = found.kube.order("get", "leases", revision=old)
        assert not await two.try_it()
        assert fault.num_met == 1
        assert one.leads


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([0.0, 1.0, 4.9, 5.0, 14.9, 15.0, 15.1, 40.0]),
        st.sampled_from([None, "lost", "failed", "stale"]),
    ),
    max_size=14,
)


@settings(max_examples=25)
@given(steps=STEPS)
def test_two_routers_never_lead_at_once(steps: list[tuple[int, float, str | None]]) -> None:
    async def run() -> None:
        async with fake_release(ready=False) as found:
            clock = Time()
            candidates = [Candidate.of(found, f"router-{number}", clock) for number in range(3)]
            for number, passes_s, fault in steps:
                clock.at_s += passes_s
                ordered = _order(found, fault)
                try:
                    await candidates[number].try_it()
                except ActuatorError:
                    assert fault in ("lost", "failed")
                for one in ordered:
                    found.kube.withdraw(one)
                assert sum(one.leads for one in candidates) <= 1

    asyncio.run(run())


def _order(found: FakeRelease, fault: str | None) -> list[Fault]:
    if fault == "stale":
        return [found.kube.order("get", "leases", revision=max(found.kube.store.revision - 2, 0))]
    if fault is None:
        return []
    return [found.kube.order("patch", "leases", 500, is_done=fault == "lost", times=None)]
