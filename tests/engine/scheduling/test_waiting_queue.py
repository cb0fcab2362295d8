"""The waiting requests are in order, and a step looks at few of them, however many there are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from engine.core.messages import EngineRequest, RemoteKV, StepCost
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.waiting_queue import WaitingQueue
from tests.engine.scheduling.test_scheduler import add, make_scheduler, step

NUM_WAITING = 3000
REMOTE_KV = RemoteKV(transfer_id="t", reservation_s=5.0)


def request(arrival: int, **fields: Any) -> Request:
    spec = EngineRequest(request_id=f"r{arrival}", prompt_token_ids=[1], params=SamplingParams(), **fields)
    return Request.from_spec(spec, arrival=arrival, fingerprint="f")


@pytest.mark.parametrize("seed", range(20))
def test_requests_are_in_order_whatever_is_added_and_removed(seed: int) -> None:
    draw = random.Random(seed)
    queue, expected = WaitingQueue(), list[Request]()
    for arrival in range(300):
        match draw.choice(["add", "add", "add", "remove", "pop", "late"]):
            case "remove" if expected:
                queue.remove(expected.pop(draw.randrange(len(expected))))
            case "pop" if expected:
                index = draw.randrange(len(expected))
                assert queue.pop(index) is expected.pop(index)
            case "late" if expected:
                draw.choice(expected).is_late = True
                queue.sort()
            case _:
                fields = {"ttft_s": draw.choice([None, 1.0]), "begin_s": draw.choice([None, 9.0])}
                remote_kv = draw.choice([None, REMOTE_KV])
                expected.append(request(arrival, priority=draw.randrange(3), remote_kv=remote_kv, **fields))
                queue.add(expected[-1])
        expected.sort(key=lambda one: one.order)
        if draw.random() < 0.5:  # several removals may precede a read
            assert list(queue) == expected == [queue[index] for index in range(len(queue))]
            assert queue.num_awaiting_kv == sum(one.awaits_kv for one in expected)
            assert bool(list(queue.expiring)) == any(one.spec.begin_s for one in expected)
            assert bool(list(queue.with_ttft)) == any(one.spec.ttft_s for one in expected)


def test_a_removed_request_may_come_back() -> None:
    queue, only = WaitingQueue(), request(1)
    queue.add(only)
    queue.remove(only)
    queue.add(only)
    assert list(queue) == [only]


def test_a_request_that_does_not_wait_is_not_removed_again() -> None:
    queue, first, second = WaitingQueue(), request(1, remote_kv=REMOTE_KV), request(2, remote_kv=REMOTE_KV)
    queue.add(first)
    queue.add(second)
    for _ in range(2):
        queue.remove(first)
    assert first not in queue
    assert second in queue
    assert (list(queue), queue.num_awaiting_kv) == ([second], 1)


class CountingQueue(WaitingQueue):
    """Counts the requests at which a step looks."""

    num_read = 0

    def __iter__(self) -> Iterator[Request]:
        for one in super().__iter__():
            CountingQueue.num_read += 1
            yield one

    def __getitem__(self, index: int) -> Request:
        CountingQueue.num_read += 1
        return super().__getitem__(index)

    def sort(self) -> None:
        CountingQueue.num_read += len(self)
        super().sort()

    def _settled(self) -> list[Request]:
        CountingQueue.num_read += len(self._requests) if self._has_gaps else 0
        return super()._settled()


def num_read_in_a_step(scheduler: Scheduler) -> int:
    CountingQueue.num_read = 0
    scheduler.expire(1.0)
    step(scheduler)
    return CountingQueue.num_read


def with_streams(**fields: Any) -> Scheduler:
    """Two streams that have such fields; there is room for two requests more."""
    scheduler = make_scheduler(num_blocks=40, budget=8)
    scheduler.waiting = CountingQueue()
    scheduler.step_cost = StepCost(0.004, 0.0, 0.001)
    for _ in range(2):
        add(scheduler, [1, 2], max_tokens=60, **fields)
    step(scheduler)
    return scheduler


@pytest.mark.parametrize("fields", [{}, {"itl_s": 0.05}, {"step_stretch": 2.0}], ids=str)
def test_a_step_reads_few_of_many_waiting_requests(fields: dict[str, Any]) -> None:
    scheduler = with_streams(**fields)
    for _ in range(NUM_WAITING):
        add(scheduler, [3] * 5, max_tokens=60)
    assert num_read_in_a_step(scheduler) < 20
    while len(scheduler.running) < 4:
        step(scheduler)
    assert num_read_in_a_step(scheduler) < 20
    assert len(scheduler.waiting) > NUM_WAITING - 10


def test_a_step_reads_few_of_many_that_enter() -> None:
    """Their prompts are more than any step takes."""
    scheduler = make_scheduler(num_blocks=40, budget=8)
    scheduler.waiting = CountingQueue()
    for number in range(NUM_WAITING):
        spec = EngineRequest(
            request_id=f"c{number}", prompt_token_ids=[3] * 5, params=SamplingParams(max_tokens=60, ignore_eos=True)
        )
        grammar = Future[None]()
        grammar.set_result(None)
        one = Request.from_spec(spec, arrival=number, fingerprint="f", grammar=grammar)
        scheduler.compiling[spec.request_id] = scheduler.requests[spec.request_id] = one
    scheduler.take_compiled(0.0)
    while len(scheduler.running) < 4:
        step(scheduler)
    assert all(one.is_entering for one in scheduler.waiting)
    assert num_read_in_a_step(scheduler) < 20


@pytest.mark.parametrize(("fields", "num_tokens"), [({}, 10), ({"remote_kv": REMOTE_KV}, 0)], ids=["here", "elsewhere"])
def test_the_tokens_of_a_request_that_waits_for_its_grammar_count(fields: dict[str, Any], num_tokens: int) -> None:
    """Unless they are computed elsewhere."""
    scheduler, grammar = make_scheduler(), Future[Any]()
    spec = EngineRequest(request_id="r", prompt_token_ids=[1] * 10, params=SamplingParams(), **fields)
    scheduler.add_request(Request.from_spec(spec, arrival=1, fingerprint="f", grammar=grammar), 0.0)
    waiting = scheduler.queue_load
    assert (waiting.num_waiting_tokens, waiting.num_uncomputed_tokens) == (num_tokens, num_tokens)
    grammar.set_result(None)
    scheduler.take_compiled(1.0)
    assert scheduler.queue_load == waiting, "as without a grammar"


def test_any_number_of_aborts_reads_the_waiting_requests_once() -> None:
    scheduler = with_streams()
    requests = [add(scheduler, [3] * 5, priority=number % 3) for number in range(NUM_WAITING)]
    CountingQueue.num_read = 0
    for one in requests[1:]:
        scheduler.abort(one.request_id)
    assert CountingQueue.num_read == 0
    assert num_read_in_a_step(scheduler) < NUM_WAITING + 20
    assert num_read_in_a_step(scheduler) < 20
    assert not scheduler.waiting


def test_an_interrupted_abort_can_be_repeated() -> None:
    scheduler = with_streams()
    first, second = scheduler.running
    scheduler.running.remove(first)  # so far the first abort came
    for one in (first, second):
        scheduler.abort(one.request_id)
    assert (scheduler.requests, scheduler.running) == ({}, [])
    assert scheduler.kv.pool.num_available == scheduler.kv.num_blocks
