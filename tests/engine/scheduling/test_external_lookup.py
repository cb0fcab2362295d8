"""The scheduler looks up blocks in a store before it computes them; without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.messages import HoldKV, LoadedEvent, RemoteKV, ReservedEvent, StepCost
from engine.kv_connector import KVLoadResult
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.test_scheduler import (
    BLOCK_SIZE,
    HoldingConnector,
    add,
    check_blocks,
    finish_all,
    make_scheduler,
    step,
)

PROMPT = list(range(100, 118))
NUM_SOUGHT = 4
"""Full blocks of the prompt; one token past them is left to compute."""


class SeekingConnector(HoldingConnector):
    """Looks for every prompt; the test says what was found."""

    def __init__(self) -> None:
        super().__init__()
        self.sought: dict[str, tuple[int, int]] = {}  # request_id → blocks in its table, of them local
        self.offered: list[int] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return max(0, (request.num_initial_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE - num_computed_tokens)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_local_blocks: int) -> None:
        self.sought[request.request_id] = (len(block_ids), num_local_blocks)

    def request_progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        self.offered.append(num_computed_tokens)


def seeking(num_blocks: int = 32, **fields: object) -> tuple[Scheduler, SeekingConnector]:
    scheduler = make_scheduler(num_blocks, **fields)  # type: ignore[arg-type]
    scheduler.connector = connector = SeekingConnector()
    return scheduler, connector


def found(scheduler: Scheduler, request: Request, num_blocks: int, retained_id: str | None = None) -> None:
    num_local = request.num_computed_tokens // BLOCK_SIZE
    num_tokens = num_blocks * BLOCK_SIZE
    scheduler.load_finished(
        KVLoadResult(request.request_id, num_tokens, num_tokens - num_local * BLOCK_SIZE, 0, retained_id=retained_id)
    )
    check_blocks(scheduler)


def test_what_is_found_is_not_computed_and_has_no_event() -> None:
    scheduler, connector = seeking()
    request = add(scheduler, PROMPT)
    assert not step(scheduler).scheduled
    assert (request.status, connector.sought[request.request_id]) == (RequestStatus.LOADING, (5, 0))
    found(scheduler, request, NUM_SOUGHT)
    [share] = step(scheduler).scheduled
    assert (share.start, share.num_tokens) == (NUM_SOUGHT * BLOCK_SIZE, len(PROMPT) - NUM_SOUGHT * BLOCK_SIZE)
    assert not [event for event in scheduler.take_events() if isinstance(event, ReservedEvent | LoadedEvent)]
    assert (request.num_external_tokens, request.num_recomputed_tokens) == (16, 0)
    finish_all(scheduler)


def test_what_a_resumed_request_finds_is_part_of_its_prompts_account() -> None:
    scheduler, _ = seeking()
    request = add(scheduler, PROMPT, max_tokens=9, output_token_ids=[5, 6])
    step(scheduler)
    found(scheduler, request, NUM_SOUGHT)
    finish_all(scheduler)
    assert (request.num_cached_tokens, request.num_external_tokens) == (0, NUM_SOUGHT * BLOCK_SIZE)
    assert scheduler.counters.num_external_tokens == NUM_SOUGHT * BLOCK_SIZE


def test_what_a_stream_finds_after_a_preemption_is_no_part_of_its_prompts_account() -> None:
    scheduler, _ = seeking(num_blocks=12)
    add(scheduler, PROMPT, max_tokens=1)
    step(scheduler)
    found(scheduler, next(iter(scheduler.loading.values())), 0)
    finish_all(scheduler)
    stream = add(scheduler, PROMPT, max_tokens=3)
    step(scheduler)
    assert (stream.num_cached_tokens, stream.num_external_tokens, stream.num_output_tokens) == (16, 0, 1)
    scheduler._preempt(stream)
    other = add(scheduler, [7] * 44, max_tokens=1, priority=1)
    step(scheduler)
    found(scheduler, other, 0)
    while other.finish_reason is None:  # it takes the blocks of the prefix
        step(scheduler)
    step(scheduler)
    assert stream.status is RequestStatus.LOADING
    found(scheduler, stream, NUM_SOUGHT)
    finish_all(scheduler)
    assert (stream.num_cached_tokens, stream.num_external_tokens) == (16, 0)
    assert scheduler.counters.num_external_tokens > 0


def test_hand_overs_that_are_looked_up_are_no_streams() -> None:
    scheduler, _ = seeking(num_blocks=64)
    scheduler.step_cost = StepCost(0.004, 0.002, 0.0001)  # room for one stream and a half of one at 10 ms
    hand_overs = [add(scheduler, PROMPT, hold_kv=HoldKV(transfer_id=f"t{n}", lease_s=9.0)) for n in range(3)]
    step(scheduler)
    assert {one.status for one in hand_overs} == {RequestStatus.LOADING}
    plain = add(scheduler, PROMPT, itl_s=0.01, ttft_s=50.0)
    step(scheduler)
    assert plain.status is RequestStatus.LOADING


def test_what_is_not_found_is_computed_and_sought_once() -> None:
    scheduler, connector = seeking()
    request = add(scheduler, PROMPT)
    step(scheduler)
    found(scheduler, request, 0)
    connector.sought.clear()
    [end] = finish_all(scheduler)
    assert (end.num_external_tokens, end.num_recomputed_tokens) == (0, 0)
    assert scheduler.counters.num_prefilled_tokens == len(PROMPT)
    assert not connector.sought


def test_only_what_the_prefix_cache_lacks_is_sought() -> None:
    scheduler, connector = seeking()
    first = add(scheduler, PROMPT[:9])
    step(scheduler)
    found(scheduler, first, 0)
    finish_all(scheduler)
    second = add(scheduler, PROMPT)
    step(scheduler)
    assert connector.sought[second.request_id] == (5, 2)
    found(scheduler, second, 3)
    [share] = step(scheduler).scheduled
    assert share.start == 3 * BLOCK_SIZE
    assert (second.num_cached_tokens, second.num_external_tokens) == (8, 4)
    finish_all(scheduler)


def test_a_full_step_does_not_keep_the_next_prompt_from_being_sought() -> None:
    scheduler, connector = seeking(budget=4)
    first = add(scheduler, PROMPT)
    step(scheduler)
    found(scheduler, first, 0)
    second = add(scheduler, [7] * 9)
    assert [share.request for share in step(scheduler).scheduled] == [first]
    assert second.request_id in connector.sought
    found(scheduler, second, 2)
    finish_all(scheduler)


def test_blocks_of_a_search_given_up_stay_and_the_prompt_is_computed_into_others() -> None:
    scheduler, _ = seeking()
    request = add(scheduler, PROMPT)
    step(scheduler)
    before = scheduler.kv.block_ids(request.request_id)
    found(scheduler, request, 1, retained_id="late")
    assert [block.block_id for block in scheduler.held["late"]] == before[1:]
    step(scheduler)
    assert not set(scheduler.kv.block_ids(request.request_id)) & set(before[1:])
    finish_all(scheduler)
    scheduler.held.free("late")
    check_blocks(scheduler)


@pytest.mark.parametrize("remote_kv", [None, RemoteKV(transfer_id="t", reservation_s=30.0)])
def test_what_a_load_given_up_had_found_is_not_counted_without_a_cache_to_keep_it(remote_kv: RemoteKV | None) -> None:
    scheduler, _ = seeking()
    scheduler.kv.enable_prefix_caching = False
    request = add(scheduler, PROMPT, max_tokens=1, remote_kv=remote_kv)
    step(scheduler)
    num_left = NUM_SOUGHT - 1 if remote_kv else 0
    scheduler.load_finished(
        KVLoadResult(request.request_id, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE, num_left, retained_id="late")
    )
    assert len(scheduler.held["late"]) == 3
    scheduler.seed(request.request_id, [])
    [end] = finish_all(scheduler)
    assert (end.num_external_tokens, scheduler.counters.num_external_tokens) == (0, 0)
    assert scheduler.counters.num_prefilled_tokens == len(PROMPT)
    num_recomputed = (len(PROMPT), NUM_SOUGHT + 1) if remote_kv else (0, 0)
    assert (end.num_recomputed_tokens, scheduler.counters.num_recomputed_blocks) == num_recomputed


def test_a_stream_whose_blocks_stay_with_a_load_given_up_ends_in_time_where_it_finds_no_others() -> None:
    scheduler = make_scheduler(num_blocks=6)
    remote = add(scheduler, [2] * 16, remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0))
    step(scheduler)
    scheduler.load_finished(KVLoadResult(remote.request_id, 4, 4, 3, "late", retained_id="late"))
    scheduler.seed(remote.request_id, [7])
    step(scheduler)
    assert scheduler.counters.num_external_tokens == 4, "the prefix cache has it"
    scheduler.expire(4.9)
    assert list(scheduler.waiting) == [remote]
    scheduler.expire(5.0)
    assert not scheduler.requests


def test_a_search_begins_behind_blocks_that_are_filled_already() -> None:
    scheduler, connector = seeking()
    add(scheduler, PROMPT[:BLOCK_SIZE])
    sought = add(scheduler, PROMPT)
    step(scheduler)
    assert connector.sought == {sought.request_id: (5, 0)}


def test_of_a_prompt_that_another_has_computed_whole_the_last_token_is_computed_again() -> None:
    scheduler, _ = seeking(budget=16)
    first, second = (add(scheduler, PROMPT[:16], max_tokens=1) for _ in range(2))
    step(scheduler)
    for request in (first, second):
        found(scheduler, request, 0)
    shares = [(share.request, share.start, share.num_tokens) for _ in range(2) for share in step(scheduler).scheduled]
    assert shares == [(first, 0, 16), (second, 12, 4)]


def test_an_abort_ends_a_search() -> None:
    scheduler, connector = seeking()
    request = add(scheduler, PROMPT)
    step(scheduler)
    scheduler.abort(request.request_id)
    assert request.request_id in connector.finished
    found(scheduler, request, NUM_SOUGHT)
    assert not scheduler.requests
    assert scheduler.kv.pool.num_available == scheduler.kv.num_blocks


def test_what_was_found_is_offered_at_once() -> None:
    scheduler, connector = seeking()
    request = add(scheduler, PROMPT, hold_kv=HoldKV(transfer_id="t", lease_s=9.0))
    step(scheduler)
    found(scheduler, request, 3)
    assert connector.offered == [3 * BLOCK_SIZE], "a reader need not wait for the rest to be computed"
    step(scheduler)
    assert connector.offered == [3 * BLOCK_SIZE, len(PROMPT)]
