"""Which waiting requests begin, and which prompts go on first, without a model."""

from __future__ import annotations

from typing import Any

from engine.core.messages import EngineRequest, HoldKV, RemoteKV, StepCost
from engine.kv_connector import KVLoadResult
from engine.sampling.params import SamplingParams
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.test_external_lookup import PROMPT, found, seeking
from tests.engine.scheduling.test_scheduler import BLOCK_SIZE, HoldingConnector, add, finish_all, make_scheduler, step

REMOTE = RemoteKV(transfer_id="t", reservation_s=5.0)
HOLD = HoldKV(transfer_id="h", lease_s=5.0)


def test_no_request_overtakes_one_that_waits_for_blocks() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=100)
    running = add(scheduler, [1] * 7, max_tokens=9)
    step(scheduler)
    long, short = add(scheduler, [2] * 18), add(scheduler, [3])
    assert [share.request for share in step(scheduler).scheduled] == [running]
    assert list(scheduler.waiting) == [long, short]


def test_no_hand_over_overtakes_one_that_waits_for_its_share() -> None:
    scheduler = make_scheduler(num_blocks=10, held=0.5, budget=100)
    add(scheduler, [1] * 16, hold_kv=HOLD)
    step(scheduler)
    long = add(scheduler, [2] * 16, hold_kv=HoldKV(transfer_id="b", lease_s=1.0))
    short = add(scheduler, [3] * 3, hold_kv=HoldKV(transfer_id="c", lease_s=1.0))
    step(scheduler)
    assert list(scheduler.waiting) == [long, short]


def test_a_hand_over_above_the_share_of_transfers_begins_where_none_is_held() -> None:
    scheduler = make_scheduler(num_blocks=10, held=0.5, budget=100)
    moved = add(scheduler, [1] * 24, hold_kv=HOLD)
    add(scheduler, [2])
    assert moved in [share.request for share in step(scheduler).scheduled]


def test_a_hand_over_has_all_its_blocks_from_the_start() -> None:
    scheduler = make_scheduler(budget=4)
    moved = add(scheduler, [1] * 16, hold_kv=HOLD)
    step(scheduler)
    assert len(scheduler.kv.block_ids(moved.request_id)) == 4


def test_what_does_not_fit_beside_abandoned_io_stops_no_other_request() -> None:
    scheduler = make_scheduler(num_blocks=10, budget=100)
    scheduler.held.abandon("late", scheduler.kv.pool.take(6))
    long, short = add(scheduler, [1] * 20), add(scheduler, [2] * 4)
    assert [share.request for share in step(scheduler).scheduled] == [short]
    assert list(scheduler.waiting) == [long]


def test_behind_a_full_step_only_what_is_computed_elsewhere_begins() -> None:
    scheduler, connector = seeking(budget=2)
    add(scheduler, [1, 2, 3])
    here, sought = add(scheduler, [4, 5, 6]), add(scheduler, PROMPT)
    elsewhere = add(scheduler, [7] * 6, remote_kv=REMOTE)
    step(scheduler)
    assert list(scheduler.waiting) == [here, sought]
    assert list(connector.sought) == [elsewhere.request_id]


def test_a_hand_over_sends_what_no_later_token_of_its_model_sees_as_well() -> None:
    """Its reader needs them all."""
    plain = make_scheduler(num_blocks=16, budget=100)
    window = KVCacheManager(
        num_blocks=16,
        block_size=BLOCK_SIZE,
        max_model_len=64,
        max_num_seqs=4,
        enable_prefix_caching=True,
        window=2 * BLOCK_SIZE,
    )
    scheduler = Scheduler(plain.config, window, HoldingConnector(), 64)
    prompt = list(range(6 * BLOCK_SIZE))
    add(scheduler, prompt, max_tokens=1)
    finish_all(scheduler)
    moved = add(scheduler, [*prompt, 1], hold_kv=HOLD)
    scheduler.schedule()
    assert len(set(scheduler.kv.block_ids(moved.request_id))) == 7


AIMS: dict[str, Any] = {"itl_s": 0.01, "ttft_s": 50.0}
ROOM_FOR_ONE = StepCost(0.004, 0.002, 0.0001)
"""At an objective of 10 ms."""


