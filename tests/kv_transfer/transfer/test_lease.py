"""The lease table: in any order of commands and time, every transfer ends exactly once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.transfer.lease import LeaseTable

IDS = st.sampled_from(["a", "b", "c", "d"])
MAX_LEASE_S, TOMBSTONE_S, MAX_TOMBSTONES = 30.0, 1000.0, 3


class LeaseMachine(RuleBasedStateMachine):
    """Random commands against a model that only records what is held, until when, and what was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(max_lease_s=MAX_LEASE_S, tombstone_s=TOMBSTONE_S, max_tombstones=MAX_TOMBSTONES)
        self.now = 0.0
        self.held: dict[str, int] = {}  # transfer → ordinal of its offer
        self.num_offers = 0
        self.given_back: list[tuple[str, int]] = []

    def collect(self) -> None:
        for ended in self.table.take_ended():
            if ended.transfer_id in self.held:
                self.given_back.append((ended.transfer_id, self.held.pop(ended.transfer_id)))
            else:
                assert ended.ended == "released", "only a release may come before its offer"

    @rule(transfer_id=IDS, lease_s=st.floats(0.1, 100.0))
    def offer(self, transfer_id: str, lease_s: float) -> None:
        if self.table.offer(transfer_id, lease_s=lease_s, now=self.now):
            assert transfer_id not in self.held
            self.num_offers += 1
            self.held[transfer_id] = self.num_offers

    @rule(transfer_id=IDS, num_blocks=st.integers(0, 5))
    def progress(self, transfer_id: str, num_blocks: int) -> None:
        self.table.progress(transfer_id, num_blocks, now=self.now)

    @rule(transfer_id=IDS)
    def complete(self, transfer_id: str) -> None:
        self.table.progress(transfer_id, 5, is_complete=True, now=self.now)

    @rule(transfer_id=IDS)
    def fail(self, transfer_id: str) -> None:
        self.table.fail(transfer_id, "why", now=self.now)

    @rule(transfer_id=IDS, lease_s=st.floats(-1.0, 100.0))
    def attach(self, transfer_id: str, lease_s: float) -> None:
        self.table.attach(transfer_id, lease_s=lease_s, now=self.now)

    @rule(transfer_id=IDS, lease_s=st.floats(-1.0, 100.0))
    def renew(self, transfer_id: str, lease_s: float) -> None:
        self.table.renew(transfer_id, lease_s=lease_s, now=self.now)

    @rule(transfer_id=IDS)
    def release(self, transfer_id: str) -> None:
        assert self.table.release(transfer_id, now=self.now) == (transfer_id in self.held)
        assert not self.table.release(transfer_id, now=self.now)
        assert self.table.get(transfer_id) is None

    @rule(seconds=st.floats(0.0, 40.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)

    @invariant()
    def what_is_held_is_what_was_offered_and_not_given_back(self) -> None:
        self.collect()
        assert len(self.table) == len(self.held)
        assert all(self.table.get(transfer_id) is not None for transfer_id in self.held)
        assert len(self.given_back) == len(set(self.given_back))
        assert len(self.given_back) + len(self.held) == self.num_offers

    @invariant()
    def every_transfer_has_a_deadline_and_the_table_knows_the_next(self) -> None:
        self.collect()
        for transfer_id in self.held:
            lease = self.table.get(transfer_id)
            assert lease is not None
            assert lease.deadline <= self.now + MAX_LEASE_S
            assert self.table.next_deadline is not None
            assert self.table.next_deadline <= lease.deadline

    @invariant()
    def tombstones_are_bounded(self) -> None:
        assert len(self.table._tombstones) <= MAX_TOMBSTONES

    def teardown(self) -> None:
        self.table.expire(self.now + MAX_LEASE_S + 0.001)
        self.collect()
        assert not self.held, "time alone ends every transfer"


LeaseMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestLeaseMachine = LeaseMachine.TestCase


def test_release_before_the_offer_ends_it_at_once() -> None:
    table = LeaseTable()
    assert not table.release("t", now=0.0)
    assert not table.offer("t", lease_s=2.0, now=1.0)
    (ended,) = table.take_ended()
    assert (ended.transfer_id, ended.ended) == ("t", "released")
    assert len(table) == 0


def test_tombstone_is_forgotten_after_its_time() -> None:
    table = LeaseTable(tombstone_s=10.0)
    table.release("t", now=0.0)
    table.expire(10.0)
    assert table.offer("t", lease_s=2.0, now=10.0)


def test_progress_keeps_an_offer_alive_but_not_an_attached_lease() -> None:
    table = LeaseTable()
    table.offer("waiting", lease_s=2.0, now=0.0)
    table.offer("frozen", lease_s=2.0, now=0.0)
    table.attach("frozen", lease_s=2.0, now=0.0)
    for now in (1.0, 2.0, 3.0):
        table.progress("waiting", int(now), now=now)
        table.progress("frozen", int(now), now=now)
        table.expire(now)
    (ended,) = table.take_ended()
    assert (ended.transfer_id, ended.ended, ended.num_ready_blocks) == ("frozen", "expired", 2)
    assert table.get("waiting") is not None


@pytest.mark.parametrize(("lease_s", "kept_s"), [(0.0, 2.0), (-1.0, 2.0), (float("nan"), 2.0), (1e9, 30.0)])
def test_an_absurd_lease_is_bounded_and_one_of_no_length_stays_as_it_is(lease_s: float, kept_s: float) -> None:
    table = LeaseTable(max_lease_s=30.0)
    table.offer("t", lease_s=2.0, now=0.0)
    table.renew("t", lease_s=lease_s, now=0.0)
    lease = table.get("t")
    assert lease is not None
    assert lease.deadline == kept_s


def test_an_offer_without_a_length_is_held_for_the_longest_lease() -> None:
    table = LeaseTable(max_lease_s=30.0)
    table.offer("t", lease_s=0.0, now=0.0)
    assert table.next_deadline == 30.0


def test_an_id_whose_transfer_has_ended_is_not_used_again() -> None:
    table = LeaseTable()
    for transfer_id in ("released", "failed", "expired"):
        table.offer(transfer_id, lease_s=2.0, now=0.0)
    table.release("released", now=1.0)
    table.fail("failed", "why", now=1.0)
    table.expire(2.0)
    assert not any(table.offer(one.transfer_id, lease_s=2.0, now=3.0) for one in table.take_ended())


def test_the_most_that_could_be_read_is_what_a_transfer_ends_with() -> None:
    table = LeaseTable()
    table.offer("t", lease_s=2.0, now=0.0)
    for num_ready in (3, 0):  # a chunk has been computed, and no further block is saved yet
        table.progress("t", num_ready, now=1.0)
    table.release("t", now=1.0)
    assert [ended.num_ready_blocks for ended in table.take_ended()] == [3]
