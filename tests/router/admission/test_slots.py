"""Whose streams pause for whom: pure decisions over what is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from router.admission.capacity import Charge, Limits, Usage
from router.admission.fair_queue import Entry, Excess
from router.admission.settings import AdmissionSettings, TenantSettings
from router.admission.slots import TenantShares, Ticket

NOW_S = 100.0
LIMITS = Limits(num_requests=1000, num_sequences=8)
ONE, TEN = Excess(1, 0), Excess(10, 0)
SLOT = Charge(num_sequences=1, num_tokens=20, num_blocks=2, num_prefill_tokens=10)


@dataclass
class House:
    """Requests in flight, and who may take what."""

    weights: dict[str, float] = field(default_factory=dict)
    in_use: Usage = field(default_factory=Usage)
    max_tenants: int = 2

    def __post_init__(self) -> None:
        tenants = {name: TenantSettings(weight=weight) for name, weight in self.weights.items()}
        self.shares = TenantShares(AdmissionSettings(tenants=tenants, yield_after_s=1.0, max_tenants=self.max_tenants))

    def start(
        self,
        tenant: str,
        num: int,
        *,
        age_s: float = 50.0,
        prefill_s: float = 0.0,
        emitted: int = 5,
        charge: Charge = SLOT,
        max_tokens: int = 10,
    ) -> None:
        for _ in range(num):
            ticket = Ticket(charge, max_tokens, lambda: emitted, in_flight=True, started_s=NOW_S - age_s)
            ticket.prefilled, ticket.prefill_s = emitted > 0, prefill_s
            self.shares.add(Entry(ticket, tenant, charge.num_tokens, 0))
            self.in_use.add(charge)
            if ticket.prefilled:
                self.in_use.prefilled(charge)

    def yielding(self, tenant: str, charge: Charge = SLOT, limits: Limits = LIMITS) -> list[str]:
        return [one.flow for one in self.shares.yielding_to(tenant, charge, self.in_use, limits, NOW_S)]


def test_a_stream_of_the_tenant_with_most_pauses() -> None:
    house = House()
    house.start("greedy", 6)
    house.start("middle", 2)
    assert house.yielding("modest") == ["greedy"]
    assert house.yielding("middle") == ["greedy"]


def test_nothing_pauses_while_there_is_room_or_no_tenant_has_more() -> None:
    house = House()
    house.start("greedy", 7)
    assert house.yielding("modest") == []
    house.start("greedy", 1)
    assert house.yielding("greedy") == []
    balanced = House()
    balanced.start("a", 4)
    balanced.start("b", 4)
    assert balanced.yielding("a") == balanced.yielding("b") == []


def test_two_tenants_never_take_slots_from_each_other_in_turn() -> None:
    house = House()
    house.start("a", 5)
    house.start("b", 3)
    assert house.yielding("b") == ["a"]
    after = House()
    after.start("a", 4)
    after.start("b", 4)
    assert after.yielding("a") == []
    odd = House()
    odd.start("a", 4)
    odd.start("b", 3)
    limits = Limits(num_sequences=7)
    assert odd.yielding("b", limits=limits) == [], "then b would have more than a"


def test_weights_shift_the_shares() -> None:
    house = House({"gold": 3.0})
    house.start("gold", 5)
    house.start("iron", 3)
    assert house.yielding("gold") == ["iron"]
    house = House({"gold": 3.0})
    house.start("gold", 6)
    house.start("iron", 2)
    assert house.yielding("gold") == house.yielding("iron") == []


def test_a_request_of_several_choices_takes_as_many_slots_or_none() -> None:
    pair = SLOT._replace(num_sequences=2)
    house = House()
    house.start("greedy", 8)
    assert house.yielding("modest", pair) == ["greedy", "greedy"]
    assert house.yielding("modest", SLOT._replace(num_sequences=5)) == []


def test_the_scarcest_resource_decides() -> None:
    big = SLOT._replace(num_blocks=30)
    limits = Limits(num_sequences=100, num_blocks=100)
    house = House()
    house.start("long context", 3, charge=big)
    house.start("short", 5)
    assert house.yielding("short", limits=limits) == ["long context"], "it has fewer choices but most of the blocks"


def test_only_streams_that_have_run_and_got_on_pause_the_longest_running_first() -> None:
    house = House()
    house.start("greedy", 4, age_s=0.5)
    house.start("greedy", 4, emitted=0)
    assert house.yielding("modest") == []
    house = House()
    house.start("greedy", 1, age_s=70.0)
    house.start("greedy", 7)
    (first,) = house.shares.yielding_to("modest", SLOT, house.in_use, LIMITS, NOW_S)
    assert first.item.started_s == NOW_S - 70.0


def test_what_waits_for_prompts_makes_nothing_pause() -> None:
    house = House()
    house.start("greedy", 8)
    house.start("modest", 1, emitted=0)
    assert house.yielding("modest", limits=Limits(num_sequences=8, num_prefill_tokens=10)) == []


def test_the_next_end_is_expected_by_lengths_and_once_one_has_ended_by_the_silence() -> None:
    house = House()
    expects_20 = SLOT._replace(num_tokens=30)
    house.start("greedy", 2, age_s=20.0, prefill_s=4.0, emitted=8, charge=expects_20, max_tokens=50)  # 12 at 2 s
    house.start("greedy", 1, age_s=31.0, prefill_s=4.0, emitted=18, charge=expects_20, max_tokens=20)  # 2 at 1.5 s
    two_choices = SLOT._replace(num_sequences=2)
    house.start("new", 1, emitted=7)
    house.start("new", 1, emitted=15, charge=two_choices)
    end_s = [house.shares.next_end_s(Excess(number, 0), NOW_S, of="greedy") for number in (1, 2, 3, 10)]
    assert [round(one, 2) for one in end_s] == [3.0, 24.0, 24.0, 24.0]
    end_s_by_cost = [house.shares.next_end_s(Excess(0, cost), NOW_S, of="greedy") for cost in (1, 30, 31, 999)]
    assert [round(one, 2) for one in end_s_by_cost] == [3.0, 3.0, 24.0, 24.0]
    assert house.shares.next_end_s(ONE, NOW_S, of="new") == 0.0
    ended = Entry(Ticket(SLOT, 10, lambda: 3, prefilled=True), "new", 20, 0)
    house.shares.add(ended)
    house.shares.remove(ended, ended_s=NOW_S - 7.0)
    assert house.shares.next_end_s(TEN, NOW_S, of=None) == 7.0
    assert house.shares.next_end_s(ONE, NOW_S, of="greedy") == end_s[0]
    house.start("greedy", 1, age_s=3.0)
    assert house.shares.next_end_s(TEN, NOW_S, of=None) == 3.0, "a slot was free until then"
    assert house.shares.next_end_s(TEN, NOW_S, of="new") == 7.0


def test_a_stream_that_reaches_its_expected_length_is_probably_a_longer_one() -> None:
    house, expects_20 = House(), SLOT._replace(num_tokens=30)
    house.start("a", 1, age_s=31.0, prefill_s=4.0, emitted=18, charge=expects_20, max_tokens=100)
    assert house.shares.next_end_s(ONE, NOW_S, of="a") == 27.0, "as many tokens as there are, at 1.5 s"


def test_few_idle_tenants_are_kept_and_none_when_all_are_idle() -> None:
    house = House()
    entries = [Entry(Ticket(SLOT, 10, prefilled=True), f"tenant-{number}", 20, 0) for number in range(5)]
    for entry in entries:
        house.shares.add(entry)
    for entry in entries[:-1]:
        house.shares.remove(entry, ended_s=NOW_S)
        assert house.shares.part(entry.flow, LIMITS) == 0.0
    assert len(house.shares._holdings) == 2
    house.shares.remove(entries[-1], ended_s=NOW_S)
    assert not house.shares._holdings


def test_the_work_grows_with_the_tenants_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    num_parts = 0
    part_of = Usage.part_of

    def counted(usage: Usage, limits: Limits) -> float:
        nonlocal num_parts
        num_parts += 1
        return part_of(usage, limits)

    house, num_tenants = House(), 300
    large = SLOT._replace(num_sequences=2)
    for number in range(num_tenants):
        house.start(f"tenant {number}", 1, charge=large)
    limits = Limits(num_requests=1000, num_sequences=2 * num_tenants)
    monkeypatch.setattr(Usage, "part_of", counted)
    assert house.yielding("modest", limits=limits) == [], "each would be left with less than the newcomer"
    assert num_parts <= 3 * num_tenants
    num_parts = 0
    assert house.yielding("modest", limits=Limits(num_sequences=2 * num_tenants + 1)) == []
    assert not num_parts, "it fits"


def test_idle_tenants_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their last ends are known, and none of them has a stream to give."""
    house, num_parts, part_of = House(max_tenants=300), 0, Usage.part_of
    house.start("busy", 8)
    for number in range(300):
        entry = Entry(Ticket(SLOT, 10, prefilled=True), f"idle-{number}", 20, 0)
        house.shares.add(entry)
        house.shares.remove(entry, ended_s=NOW_S)

    def counted(usage: Usage, limits: Limits) -> float:
        nonlocal num_parts
        num_parts += 1
        return part_of(usage, limits)

    monkeypatch.setattr(Usage, "part_of", counted)
    assert house.yielding("modest") == ["busy"]
    assert num_parts < 10
