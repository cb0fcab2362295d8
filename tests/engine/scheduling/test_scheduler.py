"""The scheduler without a model: with any requests the budget holds, blocks add up and all requests finish."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core.messages import EngineRequest, HoldKV, LoadedEvent, RemoteKV, ReservedEvent, StepCost, TokensEvent
from engine.kv_connector import KVLoadResult, NullKVConnector
from engine.sampling.params import SamplingParams
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import Sampled, SchedulerOutput

BLOCK_SIZE = 4
_ids = itertools.count()


class HoldingConnector(NullKVConnector):
    """A connector whose I/O takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__(wake=lambda: None)
        self.finished: dict[str, Request] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return request.num_initial_tokens - num_computed_tokens if request.spec.remote_kv else 0

    def request_finished(self, request: Request, block_ids: object) -> bool:
        del block_ids
        self.finished[request.request_id] = request
        return request.spec.hold_kv is not None


def make_scheduler(num_blocks: int = 16, *, max_num_seqs: int = 4, budget: int = 8, held: float = 0.5) -> Scheduler:
    config = EngineConfig(
        model="",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_held_fraction=held,
        block_size=BLOCK_SIZE,
    )
    max_model_len = num_blocks * BLOCK_SIZE
    kv = KVCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=True,
    )
    return Scheduler(config, kv, HoldingConnector(), max_model_len)


def add(scheduler: Scheduler, prompt: list[int], *, max_tokens: int = 4, now: float = 0.0, **fields: object) -> Request:
    number = next(_ids)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    spec = EngineRequest(request_id=f"r{number}", prompt_token_ids=prompt, params=params, **fields)  # type: ignore[arg-type]
    request = Request.from_spec(spec, arrival=number, fingerprint="f")
    scheduler.add_request(request, now)
    return request


def step(scheduler: Scheduler, token_id: int = 1) -> SchedulerOutput:
    output = scheduler.schedule()
    check_blocks(scheduler)
    drawn = Sampled({share.request.request_id: [token_id] for share in output.scheduled if share.samples})
    scheduler.update_from_output(output, drawn)
    check_blocks(scheduler)
    return output


def check_blocks(scheduler: Scheduler) -> None:
    """Every block is held, in a table, cached or free, and tables are long enough for what is computed."""
    kv = scheduler.kv
    held = {block.block_id for blocks in scheduler.held.values() for block in blocks}
    tables = {block_id for request_id in scheduler.requests for block_id in kv.block_ids(request_id)}
    assert kv.num_blocks - kv.pool.num_available == len(held | tables)
    for request in [*scheduler.running, *scheduler.loading.values()]:
        block_ids = kv.block_ids(request.request_id)
        assert len(block_ids) * BLOCK_SIZE >= request.num_computed_tokens
        row = kv.block_tables[kv.rows[request.request_id], : len(block_ids)]
        assert row.tolist() == block_ids


def finish_all(scheduler: Scheduler, limit: int = 2000) -> list[TokensEvent]:
    ends = []
    for _ in range(limit):
        step(scheduler)
        ends += [event for event in scheduler.take_events() if isinstance(event, TokensEvent) and event.finish_reason]
        if not scheduler.requests:
            return ends
    raise AssertionError(f"{len(scheduler.requests)} requests do not finish")


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(16, 40),
    st.integers(1, 30),
)
def test_all_requests_finish_with_max_tokens(shapes: list[tuple[int, int, int]], num_blocks: int, budget: int) -> None:
    scheduler = make_scheduler(num_blocks, budget=budget)
    requests = [add(scheduler, [fill] * length, max_tokens=tokens) for length, tokens, fill in shapes]
    scheduled_most = 0
    while scheduler.requests:
        scheduled_most = max(scheduled_most, step(scheduler).num_tokens)
    assert scheduled_most <= budget
    for request, (length, tokens, _) in zip(requests, shapes, strict=True):
        expected = min(tokens, scheduler.max_model_len - length)
        assert (request.num_output_tokens, request.finish_reason) == (expected, "length")
    assert scheduler.kv.pool.num_available == num_blocks


def test_a_long_prompt_is_cut_into_chunks_while_others_go_on() -> None:
    scheduler = make_scheduler(budget=8)
    short = add(scheduler, [1, 2], max_tokens=10)
    step(scheduler)
    add(scheduler, list(range(10, 40)))
    output = step(scheduler)
    assert [(share.request is short, share.num_tokens) for share in output.scheduled] == [(True, 1), (False, 7)]


