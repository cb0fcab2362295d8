"""Requests share blocks that are computed, or that their step computes: what each step reads has been written.

The blocks' memory is simulated: a slot holds the tokens up to its own. A step writes the slots of all its tokens, then
reads those of each request's tokens, as a layer of a model does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.messages import HoldKV, RemoteKV, StepCost
from engine.kv_connector import KVLoadResult
from engine.scheduling.drafts import Drafter
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import Sampled, SchedulerOutput
from tests.engine.scheduling.test_scheduler import BLOCK_SIZE, HoldingConnector, add, check_blocks, make_scheduler, step
from tests.prefix_cache import forget_all

PROMPT = list(range(100, 118))


class Memory(HoldingConnector):
    """The simulated memory, as a connector that looks for prompts if `seeks`, and checks what it is offered."""

    def __init__(self, scheduler: Scheduler, *, seeks: bool) -> None:
        super().__init__()
        self.scheduler, self.seeks = scheduler, seeks
        scheduler.connector = self
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        """By block and offset."""
        self.offered: dict[str, list[int]] = {}
        """By request_id, the block ids that the connector knows."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        if request.spec.remote_kv is not None:
            return request.num_initial_tokens - num_computed_tokens
        num_full = (request.num_initial_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        return max(0, num_full - num_computed_tokens) if self.seeks else 0

    def request_progressed(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        known = self.offered.setdefault(request.request_id, list(block_ids))
        assert list(block_ids) == known, "blocks have changed under the connector"
        self.check(request, num_computed_tokens)

    def write(self, request: Request, start: int, stop: int) -> None:
        block_ids = self.scheduler.kv.block_ids(request.request_id)
        for position in range(start, stop):
            slot = (block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE)
            self.slots[slot] = tuple(request.token_ids[: position + 1])

    def check(self, request: Request, stop: int) -> None:
        block_ids = self.scheduler.kv.block_ids(request.request_id)
        for position in range(stop):
            content = self.slots.get((block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE))
            assert content == tuple(request.token_ids[: position + 1])

    def load(self, request: Request, num_blocks: int) -> None:
        """The store, or the other instance, has so many blocks of the prompt."""
        num_local, is_remote = request.num_computed_tokens // BLOCK_SIZE, request.spec.remote_kv is not None
        num_sought = request.num_initial_tokens - (not is_remote)
        num_tokens = max(num_local, min(num_blocks, num_sought // BLOCK_SIZE)) * BLOCK_SIZE
        if is_remote and num_blocks * BLOCK_SIZE > num_sought:
            num_tokens = num_sought
        self.write(request, num_local * BLOCK_SIZE, num_tokens)
        num_external = num_tokens - num_local * BLOCK_SIZE
        self.scheduler.load_finished(KVLoadResult(request.request_id, num_tokens, num_external, 0))
        check_blocks(self.scheduler)
        if is_remote:
            self.scheduler.seed(request.request_id, [1])

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        check_blocks(self.scheduler)
        for request in self.scheduler.loading.values():
            self.check(request, request.num_computed_tokens)
        for share in output.scheduled:
            self.write(share.request, share.start, share.start + share.num_tokens)
        for share in output.scheduled:
            self.check(share.request, share.start + share.num_tokens)
        token_ids = {share.request.request_id: [1] for share in output.scheduled if share.samples}
        self.scheduler.update_from_output(output, Sampled(token_ids))
        check_blocks(self.scheduler)
        return output


def shares(output: SchedulerOutput) -> list[tuple[int, int]]:
    return [(share.start, share.num_tokens) for share in output.scheduled]


def hold(name: str) -> HoldKV:
    return HoldKV(transfer_id=name, lease_s=9.0)


def test_prompts_that_join_a_step_do_not_compute_what_it_computes_for_others() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=18), seeks=False)
    requests = [add(scheduler, [*PROMPT[:12], 7, 8, number]) for number in range(3)]
    assert shares(memory.step()) == [(0, 15), (12, 3)]
    assert shares(memory.step()) == [(15, 1), (15, 1), (12, 3)]
    assert [request.num_cached_tokens for request in requests] == [0, 12, 12]


def test_a_prompt_that_joins_the_last_chunk_of_its_beginning_has_it_whole() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=8), seeks=False)
    add(scheduler, PROMPT[:12])
    add(scheduler, [*PROMPT[:12], 1, 2])
    memory.step()
    assert shares(memory.step()) == [(8, 4), (12, 2)]


def test_a_prompt_that_was_begun_beside_its_beginning_goes_on_behind_it() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=20), seeks=False)
    long = list(range(100, 140))
    add(scheduler, long[:18])
    late = add(scheduler, [*long[:18], 7, 7, 7], max_tokens=1)
    assert shares(memory.step()) == [(0, 18), (16, 2)]
    assert late.num_cached_tokens == 16
    first, second = add(scheduler, [9] * 30), add(scheduler, [9] * 33)
    assert shares(memory.step()) == [(18, 1), (18, 3), (0, 16)]
    assert shares(memory.step()) == [(19, 1), (16, 14), (28, 5)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 28)


