"""The desired state of pools under resizes in any order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.local_stack.desired_state import MAX_SIZE, DesiredInstance, DesiredState, InvalidSize, Role

PORTS = itertools.count(1)
SIZES = st.integers(-1, 6) | st.integers(MAX_SIZE - 1, MAX_SIZE + 1)


def new_address(taken: Collection[str]) -> str:
    address = f"h:{next(PORTS)}"
    assert address not in taken
    return address


def make_state(num_prefill: int = 1, num_decode: int = 1, *, needs_prefill: bool = False) -> DesiredState:
    sizes: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode}
    instances = [
        DesiredInstance(f"{role}-{number}", role, new_address(()))
        for role, size in sizes.items()
        for number in range(size)
    ]
    return DesiredState(instances, new_address, needs_prefill=needs_prefill)


def names(state: DesiredState, role: Role = "decode") -> list[str]:
    return [instance.name for instance in state.snapshot.pool(role)]


def test_victims_are_removed_first_and_then_the_youngest() -> None:
    state = make_state(num_decode=5)
    address = {instance.name: instance.address for instance in state.snapshot.instances}
    assert state.resize("decode", 2, [address["decode-3"], "unknown:1", address["decode-0"]]) == 5
    assert names(state) == ["decode-1", "decode-2"]
    assert {instance.name for instance in state.snapshot.leaving} == {"decode-0", "decode-3", "decode-4"}


def test_surplus_victims_stay() -> None:
    state = make_state(num_decode=3)
    state.resize("decode", 2, [instance.address for instance in state.snapshot.pool("decode")])
    assert names(state) == ["decode-1", "decode-2"]


def test_a_name_is_free_when_its_process_is_gone_and_not_before() -> None:
    state = make_state(num_decode=2)
    state.resize("decode", 1)
    state.resize("decode", 2)
    assert names(state) == ["decode-0", "decode-2"]
    state.release("decode-1")
    state.resize("decode", 3)
    assert names(state) == ["decode-0", "decode-2", "decode-1"]


def test_an_instance_that_cannot_start_is_dropped_unless_its_pool_needs_it() -> None:
    state = make_state(num_decode=2)
    assert state.drop("decode-1")
    assert not state.drop("decode-0")
    assert names(state) == ["decode-0"]


@pytest.mark.parametrize(
    ("role", "size", "needs_prefill", "allowed"),
    [
        ("decode", 0, False, "decode must be between 1 and 64"),
        ("decode", 65, False, "decode must be between 1 and 64"),
        ("prefill", -1, False, "prefill must be between 0 and 64"),
        ("prefill", 0, True, "prefill must be between 1 and 64 with disaggregation 'always'"),
    ],
)
def test_invalid_sizes_are_rejected(role: Role, size: int, needs_prefill: bool, allowed: str) -> None:
    state = make_state(needs_prefill=needs_prefill)
    before = state.snapshot
    with pytest.raises(InvalidSize, match=allowed):
        state.resize(role, size)
    assert state.snapshot is before


def test_a_pool_of_another_size_than_the_caller_assumed_keeps_it() -> None:
    state = make_state(num_decode=3)
    before = state.snapshot
    with pytest.raises(InvalidSize, match="the decode pool was resized from 2 to 3 meanwhile, and keeps that size"):
        state.resize("decode", 1, (), 2)
    assert state.resize("decode", 3, (), 2) == 3
    assert state.snapshot is before
    assert state.resize("decode", 1, (), 3) == 3


def test_a_stack_whose_instances_have_no_connector_gets_no_prefill_instance() -> None:
    state = DesiredState([DesiredInstance("decode-0", "decode", new_address(()))], new_address, has_connector=False)
    with pytest.raises(InvalidSize, match=r"prefill must be 0, not 1: .* start the stack with --prefill 1"):
        state.resize("prefill", 1)
    assert state.resize("prefill", 0) == 0
    assert state.resize("decode", 2) == 1


def test_wait_returns_a_change_and_ends_on_notify() -> None:
    state = make_state()
    version = state.snapshot.version
    received: list[object] = []
    gone = threading.Event()

    def listen() -> None:
        received.append(state.wait(version, unless=gone.is_set))
        received.append(state.wait(state.snapshot.version, unless=gone.is_set))

    listener = threading.Thread(target=listen)
    listener.start()
    state.resize("decode", 2)
    gone.set()
    state.notify()
    listener.join(20)
    assert not listener.is_alive()
    assert received[-1] is None


class Resizing(RuleBasedStateMachine):
    """Resizes in any order, with processes that take their time to go."""

    @initialize(num_prefill=st.integers(0, 3), num_decode=st.integers(1, 3))
    def begin(self, num_prefill: int, num_decode: int) -> None:
        self.state = make_state(num_prefill, num_decode)
        self.sizes: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode}

    @rule(role=st.sampled_from(["prefill", "decode"]), size=SIZES, data=st.data())
    def resize(self, role: Role, size: int, data: st.DataObject) -> None:
        addresses = [instance.address for instance in self.state.snapshot.pool(role)] + ["unknown:1"]
        victims = data.draw(st.lists(st.sampled_from(addresses), max_size=4))
        before = {instance.address for instance in self.state.snapshot.pool(role)}
        try:
            assert self.state.resize(role, size, victims) == self.sizes[role]
        except InvalidSize:
            assert not (0 if role == "prefill" else 1) <= size <= MAX_SIZE
            return
        gone = before - {instance.address for instance in self.state.snapshot.pool(role)}
        assert len(gone) == max(self.sizes[role] - size, 0)
        assert gone <= set(victims) or set(victims) & before <= gone
        self.sizes[role] = size

    @rule(data=st.data())
    def process_ends(self, data: st.DataObject) -> None:
        leaving = self.state.snapshot.leaving
        if leaving:
            self.state.release(data.draw(st.sampled_from(leaving)).name)

    @invariant()
    def names_and_addresses_are_unique(self) -> None:
        snapshot = self.state.snapshot
        known = [*snapshot.instances, *snapshot.leaving]
        assert len({instance.name for instance in known}) == len({instance.address for instance in known}) == len(known)
        assert {role: len(snapshot.pool(role)) for role in self.sizes} == self.sizes
        assert all(instance.name.startswith(instance.role) for instance in known)


TestResizing = Resizing.TestCase
TestResizing.settings = settings(max_examples=50)