def test_a_stream_that_joined_behind_a_long_prefill_gets_a_token_in_every_step() -> None:
    scheduler = make_scheduler(num_blocks=40, budget=8)
    prompt = add(scheduler, list(range(10, 74)))
    late = add(scheduler, [2] * 10, max_tokens=6, remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0))
    step(scheduler)
    scheduler.load_finished(KVLoadResult(late.request_id, 10, 10, 0))
    scheduler.seed(late.request_id, [7])
    for _ in range(5):
        output = step(scheduler)
        assert [(share.request is late, share.num_tokens) for share in output.scheduled] == [(True, 1), (False, 7)]
    assert late.finish_reason == "length"
    assert prompt.num_uncomputed_tokens > 0, "the prefill has ended: the streams beside it prove nothing"


def test_streams_with_an_objective_bound_the_chunk_beside_them_and_not_without() -> None:
    def chunk(itl_s: float | None) -> int:
        scheduler = make_scheduler(num_blocks=64, budget=200)
        scheduler.step_cost = StepCost(0.002, 0.001, 0.0001)
        add(scheduler, [1], max_tokens=10, itl_s=itl_s)
        step(scheduler)
        add(scheduler, list(range(10, 200)))
        return step(scheduler).num_tokens - 1

    assert chunk(None) == 190
    assert (chunk(0.006), chunk(0.01)) == (27, 45)


def test_a_step_stretch_follows_the_number_of_streams() -> None:
    """A stream that came when it was alone bounds no chunk for that when there are many."""
    scheduler = make_scheduler(num_blocks=512, budget=2000)
    scheduler.step_cost = cost = StepCost(0.002, 0.001, 0.0001)
    prompt = None
    for num_streams in (1, 3):
        while len(scheduler.running) < num_streams:
            add(scheduler, [1], max_tokens=100, step_stretch=3.0)
            step(scheduler)
        prompt = prompt or add(scheduler, list(range(10, 1000)))
        assert step(scheduler).num_tokens - num_streams == int(2 * cost.seconds(num_streams) / 0.0001)
        scheduler.abort(prompt.request_id)
        prompt = None


def prompt_tokens_beside_a_stream(scheduler: Scheduler) -> int:
    return step(scheduler).num_tokens - 1


STRETCH_COST = StepCost(0.002, 0.001, 0.0001)
STRETCHED, STRETCHED_FURTHER = 60, 510
"""Prompt tokens that lengthen a step of one stream to 3 and to 18 times."""


def stretching_scheduler(num_blocks: int = 512, max_num_seqs: int = 4) -> Scheduler:
    """With a stream, a long prompt that runs beside it, and held KV."""
    scheduler = make_scheduler(num_blocks, budget=2000, held=0.1, max_num_seqs=max_num_seqs)
    scheduler.step_cost = STRETCH_COST
    add(scheduler, list(range(100)), hold_kv=HoldKV(transfer_id="held", lease_s=5.0))
    step(scheduler)
    assert len(scheduler.held.ids) == 25
    add(scheduler, [1], max_tokens=500, step_stretch=3.0)
    step(scheduler)
    add(scheduler, list(range(10, 1500)))
    assert prompt_tokens_beside_a_stream(scheduler) == STRETCHED
    return scheduler


def test_a_prompt_that_waits_behind_another_makes_stretched_steps_longer() -> None:
    """Near full load two thirds of the time would be too little for the prompts that come."""
    scheduler = stretching_scheduler(max_num_seqs=3)
    waiting = add(scheduler, [3, 4])
    assert prompt_tokens_beside_a_stream(scheduler) == STRETCHED_FURTHER
    scheduler.abort(waiting.request_id)
    assert prompt_tokens_beside_a_stream(scheduler) == STRETCHED


