"""Requests that wait for their grammar, and how they enter beside others."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from engine.core.messages import EngineRequest, RemoteKV, StepCost
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.test_scheduler import add, make_scheduler, step


def test_a_request_that_waits_for_its_grammar_keeps_its_reservation_waiting() -> None:
    scheduler, grammar = make_scheduler(), Future[Any]()
    remote_kv = RemoteKV(transfer_id="a", reservation_s=5.0)
    spec = EngineRequest(request_id="r", prompt_token_ids=[1] * 10, params=SamplingParams(), remote_kv=remote_kv)
    scheduler.add_request(Request.from_spec(spec, arrival=1, fingerprint="f", grammar=grammar), 0.0)
    assert scheduler.queue_load.num_without_room == 1
    grammar.set_result(None)
    scheduler.take_compiled(30.0)
    step(scheduler)
    assert (scheduler.queue_load.num_without_room, list(scheduler.loading)) == (0, ["r"])
    scheduler.expire(34.9)
    assert "r" in scheduler.requests


def test_compiled_requests_enter_one_a_step_beside_streams_and_do_not_expire() -> None:
    scheduler, grammar = make_scheduler(), Future[Any]()
    stream = add(scheduler, [1], max_tokens=30)
    step(scheduler)
    for arrival in range(3):
        spec = EngineRequest(request_id=f"g{arrival}", prompt_token_ids=[1] * 2, params=SamplingParams(max_tokens=1))
        scheduler.add_request(Request.from_spec(spec, arrival=100 + arrival, fingerprint="f", grammar=grammar), 0.0)
    grammar.set_result(None)
    for number in range(2):
        scheduler.take_compiled(0.0)
        scheduler.expire(1e6)
        shares = step(scheduler).scheduled
        assert [share.request.request_id for share in shares] == [stream.request_id, f"g{number}"]
    scheduler.abort(stream.request_id)
    scheduler.take_compiled(0.0)
    assert [share.request.request_id for share in step(scheduler).scheduled] == ["g2"]
    assert not scheduler.requests


def test_prompts_that_have_waited_for_a_grammar_are_cut_beside_streams_unless_others_wait_too() -> None:
    scheduler = make_scheduler(64, budget=100)

    def enter(request_id: str, token_id: int) -> None:
        grammar, params = Future[Any](), SamplingParams(max_tokens=2)
        spec = EngineRequest(request_id=request_id, prompt_token_ids=[token_id] * 40, params=params)
        scheduler.add_request(Request.from_spec(spec, arrival=100, fingerprint="f", grammar=grammar), 0.0)
        grammar.set_result(None)
        scheduler.take_compiled(0.0)

    def shares() -> list[int]:
        return [share.num_tokens for share in step(scheduler).scheduled]

    enter("alone", 5)
    assert shares() == [40]
    scheduler.abort("alone")
    add(scheduler, [2], max_tokens=30)
    step(scheduler)
    enter("a", 6)
    assert [shares() for _ in range(4)] == [[1, 16], [1, 16], [1, 8], [1, 1]]
    enter("b", 7)
    add(scheduler, [3] * 20, max_tokens=30)
    assert sorted(shares()) == [1, 20, 40]


def add_compiled(scheduler: Scheduler, number: int, **fields: Any) -> None:
    grammar = Future[Any]()
    grammar.set_result(None)
    spec = EngineRequest(request_id=f"g{number}", prompt_token_ids=[1] * 40, params=SamplingParams(), **fields)
    request = Request.from_spec(spec, arrival=100 + number, fingerprint="f", grammar=grammar)
    request.is_replayed = False
    scheduler.add_request(request, 0.0)
    request.is_replayed = True


def test_compiled_requests_whose_kv_comes_from_elsewhere_lengthen_no_step_by_their_prompts() -> None:
    scheduler = make_scheduler(64, budget=100)
    scheduler.step_cost = StepCost(0.01, 0.0001, 0.001)
    add(scheduler, [1], max_tokens=30)
    step(scheduler)
    for number in range(3):
        add_compiled(scheduler, number, remote_kv=RemoteKV(transfer_id=f"t{number}", reservation_s=5.0))
    scheduler.take_compiled(0.0)
    assert not scheduler.compiling


def test_compiled_requests_enter_at_once_beside_prompts_that_are_no_streams_yet() -> None:
    scheduler = make_scheduler(64, budget=8)
    add(scheduler, [1] * 30)
    step(scheduler)
    for number in range(3):
        add_compiled(scheduler, number)
    scheduler.take_compiled(0.0)
    assert not scheduler.compiling


def test_what_is_replayed_into_a_grammar_has_no_time_limit_there() -> None:
    scheduler, compiled = make_scheduler(), Future[Any]()
    for request_id, grammar in (("compiles", Future[Any]()), ("replays", compiled)):
        params = SamplingParams(max_tokens=2)
        spec = EngineRequest(request_id=request_id, prompt_token_ids=[1], output_token_ids=[2], params=params)
        scheduler.add_request(Request.from_spec(spec, arrival=1, fingerprint="f", grammar=grammar), 0.0)
    compiled.set_result(None)
    scheduler.expire(1e6)
    assert list(scheduler.requests) == ["replays"]


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_enters_no_step() -> None:
    scheduler, grammar = make_scheduler(), Future[Any]()
    spec = EngineRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams())
    scheduler.add_request(Request.from_spec(spec, arrival=1, fingerprint="f", grammar=grammar), 0.0)
    scheduler.abort("r")
    grammar.set_result(None)
    scheduler.take_compiled(0.0)
    assert not step(scheduler).scheduled


def test_what_is_computed_elsewhere_does_not_unbind_the_prompts_that_have_waited_for_a_grammar() -> None:
    scheduler = make_scheduler(64, budget=100, max_num_seqs=2)
    add(scheduler, [2], max_tokens=30)
    step(scheduler)
    add_compiled(scheduler, 0)
    scheduler.take_compiled(0.0)
    add(scheduler, [3] * 40, remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0), priority=-1)
    assert [share.num_tokens for share in step(scheduler).scheduled] == [1, 16]
