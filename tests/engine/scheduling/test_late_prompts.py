"""Prompts that miss their TTFT go behind all others, wherever they are: waiting, looked up in a store, or begun; those
that no step begins in time are rejected."""

from __future__ import annotations

from concurrent.futures import Future

from engine.core.messages import EngineRequest, HoldKV, RemoteKV, StepCost, TokensEvent
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.test_external_lookup import found, seeking
from tests.engine.scheduling.test_scheduler import add, finish_all, make_scheduler, step

COST = StepCost(0.0, 0.0, 0.01)
START_S = 5.0
MAX_TOKENS = 20
"""Of a step."""


def add_now(scheduler: Scheduler, token_id: int, num_tokens: int, **fields: object) -> Request:
    """A prompt whose first token is due in a second and a half."""
    request = add(scheduler, [token_id] * num_tokens, ttft_s=1.5, **fields)  # type: ignore[arg-type]
    request.arrived_s = scheduler._now
    return request


def at_start(num_blocks: int = 64) -> Scheduler:
    scheduler = make_scheduler(num_blocks=num_blocks, budget=MAX_TOKENS)
    scheduler.step_cost = COST
    scheduler.expire(START_S)
    return scheduler


def begun_and_late(**fields: object) -> tuple[Scheduler, Request]:
    """A prompt of 45 tokens, of which 20 are computed, whose first token is overdue; 13 blocks in all."""
    scheduler = at_start(num_blocks=13)
    begun = add_now(scheduler, 2, 45, **fields)
    step(scheduler)
    scheduler.expire(START_S + 2.0)
    return scheduler, begun


def shares(scheduler: Scheduler) -> dict[str, int]:
    """What the next step computes."""
    return {share.request.request_id: share.num_tokens for share in step(scheduler).scheduled}


def looked_up(num_found: int = 0, **fields: object) -> tuple[Scheduler, Request, Request]:
    """A prompt of 60 tokens and one of 20 behind another one: a store had `num_found` blocks of the first. They have
    blocks, and wait."""
    scheduler, _ = seeking(num_blocks=64, budget=MAX_TOKENS)
    scheduler.step_cost = COST
    scheduler.expire(START_S)
    first = add(scheduler, [1] * 30)
    step(scheduler)
    found(scheduler, first, 0)
    long, short = add_now(scheduler, 2, 60, **fields), add_now(scheduler, 3, 20)
    step(scheduler)
    found(scheduler, long, num_found)
    found(scheduler, short, 0)
    return scheduler, long, short


def test_what_was_looked_up_waits_until_a_step_computes_it() -> None:
    scheduler, long, short = looked_up()
    load = scheduler.queue_load
    assert {request.status for request in (long, short)} == {RequestStatus.RUNNING}
    assert (load.num_waiting, load.num_running, load.num_prefilling) == (2, 1, 1)
    assert load.num_waiting_tokens == 80
    assert load.num_uncomputed_tokens == 10 + 80
    assert long.is_untouched
    while not long.num_computed_tokens:
        assert long.queue_s is None
        step(scheduler)
    assert not long.is_untouched


def test_a_late_prompt_that_was_looked_up_goes_behind_others_and_gives_its_blocks_back() -> None:
    scheduler, long, short = looked_up()
    scheduler.expire(START_S + 1.0)
    step(scheduler)
    assert long.is_late
    assert not short.is_late
    assert long in scheduler.waiting
    assert not scheduler.kv.block_ids(long.request_id)
    assert scheduler.counters.num_preemptions == 0, "nothing of it was computed"
    assert short.num_computed_tokens == 10
    assert scheduler.queue_load.num_uncomputed_tokens == 10, "those of the late one delay no other"
    ends = [event.request_id for event in finish_all(scheduler)]
    assert ends.index(short.request_id) < ends.index(long.request_id)


def test_what_a_store_had_of_a_late_prompt_counts_once() -> None:
    scheduler, long, _ = looked_up(num_found=2)
    scheduler.expire(START_S + 1.1)
    step(scheduler)
    assert long in scheduler.waiting
    finish_all(scheduler)
    assert (long.num_external_tokens, long.num_cached_tokens) == (8, 0)
    assert scheduler.counters.num_prefilled_tokens == 30 + 52 + 20, "its blocks were in the prefix cache"