def test_what_waits_for_a_place_or_for_blocks_makes_no_step_longer() -> None:
    """It would not begin any earlier."""
    scheduler = stretching_scheduler(max_num_seqs=2)
    add(scheduler, [3, 4])
    assert prompt_tokens_beside_a_stream(scheduler) == STRETCHED, "no place"

    scheduler = stretching_scheduler(num_blocks=450)
    add(scheduler, list(range(2, 1790)))
    assert prompt_tokens_beside_a_stream(scheduler) == STRETCHED, "no blocks"

    scheduler = stretching_scheduler()
    add(scheduler, list(range(200)), hold_kv=HoldKV(transfer_id="t", lease_s=5.0))
    assert prompt_tokens_beside_a_stream(scheduler) == STRETCHED, "too much KV is held"

    scheduler = stretching_scheduler()
    add(scheduler, [3, 4], remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0))
    assert prompt_tokens_beside_a_stream(scheduler) == STRETCHED, "its KV is computed elsewhere"


def test_a_prompt_that_will_miss_its_ttft_goes_behind_those_that_can_meet_theirs() -> None:
    scheduler = make_scheduler(num_blocks=64, budget=50, max_num_seqs=2)
    scheduler.step_cost = StepCost(0.0, 0.0, 0.01)
    scheduler.expire(5.0)
    add(scheduler, [1] * 40, ttft_s=1.0)
    long, short = add(scheduler, [2] * 150, ttft_s=1.0), add(scheduler, [3] * 20, ttft_s=1.0)
    for request in scheduler.waiting:
        request.arrived_s = 5.0
    step(scheduler)
    assert (long.is_late, short.is_late) == (True, False)
    ends = [event.request_id for event in finish_all(scheduler)]
    assert ends.index(short.request_id) < ends.index(long.request_id)


def test_a_new_prompt_waits_while_streams_fill_the_objective_and_others_pass_it() -> None:
    scheduler = make_scheduler(num_blocks=64, budget=100)
    scheduler.step_cost = StepCost(0.004, 0.002, 0.0001)  # room for one stream and a half of one at 10 ms
    aims = {"itl_s": 0.01, "ttft_s": 50.0}
    stream = add(scheduler, [1], max_tokens=4, **aims)
    step(scheduler)
    held = add(scheduler, [2] * 5, max_tokens=2, **aims)
    moved = add(scheduler, [3] * 5, max_tokens=4, output_token_ids=[7], **aims)
    free = add(scheduler, [4] * 5, max_tokens=2)
    step(scheduler)
    assert held in scheduler.waiting
    assert moved not in scheduler.waiting, "its client reads already"
    assert free not in scheduler.waiting, "it has no objective"
    finish_all(scheduler)
    assert [one.finish_reason for one in (stream, held, moved, free)] == ["length"] * 4


def test_any_number_of_new_prompts_waits_in_the_order_of_arrival() -> None:
    scheduler = make_scheduler(num_blocks=800, budget=1000, max_num_seqs=100)
    scheduler.step_cost = StepCost(0.004, 0.0005, 0.0001)
    prompts = [add(scheduler, [2] * 5, max_tokens=9, itl_s=0.02, ttft_s=50.0) for _ in range(200)]
    free = add(scheduler, [4] * 5, max_tokens=9)
    step(scheduler)
    num_begun = sum(one not in scheduler.waiting for one in prompts)
    assert 5 < num_begun < 40
    assert all(one not in scheduler.waiting for one in (*prompts[:num_begun], free))


def test_late_prompts_do_not_count_as_queued_work() -> None:
    scheduler = make_scheduler(num_blocks=64, budget=50)
    late, other = add(scheduler, [2] * 30, ttft_s=1.0), add(scheduler, [3] * 20, ttft_s=1.0)
    assert scheduler.queue_load.num_uncomputed_tokens == 50
    late.is_late = True
    assert scheduler.queue_load.num_uncomputed_tokens == other.num_uncomputed_tokens


def test_the_latest_request_is_preempted_and_comes_back() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=100)
    first = add(scheduler, [1] * 11, max_tokens=12)
    second = add(scheduler, [2] * 11, max_tokens=12)
    while not scheduler.counters.num_preemptions:
        step(scheduler)
    assert first in scheduler.running
    assert second in scheduler.waiting
    ends = finish_all(scheduler)
    assert [event.request_id for event in ends] == [first.request_id, second.request_id]


def test_higher_priority_goes_first() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, [1])
    low, high = add(scheduler, [2], priority=-1), add(scheduler, [3], priority=5)
    ends = [event.request_id for event in finish_all(scheduler)]
    assert ends.index(high.request_id) < ends.index(low.request_id)