def test_prompts_that_load_the_same_beginning_at_once_keep_one_copy_of_it() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=40), seeks=False)
    remote = RemoteKV(transfer_id="t", reservation_s=5.0)
    requests = [add(scheduler, [*PROMPT, number], remote_kv=remote) for number in range(3)]
    memory.step()
    assert scheduler.kv.pool.num_available == 40 - 3 * 5
    for request in requests:
        memory.load(request, 5)
    assert scheduler.kv.pool.num_available == 40 - 4 - 3 * 1, "the last block of each is its own"
    assert shares(memory.step()) == [(19, 1)] * 3


def test_without_prefix_caching_each_prompt_of_a_step_is_computed() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=40), seeks=False)
    scheduler.kv.enable_prefix_caching = False
    for _ in range(2):
        add(scheduler, PROMPT)
    assert shares(memory.step()) == [(0, 18), (0, 18)]


def test_blocks_of_an_earlier_step_that_hold_something_else_by_now_are_not_shared() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=4, budget=40), seeks=False)
    for prompt in ([1] * 12, [2] * 15, [1] * 12):
        add(scheduler, prompt, max_tokens=1)
        assert shares(memory.step()) == [(0, len(prompt))]


def test_what_an_interrupted_step_should_have_computed_is_shared_by_no_later_one() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=40), seeks=False)
    first, _ = add(scheduler, [*PROMPT, 1]), add(scheduler, [*PROMPT, 2])
    held = add(scheduler, [*PROMPT, 3], hold_kv=hold("t"))
    assert shares(scheduler.schedule()) == [(0, 19), (16, 3), (16, 3)]
    scheduler.abort(first.request_id)
    assert shares(memory.step()) == [(0, 19)]
    assert held.finish_reason == "error"
    add(scheduler, [*PROMPT, 4])
    assert shares(memory.step()) == [(19, 1), (16, 3)]


def test_what_a_decision_cut_short_would_have_computed_is_shared_by_no_later_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=40), seeks=False)
    first, _ = add(scheduler, [*PROMPT, 1]), add(scheduler, [*PROMPT, 2])
    with monkeypatch.context() as patched:
        patched.setattr(Drafter, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.schedule()
    scheduler.abort(first.request_id)
    assert shares(memory.step()) == [(0, 19)]


def test_a_beginning_counts_as_cached_once_also_after_a_preemption() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=40), seeks=False)
    add(scheduler, PROMPT, max_tokens=1)
    memory.step()
    late = add(scheduler, [*PROMPT[:12], 1, 2, 3, 4, 5])
    scheduler.schedule()  # interrupted
    assert late.num_cached_tokens == 12
    forget_all(scheduler.kv.pool)
    first = add(scheduler, [*PROMPT[:12], 6], priority=1)
    assert [share.request for share in memory.step().scheduled] == [first, late]
    assert late.num_cached_tokens == 12


@pytest.mark.parametrize("num_tokens", [18, 12])
def test_what_is_loaded_goes_behind_blocks_that_are_filled(num_tokens: int) -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=40), seeks=False)
    add(scheduler, PROMPT[:12])
    loads = add(scheduler, PROMPT[:num_tokens], remote_kv=RemoteKV(transfer_id="t", reservation_s=5.0))
    assert shares(memory.step()) == [(0, 12)]
    assert loads.num_computed_tokens == 0


def test_hand_overs_are_offered_what_their_step_computes_for_others_when_it_has_ended() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=40, held=1.0), seeks=False)
    add(scheduler, PROMPT[:9], max_tokens=1)
    memory.step()
    requests = [add(scheduler, PROMPT, hold_kv=hold(name)) for name in "ab"]
    assert shares(memory.step()) == [(8, 10), (16, 2)]
    assert set(memory.offered) == {request.request_id for request in requests}


def test_hand_overs_that_found_nothing_in_the_store_share_what_a_step_computes() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=40, held=1.0), seeks=True)
    requests = [add(scheduler, PROMPT, hold_kv=hold(name)) for name in "ab"]
    assert not shares(memory.step())
    for request in requests:
        memory.load(request, 0)
    assert shares(memory.step()) == [(0, 18), (16, 2)]
    assert set(memory.offered) == {request.request_id for request in requests}
    assert requests[1].num_cached_tokens == 16


def test_blocks_that_the_connector_knows_are_not_replaced() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=40, held=1.0), seeks=True)
    requests = [add(scheduler, PROMPT, hold_kv=hold(name)) for name in "ab"]
    memory.step()
    for request in requests:
        memory.load(request, 1)
    assert shares(memory.step()) == [(4, 14), (4, 14)]


def test_prompts_that_found_nothing_in_the_store_go_on_behind_the_first_of_them() -> None:
    memory = Memory(scheduler := make_scheduler(num_blocks=40, budget=10), seeks=True)
    requests = [add(scheduler, PROMPT) for _ in range(3)]
    memory.step()
    for request in requests:
        memory.load(request, 0)
    assert shares(memory.step()) == [(0, 10)]
    assert shares(memory.step()) == [(10, 8), (8, 2)]
    assert shares(memory.step()) == [(18, 1), (16, 2), (16, 2)]


