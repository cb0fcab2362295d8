"""Who there is to be in a stack's pools, whatever is asked for in whatever order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.roster import MAX_SIZE, Role, Roster, Seat, SizeRefused

PORTS = itertools.count(1)


def new_address(taken: Collection[str]) -> str:
    address = f"h:{next(PORTS)}"
    assert address not in taken
    return address


def roster(num_prefill: int = 1, num_decode: int = 1, *, needs_prefill: bool = False) -> Roster:
    sizes: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode}
    seats = [Seat(f"{role}-{number}", role, new_address(())) for role, size in sizes.items() for number in range(size)]
    return Roster(seats, new_address, needs_prefill=needs_prefill)


def names(told: Roster, role: Role = "decode") -> list[str]:
    return [seat.name for seat in told.seating.pool(role)]


def test_those_that_are_named_go_first_and_then_the_youngest() -> None:
    told = roster(num_decode=5)
    address = {seat.name: seat.address for seat in told.seating.seats}
    assert told.resize("decode", 2, [address["decode-3"], "somebody:1", address["decode-0"]]) == 5
    assert names(told) == ["decode-1", "decode-2"]
    assert {seat.name for seat in told.seating.leaving} == {"decode-0", "decode-3", "decode-4"}


def test_more_are_named_than_have_to_go() -> None:
    told = roster(num_decode=3)
    told.resize("decode", 2, [seat.address for seat in told.seating.pool("decode")])
    assert names(told) == ["decode-1", "decode-2"]


def test_a_name_is_free_when_its_process_is_gone_and_not_before() -> None:
    told = roster(num_decode=2)
    told.resize("decode", 1)
    told.resize("decode", 2)
    assert names(told) == ["decode-0", "decode-2"]
    told.vacate("decode-1")
    told.resize("decode", 3)
    assert names(told) == ["decode-0", "decode-2", "decode-1"]


def test_one_that_cannot_be_had_is_given_up_unless_its_pool_needs_it() -> None:
    told = roster(num_decode=2)
    assert told.give_up("decode-1")
    assert not told.give_up("decode-0")
    assert names(told) == ["decode-0"]


@pytest.mark.parametrize(
    ("role", "size", "needs_prefill", "allowed"),
    [
        ("decode", 0, False, r"1\.\.64"),
        ("decode", 65, False, r"1\.\.64"),
        ("prefill", -1, False, r"0\.\.64"),
        ("prefill", 0, True, r"1\.\.64 instances, since every request is handed over"),
    ],
)
def test_sizes_that_cannot_be_are_refused(role: Role, size: int, needs_prefill: bool, allowed: str) -> None:
    told = roster(needs_prefill=needs_prefill)
    before = told.seating
    with pytest.raises(SizeRefused, match=allowed):
        told.resize(role, size)
    assert told.seating is before


def test_whoever_waits_hears_of_a_change_and_is_woken_to_leave() -> None:
    told = roster()
    version = told.seating.version
    heard: list[object] = []
    gone = threading.Event()

    def listen() -> None:
        heard.append(told.wait(version, unless=gone.is_set))
        heard.append(told.wait(told.seating.version, unless=gone.is_set))

    listener = threading.Thread(target=listen)
    listener.start()
    told.resize("decode", 2)
    gone.set()
    told.wake()
    listener.join(20)
    assert not listener.is_alive()
    assert heard[-1] is None


class Resizing(RuleBasedStateMachine):
    """Resizes in any order, with processes that take their time to go."""

    @initialize(num_prefill=st.integers(0, 3), num_decode=st.integers(1, 3))
    def begin(self, num_prefill: int, num_decode: int) -> None:
        self.roster = roster(num_prefill, num_decode)
        self.wanted: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode}

    @rule(role=st.sampled_from(["prefill", "decode"]), size=st.integers(-1, MAX_SIZE + 1), data=st.data())
    def resize(self, role: Role, size: int, data: st.DataObject) -> None:
        addresses = [seat.address for seat in self.roster.seating.pool(role)] + ["nobody:1"]
        victims = data.draw(st.lists(st.sampled_from(addresses), max_size=4))
        before = {seat.address for seat in self.roster.seating.pool(role)}
        try:
            assert self.roster.resize(role, size, victims) == self.wanted[role]
        except SizeRefused:
            assert not (0 if role == "prefill" else 1) <= size <= MAX_SIZE
            return
        gone = before - {seat.address for seat in self.roster.seating.pool(role)}
        assert len(gone) == max(self.wanted[role] - size, 0)
        assert gone <= set(victims) or set(victims) & before <= gone
        self.wanted[role] = size

    @rule(data=st.data())
    def a_process_ends(self, data: st.DataObject) -> None:
        leaving = self.roster.seating.leaving
        if leaving:
            self.roster.vacate(data.draw(st.sampled_from(leaving)).name)

    @invariant()
    def everybody_has_a_name_and_an_address_of_his_own(self) -> None:
        seating = self.roster.seating
        everybody = [*seating.seats, *seating.leaving]
        assert len({seat.name for seat in everybody}) == len({seat.address for seat in everybody}) == len(everybody)
        assert {role: len(seating.pool(role)) for role in self.wanted} == self.wanted
        assert all(seat.name.startswith(seat.role) for seat in everybody)


TestResizing = Resizing.TestCase