def test_a_prompt_that_can_never_fit_is_refused_with_both_sizes() -> None:
    scheduler = make_scheduler(num_blocks=4)
    add(scheduler, [1] * 16)
    (event,) = scheduler.take_events()
    assert isinstance(event, TokensEvent)
    assert event.finish_reason == "error"
    assert "5 KV blocks" in (event.error or "")
    assert "4 in all" in (event.error or "")


def test_hand_over_stops_after_the_first_token_and_holds_the_blocks() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, [1] * 9, max_tokens=50, hold_kv=HoldKV(transfer_id="t", lease_s=1.0))
    while scheduler.requests:
        step(scheduler)
    assert request.finish_reason == "hand_over"
    assert request.num_output_tokens == 1
    assert len(scheduler.held.ids) == 3
    scheduler.held.free(request.request_id)
    scheduler.held.free(request.request_id)
    assert len(scheduler.held.ids) == 0
    assert scheduler.kv.pool.num_available == scheduler.kv.num_blocks


def test_held_kv_makes_new_hand_overs_wait_but_not_plain_requests() -> None:
    scheduler = make_scheduler(num_blocks=10, held=0.5, budget=100)
    first = add(scheduler, [1] * 16, hold_kv=HoldKV(transfer_id="a", lease_s=1.0))
    step(scheduler)
    second = add(scheduler, [2] * 16, hold_kv=HoldKV(transfer_id="b", lease_s=1.0))
    assert not step(scheduler).scheduled
    plain = add(scheduler, [3] * 16, max_tokens=1)
    assert [share.request for share in step(scheduler).scheduled] == [plain]
    scheduler.held.free(first.request_id)
    assert [share.request for share in step(scheduler).scheduled] == [second]


def test_hand_overs_that_come_at_once_leave_a_stream_its_blocks() -> None:
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=16, budget=512, held=0.5)
    stream = add(scheduler, [1] * 7, max_tokens=60)
    step(scheduler)
    moved = [add(scheduler, [2 + i] * 16, hold_kv=HoldKV(transfer_id=f"t{i}", lease_s=60.0)) for i in range(9)]
    for _ in range(12):
        assert stream in [share.request for share in step(scheduler).scheduled]
    assert len(scheduler.held.ids) == 20
    assert [one in scheduler.waiting for one in moved] == [False] * 5 + [True] * 4


def test_hand_overs_alone_use_all_blocks() -> None:
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=16, budget=512, held=0.5)
    for i in range(9):
        add(scheduler, [2 + i] * 16, hold_kv=HoldKV(transfer_id=f"t{i}", lease_s=60.0))
    assert len(step(scheduler).scheduled) == 9


def test_remote_kv_reserves_at_once_even_without_token_budget() -> None:
    scheduler = make_scheduler(budget=2)
    add(scheduler, [1] * 8)
    add(scheduler, [3] * 8)
    remote = add(scheduler, [2] * 10, remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0))
    assert scheduler.queue_load.num_waiting_tokens == 16, "its prompt is computed elsewhere"
    step(scheduler)
    assert ReservedEvent(remote.request_id, 0, 0) in scheduler.take_events()
    assert len(scheduler.kv.block_ids(remote.request_id)) == 3


def test_no_request_stands_still_where_more_run_than_a_step_has_tokens() -> None:
    scheduler = make_scheduler(num_blocks=32, budget=2)
    requests = [add(scheduler, [2] * 10, remote_kv=RemoteKV(transfer_id=f"t{i}", reservation_s=5.0)) for i in range(4)]
    step(scheduler)
    *loaded, recomputed = requests
    for request in requests:
        scheduler.seed(request.request_id, [7])
        scheduler.load_finished(KVLoadResult(request.request_id, 4 if request is recomputed else 10, 4, 0))
    shares = {share.request.request_id: share.num_tokens for share in step(scheduler).scheduled}
    assert shares == {**{request.request_id: 1 for request in loaded}, recomputed.request_id: 1}


def test_remote_request_runs_once_kv_and_seed_are_there_and_computes_only_the_seed() -> None:
    scheduler = make_scheduler()
    remote = add(scheduler, [2] * 10, max_tokens=3, remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0))
    step(scheduler)
    scheduler.load_finished(KVLoadResult(remote.request_id, 10, 10, 0))
    assert not step(scheduler).scheduled
    scheduler.seed(remote.request_id, [7])
    (share,) = step(scheduler).scheduled
    assert (share.start, share.num_tokens) == (10, 1)
    assert LoadedEvent(remote.request_id, 10, 0) in scheduler.take_events()
    scheduler.expire(1e6)  # it has what it waited for
    while scheduler.requests:
        step(scheduler)
    assert remote.token_ids[10] == 7
    assert remote.num_output_tokens == 3