def test_blocks_that_the_connector_knows_stay_and_the_late_prompt_goes_behind_others_all_the_same() -> None:
    scheduler, long, short = looked_up(hold_kv=HoldKV(transfer_id="t", lease_s=9.0))
    long.is_offered = True
    blocks = scheduler.kv.block_ids(long.request_id)
    scheduler.expire(START_S + 1.0)
    step(scheduler)
    assert (long.is_late, long.status) == (True, RequestStatus.RUNNING)
    assert (long.num_computed_tokens, short.num_computed_tokens) == (0, 10)
    assert scheduler.kv.block_ids(long.request_id) == blocks
    ends = [event.request_id for event in finish_all(scheduler)]
    assert ends.index(short.request_id) < ends.index(long.request_id)


def test_prompts_on_time_overtake_a_late_one_that_has_begun() -> None:
    scheduler = at_start()
    begun = add_now(scheduler, 2, 80)
    assert shares(scheduler) == {begun.request_id: 20}
    scheduler.expire(START_S + 1.0)
    new, later = add_now(scheduler, 3, 30, max_tokens=1), add_now(scheduler, 4, 150)
    assert shares(scheduler) == {new.request_id: 20}
    assert begun.is_late
    assert later.is_late
    assert scheduler.queue_load.num_uncomputed_tokens == 10, "those of late ones, begun or not, delay no other"
    assert shares(scheduler) == {new.request_id: 10, begun.request_id: 10}
    assert scheduler.kv.block_ids(begun.request_id), "it keeps what is computed"
    assert shares(scheduler) == {begun.request_id: 20}, "of the late ones that which has begun"
    assert scheduler.counters.num_preemptions == 0
    finish_all(scheduler)


def test_a_late_prompt_takes_no_blocks_from_what_its_step_computes_already() -> None:
    scheduler, begun = begun_and_late()
    stream = add_now(scheduler, 3, 15, max_tokens=30)
    step(scheduler)
    assert begun.is_late
    while stream in scheduler.running:
        scheduler.expire(START_S + 2.0)
        step(scheduler)
        assert begun.num_computed_tokens <= 40
    assert stream.finish_reason == "length"
    finish_all(scheduler)
    assert begun.finish_reason == "length"


def test_a_late_prompt_of_higher_priority_takes_no_blocks_from_a_prompt_of_its_step() -> None:
    scheduler, begun = begun_and_late(priority=1)
    other = add_now(scheduler, 3, 25, max_tokens=1)
    assert shares(scheduler) == {other.request_id: 20}
    output = scheduler.schedule()
    assert [share.request for share in output.scheduled] == [other], "12 more tokens of the late one have no room"
    assert other in scheduler.running
    assert begun.is_late


def test_a_late_prompt_of_higher_priority_takes_the_blocks_of_a_late_one_that_has_a_share() -> None:
    scheduler = at_start(num_blocks=18)
    first = add_now(scheduler, 2, 45)
    assert [shares(scheduler) for _ in range(2)] == [{first.request_id: 20}] * 2
    scheduler.expire(START_S + 2.0)
    second = add_now(scheduler, 3, 45, priority=1)
    assert shares(scheduler) == {second.request_id: 20}
    scheduler.expire(START_S + 4.0)
    assert shares(scheduler) == {second.request_id: 15}
    assert (first.is_late, second.is_late, first.status) == (True, True, RequestStatus.PREEMPTED)
    finish_all(scheduler)
    assert {first.finish_reason, second.finish_reason} == {"length"}


def test_what_a_client_has_begun_to_read_is_no_longer_late() -> None:
    scheduler, begun = begun_and_late(max_tokens=3)
    step(scheduler)
    assert begun.is_late
    while not begun.num_output_tokens:
        step(scheduler)
    assert not begun.is_late


def test_late_prompts_that_hold_all_blocks_get_on() -> None:
    scheduler, first = begun_and_late()
    second = add_now(scheduler, 3, 45)
    assert shares(scheduler) == {second.request_id: 20}
    scheduler.expire(START_S + 4.0)
    finish_all(scheduler)
    assert {first.finish_reason, second.finish_reason} == {"length"}


def test_a_stream_whose_prompt_was_late_lengthens_no_step() -> None:
    scheduler = make_scheduler(num_blocks=400, budget=100)
    scheduler.step_cost = StepCost(0.004, 0.0, 0.001)
    scheduler.expire(START_S)
    stream = add(scheduler, [2] * 5, itl_s=0.02, max_tokens=50)
    for _ in range(10):
        step(scheduler)
    prompt = add(scheduler, [3] * 500, ttft_s=1000.0)
    prompt.arrived_s = START_S
    stream.is_late = True
    assert shares(scheduler) == {stream.request_id: 1, prompt.request_id: 16}, "as long as the objective, not twice"