@pytest.mark.parametrize("seeks", [False, True])
@settings(max_examples=30)
@given(data=st.data())
def test_whatever_arrives_what_a_step_reads_has_been_written(seeks: bool, data: st.DataObject) -> None:
    check_whatever_arrives(seeks, data)


@pytest.mark.slow
@pytest.mark.parametrize("seeks", [False, True])
@settings(max_examples=150)
@given(data=st.data())
def test_whatever_arrives_at_length(seeks: bool, data: st.DataObject) -> None:
    check_whatever_arrives(seeks, data)


def check_whatever_arrives(seeks: bool, data: st.DataObject) -> None:
    """Prompts with few beginnings, of several priorities, handed over or not, late or not, more than the blocks hold at
    once."""
    num_blocks, budget = data.draw(st.integers(16, 40), "blocks"), data.draw(st.integers(3, 40), "budget")
    memory = Memory(scheduler := make_scheduler(num_blocks, budget=budget, max_num_seqs=5), seeks=seeks)
    scheduler.step_cost = StepCost(0.0, 0.0, 0.01)
    for number in range(40):
        scheduler.expire(number / 10)
        for _ in range(data.draw(st.integers(0, 3), "arrivals") if number < 15 else 0):
            beginning = [data.draw(st.integers(1, 2), "beginning")] * data.draw(st.integers(1, 25), "length")
            kinds = [
                {"hold_kv": hold("t")},
                {"remote_kv": RemoteKV(transfer_id="t", reservation_s=1e9)},
                *({"priority": priority} for priority in range(3)),
            ]
            fields: dict[str, Any] = data.draw(st.sampled_from(kinds), "kind")
            fields["ttft_s"] = data.draw(st.sampled_from([None, 0.2, 0.5]), "objective")
            num_output = data.draw(st.integers(1, 9), "output")
            add(scheduler, [*beginning, 50 + number], max_tokens=num_output, **fields).arrived_s = number / 10
        if scheduler.requests and data.draw(st.integers(0, 9), "aborts") == 0:
            scheduler.abort(data.draw(st.sampled_from(list(scheduler.requests)), "aborted"))
        for request in list(scheduler.loading.values()):
            if data.draw(st.booleans(), "loads"):
                memory.load(request, data.draw(st.integers(0, 6), "found"))
        for request_id in list(scheduler.held):
            scheduler.held.free(request_id)
        if data.draw(st.integers(0, 19), "interrupts") == 0:
            scheduler.schedule()
        memory.step()
        assert all(one.num_cached_tokens <= one.num_prompt_tokens for one in scheduler.requests.values())
    for _ in range(2000):
        for request in list(scheduler.loading.values()):
            memory.load(request, 0)
        memory.step()
        for request_id in list(scheduler.held):
            scheduler.held.free(request_id)
        if not scheduler.requests:
            break
    assert not scheduler.requests
    assert all(request.status is RequestStatus.FINISHED for request in memory.finished.values())
    assert scheduler.kv.pool.num_available == num_blocks


def num_found_after_a_failure(*, are_logits_finite: bool) -> int:
    """The cached tokens of a prompt of three blocks, after a request with the same prompt got no token."""
    scheduler = make_scheduler(budget=16)
    request = add(scheduler, list(range(3 * BLOCK_SIZE)))
    output = scheduler.schedule()
    assert [share.request for share in output.scheduled if share.samples] == [request]
    scheduler.update_from_output(output, Sampled(nothing_allowed=frozenset([request.request_id] * are_logits_finite)))
    check_blocks(scheduler)
    assert request.finish_reason == "error"
    again = add(scheduler, list(range(3 * BLOCK_SIZE)))
    step(scheduler)
    return again.num_cached_tokens


def test_no_request_finds_the_blocks_of_a_prompt_whose_logits_are_not_finite() -> None:
    assert num_found_after_a_failure(are_logits_finite=False) == 0


def test_no_request_finds_the_blocks_of_a_prompt_whose_keys_or_values_are_not_finite() -> None:
    """Nor does the connector hear of them: the step samples nothing, so that no logits show it."""
    scheduler = make_scheduler(budget=BLOCK_SIZE)
    request = add(scheduler, list(range(3 * BLOCK_SIZE)))
    output = scheduler.schedule()
    assert not any(share.samples for share in output.scheduled)
    scheduler.update_from_output(output, Sampled(not_finite=frozenset([request.request_id])))
    check_blocks(scheduler)
    assert request.finish_reason == "error"
    again = add(scheduler, list(range(3 * BLOCK_SIZE)))
    step(scheduler)
    assert again.num_cached_tokens == 0


def test_the_blocks_of_a_prompt_whose_parameters_exclude_every_token_stay_cached() -> None:
    assert num_found_after_a_failure(are_logits_finite=True) == 2 * BLOCK_SIZE