def test_streams_whose_kv_is_loaded_take_room_from_new_prompts() -> None:
    scheduler = make_scheduler(num_blocks=64, budget=100)
    scheduler.step_cost = ROOM_FOR_ONE
    add(scheduler, [1] * 5, remote_kv=REMOTE)
    step(scheduler)
    prompt = add(scheduler, [2] * 5, **AIMS)
    step(scheduler)
    assert prompt in scheduler.waiting


def test_hand_overs_take_no_room_from_new_prompts_and_are_not_held_back_themselves() -> None:
    scheduler = make_scheduler(num_blocks=64, budget=100)
    scheduler.step_cost = ROOM_FOR_ONE
    add(scheduler, [1] * 5, hold_kv=HOLD)
    prompt = add(scheduler, [2] * 5, **AIMS)
    step(scheduler)
    assert not scheduler.waiting
    moved = add(scheduler, [3] * 5, hold_kv=HoldKV(transfer_id="b", lease_s=5.0), **AIMS)
    assert [share.request for share in step(scheduler).scheduled] == [prompt, moved]


def test_prompts_that_were_looked_up_begin_in_the_order_of_service_behind_those_that_have_begun() -> None:
    scheduler, _ = seeking(num_blocks=64, budget=4, max_num_seqs=8)
    first, second = add(scheduler, [1] * 10), add(scheduler, [2] * 10, priority=5)
    step(scheduler)
    for request in (first, second):
        found(scheduler, request, 0)
    assert [share.request for share in step(scheduler).scheduled] == [second]
    third = add(scheduler, [3] * 10, priority=9)
    step(scheduler)
    found(scheduler, third, 0)
    assert step(scheduler).scheduled[0].request is second


def test_the_shortest_stretch_of_all_streams_bounds_a_step() -> None:
    scheduler = make_scheduler(num_blocks=512, budget=2000)
    scheduler.step_cost = cost = StepCost(0.002, 0.001, 0.0001)
    for stretch in (3.0, 6.0):
        add(scheduler, [1], max_tokens=100, step_stretch=stretch)
    step(scheduler)
    add(scheduler, list(range(10, 1000)))
    assert step(scheduler).num_tokens - 2 == int(2 * cost.seconds(2) / cost.per_token_s)


def test_a_late_prompt_makes_steps_beside_streams_that_are_ahead_longer() -> None:
    def chunk(*, is_late: bool) -> int:
        scheduler = make_scheduler(num_blocks=600, budget=2000)
        scheduler.step_cost = StepCost(0.002, 0.001, 0.0001)
        add(scheduler, [1], max_tokens=50, itl_s=0.02)
        for _ in range(5):
            step(scheduler)
        add(scheduler, list(range(10, 1500)), ttft_s=1000.0)
        add(scheduler, [3] * 5, ttft_s=1000.0).is_late = is_late
        return step(scheduler).num_tokens

    assert chunk(is_late=True) > chunk(is_late=False)


def test_streams_that_came_from_elsewhere_give_their_blocks_to_one_another() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=100)
    requests = [add(scheduler, [number] * 11, max_tokens=12, remote_kv=REMOTE) for number in (1, 2)]
    step(scheduler)
    for request in requests:
        scheduler.load_finished(KVLoadResult(request.request_id, 11, 11, 0))
        scheduler.seed(request.request_id, [7])
    assert [event.request_id for event in finish_all(scheduler)] == [request.request_id for request in requests]
    assert scheduler.counters.num_preemptions


def test_a_hand_over_is_never_preempted() -> None:
    scheduler = make_scheduler(num_blocks=8, budget=4, held=1.0)
    stream = add(scheduler, [1] * 4, max_tokens=20)
    step(scheduler)
    moved = add(scheduler, [2] * 24, hold_kv=HOLD)
    while stream in scheduler.running:
        step(scheduler)
    assert moved in scheduler.running
    assert scheduler.counters.num_preemptions == 1


def test_a_prompt_that_needs_log_probabilities_is_computed_whole() -> None:
    """Nothing of it comes from caches or stores, nor from another one that is computed beside it."""
    scheduler, _ = seeking(num_blocks=64, budget=8)
    add(scheduler, PROMPT[:BLOCK_SIZE])
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    for number in range(2):
        spec = EngineRequest(request_id=f"p{number}", prompt_token_ids=PROMPT, params=params)
        scheduler.add_request(Request.from_spec(spec, arrival=10**6 + number, fingerprint="f"), 0.0)
    finish_all(scheduler)
    assert scheduler.counters.num_prefilled_tokens == BLOCK_SIZE + 2 * len(PROMPT)