def test_a_prompt_that_is_cached_to_its_last_token_is_reserved_and_loads_nothing() -> None:
    scheduler = make_scheduler()
    add(scheduler, [2] * 8, max_tokens=2)
    finish_all(scheduler)
    remote = add(scheduler, [2] * 8, max_tokens=3, remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0))
    step(scheduler)
    assert scheduler.take_events() == [ReservedEvent(remote.request_id, 8, 2), LoadedEvent(remote.request_id, 0, 0)]
    scheduler.seed(remote.request_id, [7])
    assert [share.start for share in step(scheduler).scheduled] == [8]


def test_a_seed_and_a_result_of_a_load_count_once() -> None:
    scheduler = make_scheduler()
    remote = add(scheduler, [2] * 10, remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0))
    step(scheduler)
    for _ in range(2):
        scheduler.load_finished(KVLoadResult(remote.request_id, 8, 8, 1))
    for _ in range(2):
        scheduler.seed(remote.request_id, [7])
    assert remote.token_ids == [*[2] * 10, 7]
    assert (scheduler.counters.num_external_tokens, scheduler.counters.num_recomputed_blocks) == (8, 1)
    assert scheduler.running == [remote]


def test_remote_request_computes_what_did_not_arrive() -> None:
    scheduler = make_scheduler(budget=100)
    remote = add(scheduler, [2] * 10, remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0))
    step(scheduler)
    scheduler.seed(remote.request_id, [7])
    scheduler.load_finished(KVLoadResult(remote.request_id, 4, 4, 2, "digest"))
    (share,) = step(scheduler).scheduled
    assert (share.start, share.num_tokens) == (4, 7)
    assert remote.num_recomputed_tokens == 6
    assert scheduler.counters.num_prefilled_tokens == 6, "the seed is no part of the prompt"
    assert scheduler.counters.num_recomputed_blocks == 2


def test_a_reservation_without_a_seed_is_given_up_at_its_deadline() -> None:
    scheduler = make_scheduler()
    remote = add(scheduler, [2] * 10, now=100.0, remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0))
    step(scheduler)
    scheduler.expire(104.9)
    assert remote.request_id in scheduler.loading
    scheduler.expire(105.0)
    assert not scheduler.requests
    assert scheduler.kv.pool.num_available == scheduler.kv.num_blocks
    end = scheduler.take_events()[-1]
    assert isinstance(end, TokensEvent)
    assert "seed" in (end.error or "")


def test_the_wait_for_room_is_reported_and_takes_nothing_from_the_reservation() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first = add(scheduler, [1] * 10, now=100.0, remote_kv=RemoteKV(transfer_id="a", reservation_s=50.0))
    second = add(scheduler, [2] * 10, now=100.0, remote_kv=RemoteKV(transfer_id="b", reservation_s=5.0))
    third = add(scheduler, [3] * 10, now=101.0, remote_kv=RemoteKV(transfer_id="c", reservation_s=5.0))
    add(scheduler, [4] * 10, now=101.0)
    step(scheduler)
    assert (len(scheduler.waiting), scheduler.queue_load.num_without_room) == (3, 2)
    scheduler.expire(104.0)
    scheduler.abort(first.request_id)
    step(scheduler)
    assert (len(scheduler.waiting), scheduler.queue_load.num_without_room) == (2, 1)
    scheduler.expire(108.9)
    assert list(scheduler.loading) == [second.request_id]
    assert third.request_id not in scheduler.requests, "it had no room for 5 s"
    scheduler.expire(109.0)
    assert second.request_id not in scheduler.requests


def test_aborting_in_every_state_frees_everything() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=4, max_num_seqs=2)
    running = add(scheduler, [1] * 9)
    loading = add(scheduler, [2] * 5, remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0))
    waiting = add(scheduler, [3] * 9)
    step(scheduler)
    for request in (running, loading, waiting):
        scheduler.abort(request.request_id)
        scheduler.abort(request.request_id)
    assert not step(scheduler).scheduled
    assert scheduler.kv.pool.num_available == scheduler.kv.num_blocks
    assert not scheduler.requests
