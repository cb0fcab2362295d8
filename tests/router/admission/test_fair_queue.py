"""The order in which waiting requests start: fair between tenants, by priority and arrival within one, bounded."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.fair_queue import OVERFLOW_FLOW, Entry, FairQueue
from router.admission.settings import TenantSettings

MAX_COST = 100


def queue_of(shares: dict[str, TenantSettings] | None = None, *, max_flows: int = 100) -> FairQueue[int]:
    known = shares or {}
    return FairQueue(lambda flow: known.get(flow, TenantSettings()), max_flows)


def push(queue: FairQueue[int], flow: str, item: int = 0, *, cost: float = 1, priority: int = 0) -> Entry[int]:
    return queue.push(flow, item, cost=cost, priority=priority)


def start_next(queue: FairQueue[int], now_s: float = 0.0) -> Entry[int]:
    entry = queue.head()
    assert entry is not None
    queue.start(entry, now_s)
    return entry


def served(queue: FairQueue[int], num: int) -> dict[str, float]:
    """How many each flow got of the next `num` starts, one in service at a time."""
    got: dict[str, float] = defaultdict(float)
    for _ in range(num):
        entry = start_next(queue)
        got[entry.flow] += entry.cost
        queue.finish(entry, entry.cost)
    return got


def test_within_a_flow_priority_goes_first_and_arrival_decides_the_rest() -> None:
    queue = queue_of()
    for item, priority in enumerate([0, 5, 0, 5, -1]):
        push(queue, "a", item, priority=priority)
    assert [start_next(queue).item for _ in range(5)] == [1, 3, 0, 2, 4]


def test_the_last_is_the_newest_of_the_lowest_priority() -> None:
    queue = queue_of()
    for item, priority in enumerate([0, 5, 0, 5]):
        push(queue, "a", item, priority=priority)
    last = queue.last("a")
    assert last is not None
    assert last.item == 2


@given(
    costs=st.lists(st.lists(st.integers(1, MAX_COST), min_size=60, max_size=60), min_size=2, max_size=4),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=4, max_size=4),
)
@settings(max_examples=60)
def test_backlogged_flows_are_never_further_apart_than_one_request_each(
    costs: list[list[int]], weights: list[float]
) -> None:
    """Theorem 1 of Goyal, Vin and Cheng: over any interval in which both are backlogged, the weighted service of two
    flows differs by at most the largest request of each over its weight."""
    flows = [f"flow-{i}" for i in range(len(costs))]
    weight = dict(zip(flows, weights, strict=False))
    queue = queue_of({flow: TenantSettings(weight=weight[flow]) for flow in flows})
    for flow, of_flow in zip(flows, costs, strict=True):
        for cost in of_flow:
            push(queue, flow, cost=cost)
    history = [dict.fromkeys(flows, 0.0)]
    while all(queue.queued_in(flow)[0] for flow in flows):
        entry = start_next(queue)
        history.append({**history[-1], entry.flow: history[-1][entry.flow] + entry.cost})
    assert len(history) > 60
    for one, other in combinations(flows, 2):
        lead = [now[one] / weight[one] - now[other] / weight[other] for now in history]
        bound = MAX_COST / weight[one] + MAX_COST / weight[other]
        assert max(lead) - min(lead) <= bound + 1e-6


def test_weights_divide_the_service() -> None:
    queue = queue_of({"big": TenantSettings(weight=3.0)})
    for _ in range(400):
        push(queue, "big", cost=7)
        push(queue, "small", cost=11)
    got = served(queue, 300)
    assert 2.8 < got["big"] / got["small"] < 3.2


def test_a_flow_that_was_idle_earns_nothing_and_owes_nothing() -> None:
    queue = queue_of()
    flood = [push(queue, "flood", cost=10) for _ in range(300)]
    assert served(queue, 100) == {"flood": 10 * 100}
    assert flood
    for _ in range(100):
        push(queue, "late", cost=10)
    got = served(queue, 100)
    assert abs(got["late"] - got["flood"]) <= 20


def test_an_underestimated_flow_pays_afterwards() -> None:
    queue = queue_of()
    for _ in range(400):
        push(queue, "modest", cost=10)
        push(queue, "liar", cost=10)
    got: dict[str, float] = defaultdict(float)
    for _ in range(300):
        entry = start_next(queue)
        actual = 50 if entry.flow == "liar" else 10
        got[entry.flow] += actual
        queue.finish(entry, actual)
    assert 0.8 < got["liar"] / got["modest"] < 1.25


def test_entries_ahead_of_one_use_up_its_flow_s_own_limits() -> None:
    for share in (TenantSettings(max_requests=2), TenantSettings(max_tokens=15)):
        queue = queue_of({"bounded": share})
        first = push(queue, "bounded", cost=5)
        assert queue.excess_behind(first) is None, "a single entry always is within them"
        start_next(queue)
        second, third = (push(queue, "bounded", cost=8) for _ in range(2))
        urgent = push(queue, "bounded", cost=8, priority=1)
        excesses = [queue.excess_behind(entry) for entry in (urgent, second, third)]
        assert excesses == ([None, *[(2, 0) if share.max_requests else (0, 14)] * 2])
        assert queue.may_start("bounded")


def test_a_flow_at_its_own_limit_delays_no_other() -> None:
    queue = queue_of({"bounded": TenantSettings(max_requests=1), "light": TenantSettings(max_tokens=15)})
    for flow in ("bounded", "light"):
        for _ in range(3):
            push(queue, flow, cost=10)
    assert {start_next(queue).flow for _ in range(2)} == {"bounded", "light"}
    assert queue.head() is None, "one more of either would exceed its share"
    push(queue, "free", cost=10)
    assert start_next(queue).flow == "free"


def test_a_request_beyond_its_flows_bound_goes_when_it_is_alone() -> None:
    queue = queue_of({"light": TenantSettings(max_tokens=5)})
    push(queue, "light", cost=10)
    assert start_next(queue).cost == 10


def test_waiting_at_its_own_bound_earns_nothing() -> None:
    queue = queue_of({"bounded": TenantSettings(max_requests=1)})
    for _ in range(200):
        push(queue, "bounded", cost=10)
    held = start_next(queue)
    for _ in range(300):
        push(queue, "free", cost=10)
    for _ in range(100):
        entry = start_next(queue)
        assert entry.flow == "free"
        queue.finish(entry, entry.cost)
    queue.finish(held, held.cost)
    got = served(queue, 100)
    assert abs(got["bounded"] - got["free"]) <= 20


def test_an_empty_queue_forgets_all_flows() -> None:
    queue = queue_of()
    entries = [push(queue, f"flow-{i}", cost=i + 1) for i in range(10)]
    queue.remove(entries.pop(), 0.0)
    for _ in entries:
        entry = start_next(queue)
        queue.finish(entry, 1000 * entry.cost)
    assert not queue._flows
    assert (queue.num_queued, queue.queued_cost, queue.num_in_service) == (0, 0, 0)


def test_strangers_cost_bounded_memory() -> None:
    queue = queue_of(max_flows=8)
    push(queue, "resident", cost=1)
    resident = start_next(queue)  # so that the rig is never empty
    for number in range(1000):
        entry = push(queue, f"stranger-{number}", cost=5)
        queue.start(entry, 0.0)
        queue.finish(entry, 500)
        assert len(queue._flows) <= 8
    waiting = [push(queue, f"waiter-{number}") for number in range(50)]
    assert len(queue._flows) <= 9
    assert sum(entry.flow == OVERFLOW_FLOW for entry in waiting) > 40
    for entry in waiting:
        queue.remove(entry, 0.0)
    queue.finish(resident, 1)
    assert (queue.num_queued, queue.num_in_service, queue._flows) == (0, 0, {})


def test_a_flow_in_debt_is_not_forgotten_while_others_are_there() -> None:
    queue = queue_of()
    push(queue, "resident", cost=1)
    start_next(queue)
    debtor = push(queue, "debtor", cost=1)
    queue.start(debtor, 0.0)
    queue.finish(debtor, 1000)
    for _ in range(50):
        push(queue, "honest", cost=10)
    push(queue, "debtor", cost=10)
    assert served(queue, 50) == {"honest": 500.0}


def test_the_predicted_wait_is_that_of_its_own_line() -> None:
    queue = queue_of()
    first = push(queue, "flood", cost=10)
    queue.wait_begins(first, 0.0)
    assert queue.predicted_wait_s(first, None) is None
    for _ in range(100):
        push(queue, "flood", cost=10)
    for step in range(1, 41):  # ten cost units each tenth of a second
        entry = start_next(queue, step / 10)
        queue.finish(entry, entry.cost)
    last = push(queue, "flood", cost=10)
    wait_s = queue.predicted_wait_s(last, None)
    assert wait_s is not None
    assert abs(wait_s - 61 * 10 / 100) < 0.3
    urgent = push(queue, "flood", cost=10, priority=1)
    assert queue.predicted_wait_s(urgent, None) == 0


def test_a_newcomers_predicted_wait_is_not_the_floods() -> None:
    queue = queue_of()
    for _ in range(500):
        push(queue, "flood", cost=10)
    served(queue, 10)
    newcomer = push(queue, "late", cost=10)
    wait_s = queue.predicted_wait_s(newcomer, 100.0)
    assert wait_s is not None
    assert wait_s < 0.5, "5 s of work are queued, but not before it"


Operation = tuple[str, int, int, int]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "start", "finish", "remove"]),
            st.integers(0, 4),
            st.integers(1, 50),
            st.integers(-2, 2),
        ),
        max_size=120,
    )
)
@settings(max_examples=150)
def test_whatever_happens_the_sums_are_right_and_everything_ends(operations: list[Operation]) -> None:
    queue = queue_of(
        {"flow-0": TenantSettings(weight=2.0, max_requests=2), "flow-1": TenantSettings(weight=0.5, max_tokens=60)},
        max_flows=4,
    )
    queued: list[Entry[int]] = []
    running: list[Entry[int]] = []
    for number, (what, which, cost, priority) in enumerate(operations):
        if what == "push":
            queued.append(push(queue, f"flow-{which}", number, cost=cost, priority=priority))
        elif what == "remove" and queued:
            queue.remove(queued.pop(which % len(queued)), number)
        elif what == "start" and (head := queue.head()) is not None:
            ahead = [e for e in queued if e.flow == head.flow and (-e.priority, e.item) < (-head.priority, head.item)]
            assert ahead == []
            queue.start(head, number)
            queued.remove(head)
            running.append(head)
        elif what == "finish" and running:
            entry = running.pop(which % len(running))
            queue.finish(entry, entry.cost + priority)
        assert queue.num_queued == len(queued)
        assert queue.queued_cost == sum(entry.cost for entry in queued)
        assert queue.num_in_service == len(running)
        assert len(queue._flows) <= 5
    while queued or running:
        if (head := queue.head()) is not None:
            queue.start(head, 1e6)
            queued.remove(head)
            running.append(head)
        else:
            assert running, "entries wait, none runs, and none may start"
            entry = running.pop()
            queue.finish(entry, entry.cost)
    assert not queue._flows


def test_an_entry_that_is_queued_again_goes_first_in_its_flow_and_in_the_order_of_its_return() -> None:
    queue = queue_of()
    for item in range(2):
        push(queue, "a", item)
    running = [start_next(queue), start_next(queue)]
    push(queue, "a", 9, priority=5)
    for entry in running:
        queue.requeue(entry, 0.0)
    assert (queue.num_queued, queue.num_in_service) == (3, 0)
    last = queue.last("a")
    assert last is not None
    assert last.item == 9, "what has run is never displaced by what has not"
    assert queue.num_ahead(push(queue, "a", 10)) == 3
    assert [start_next(queue).item for _ in range(4)] == [0, 1, 9, 10]


def test_each_start_is_charged() -> None:
    queue = queue_of()
    for flow in "ab":
        push(queue, flow, cost=10)
    entry, _ = start_next(queue), start_next(queue)
    queue.requeue(entry, 0.0)
    queue.start(entry, 0.0)
    for flow in "ab":
        push(queue, flow)
    assert (entry.flow, start_next(queue).flow) == ("a", "b")


def test_the_startable_cost_is_what_the_flows_own_limits_leave_room_for() -> None:
    shares = {"one": TenantSettings(max_requests=3), "tokens": TenantSettings(max_tokens=25)}
    shares["wide"] = TenantSettings(max_requests=9)
    of_any = (40, 30, 10)
    for flow, (of_none, of_one, of_three) in {
        "any": of_any, "wide": of_any, "one": (30, 20, 0), "tokens": (25, 15, 0),
    }.items():  # fmt: skip
        queue = queue_of(shares)
        for _ in range(4):
            push(queue, flow, cost=10)
        assert queue.startable_cost == of_none
        start_next(queue)
        assert queue.startable_cost == of_one
        for entry in list(queue._backlogged[flow].lines[False, 0])[:2]:
            queue.start(entry, 0.0)
        assert queue.startable_cost == of_three


def test_a_single_entry_may_always_start() -> None:
    queue = queue_of({"tokens": TenantSettings(max_tokens=5)})
    push(queue, "tokens", cost=10)
    push(queue, "tokens", cost=10)
    assert queue.startable_cost == 10