def overdue_at(scheduler: Scheduler, now: float) -> list[str]:
    """The requests that end at `now` because no step has begun them, while steps go on."""
    scheduler.expire(now)
    failed = [event for event in scheduler.take_events() if isinstance(event, TokensEvent) and event.error]
    assert all(event.error_kind == "no_room" and "no step began" in (event.error or "") for event in failed)
    return [event.request_id for event in failed]


def test_a_prompt_that_no_step_begins_in_time_is_rejected() -> None:
    scheduler = at_start()
    first = add_now(scheduler, 1, 140, begin_s=6.5)
    step(scheduler)
    behind = add_now(scheduler, 2, 60, begin_s=6.5)
    assert overdue_at(scheduler, START_S + 1.5) == []
    fresh = add_now(scheduler, 3, MAX_TOKENS, begin_s=6.5, max_tokens=1)
    assert shares(scheduler) == {fresh.request_id: MAX_TOKENS}
    assert behind.is_late
    assert overdue_at(scheduler, START_S + 6.4) == []
    assert overdue_at(scheduler, START_S + 6.5) == [behind.request_id]
    assert not first.is_untouched, "what has been begun goes on, however long it takes"
    ends = [event.request_id for event in finish_all(scheduler)]
    assert first.request_id in ends
    assert behind.request_id not in ends


def test_a_looked_up_prompt_that_no_step_begins_in_time_is_rejected_and_leaves_no_blocks() -> None:
    scheduler, long, short = looked_up(num_found=2, begin_s=6.5)
    assert long.status is RequestStatus.RUNNING
    assert overdue_at(scheduler, START_S + 6.5) == [long.request_id]
    assert not scheduler.kv.block_ids(long.request_id)
    assert short.request_id in [event.request_id for event in finish_all(scheduler)], "it may wait without a limit"


def test_a_prompt_whose_constraint_compiles_for_too_long_to_begin_in_time_says_so() -> None:
    scheduler = at_start()
    spec = EngineRequest(request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=1), begin_s=6.5)
    request = Request.from_spec(spec, arrival=0, fingerprint="f", grammar=Future())
    scheduler.add_request(request, START_S)
    request.arrived_s = START_S
    assert overdue_at(scheduler, START_S + 6.4) == []
    assert overdue_at(scheduler, START_S + 6.5) == ["r"]


def test_what_comes_from_another_instance_is_never_too_late_to_begin() -> None:
    """Its prompt is computed there; for its room and KV it has a reservation time."""
    scheduler = make_scheduler(num_blocks=64, budget=MAX_TOKENS)
    remote_kv = RemoteKV(transfer_id="t", reservation_s=30.0)
    reader = add(scheduler, [1] * 9, begin_s=1.0, remote_kv=remote_kv, now=START_S)
    reader.arrived_s = START_S
    assert overdue_at(scheduler, START_S + 9.0) == []
    resumed = add(scheduler, [2] * 9, begin_s=1.0, output_token_ids=[3])
    resumed.arrived_s = START_S
    assert overdue_at(scheduler, START_S + 9.0) == []


def test_under_lasting_overload_prompts_stay_on_time_and_few_wait() -> None:
    """Twice as many come as can be computed."""
    scheduler = at_start()
    step_s, arrivals, num_on_time, num_waiting = COST.per_token_s * MAX_TOKENS, {}, 0, 0
    for number in range(150):
        now = START_S + number * step_s
        scheduler.expire(now)
        for token_id in (10 + 2 * number, 11 + 2 * number):
            request = add_now(scheduler, token_id, MAX_TOKENS, begin_s=6.5, max_tokens=1)
            arrivals[request.request_id] = now
        step(scheduler)
        ended = [event for event in scheduler.take_events() if isinstance(event, TokensEvent) and not event.error]
        num_on_time += sum(now + step_s - arrivals[event.request_id] <= 1.5 for event in ended)
        num_waiting = max(num_waiting, len(scheduler.waiting))
    assert num_on_time >= 0.95 * 150
    assert num_waiting <= (6.5 + 1.5) / step_s, "one late prompt of each step, and those that can be on time"
