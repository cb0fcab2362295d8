"""How long a load may take, and when its store counts as one that hangs. Pages are announced, or looked up, at 0 s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from engine.core.messages import EngineRequest, KVProgress
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request
from kv_transfer.page.format import PageNaming
from kv_transfer.secret import ensure_secret
from kv_transfer.transfer.loader import Loader, LoadOp
from tests.kv_transfer.harness import (
    BLOCK_SIZE,
    FINGERPRINT,
    LAYOUT,
    NUM_FULL,
    NUM_PAGES,
    PROMPT,
    make_request,
    reader_of,
)
from tests.kv_transfer.modelless_core import NUM_BLOCKS, ModellessCore
from tests.kv_transfer.scripted_io import LOAD_TIMEOUT_S, ScriptedStoreConnector

RESERVATION_S = 5.0
"""Of every hand-over here."""
IN_TIME = "the store did not deliver in time for the rest to be computed"


def timed_loader(**options: bool) -> Loader:
    return Loader(PageNaming.of(FINGERPRINT, LAYOUT), load_timeout_s=1.0, **options)


def announced(loader: Loader, name: str = "request") -> list[LoadOp]:
    """The reads of a hand-over, with a reservation of 5 s, all of whose pages are there."""
    loader.reserve(reader_of(request_id=name), list(range(NUM_PAGES)), 0, now=0.0)
    loader.handle_progress(KVProgress(name, NUM_FULL, num_tokens=len(PROMPT)), now=0.0)
    return loader.take_ops()


def trickle(loader: Loader, ops: Sequence[LoadOp], every_s: float) -> float:
    """Reads end well, one after the other. Returns when the last one has ended or their load is given up."""
    now, pending = 0.0, list(ops)
    while pending:
        now += every_s
        loader.expire(now)
        op = pending.pop(0)
        if op.owner.holds_blocks:
            break
        loader.op_ended(op, None, now)
        pending += loader.take_ops()
    return now


def test_a_load_may_take_as_long_as_its_reads_go_on() -> None:
    loader = timed_loader()
    assert trickle(loader, announced(loader), every_s=0.7) == pytest.approx(NUM_PAGES * 0.7)
    [result] = loader.take_output().loaded
    assert (result.num_verified_tokens, result.reason) == (len(PROMPT), None)


def test_a_load_whose_reads_stop_is_given_up_in_time_and_keeps_what_came() -> None:
    loader = timed_loader()
    trickle(loader, announced(loader)[:2], every_s=0.7)
    assert loader.next_deadline == pytest.approx(1.4 + 1.0)
    assert loader.expire(now=2.3) == 0
    assert not loader.take_output().loaded
    assert loader.expire(now=2.5) == 1
    [result] = loader.take_output().loaded
    assert (result.num_verified_tokens, result.reason) == (2 * BLOCK_SIZE, f"only 2 of {NUM_PAGES} pages came in time")
    assert result.retained_id is not None


def test_a_slow_load_ends_before_its_reservation_does_and_the_rest_is_computed() -> None:
    loader = timed_loader()
    assert trickle(loader, announced(loader), every_s=0.95) == pytest.approx(5 * 0.95)
    [result] = loader.take_output().loaded
    assert result.num_verified_tokens == 4 * BLOCK_SIZE


@pytest.mark.parametrize(("begin_s", "num_found"), [(None, 3), (2.5, 2)])
def test_a_slow_lookup_ends_after_three_time_outs_and_before_its_prompt_must_begin(
    begin_s: float | None, num_found: int
) -> None:
    loader, request = timed_loader(lookup=True), make_request(PROMPT)
    request.spec, request.arrived_s = msgspec.structs.replace(request.spec, begin_s=begin_s), 0.0
    loader.reserve(request, list(range(NUM_PAGES)), 0, now=0.0)
    trickle(loader, loader.take_ops(), every_s=0.9)
    [result] = loader.take_output().loaded
    assert result.num_verified_tokens == num_found * BLOCK_SIZE


@pytest.mark.parametrize("is_read_here", [False, True], ids=["handed over", "behind another connector"])
def test_a_slow_lookup_of_a_prompt_that_is_handed_over_ends_after_one_time_out(is_read_here: bool) -> None:
    """The decode instance's reservation, within which the prompt has to be computed, began before it."""
    request = reader_of() if is_read_here else make_request(PROMPT, hold=True)
    loader = timed_loader(lookup=True, prefix_only=is_read_here)
    loader.reserve(request, list(range(NUM_PAGES)), 0, now=0.0)
    assert trickle(loader, loader.take_ops(), every_s=0.4) == pytest.approx(1.2)
    [result] = loader.take_output().loaded
    assert result.num_verified_tokens == 2 * BLOCK_SIZE


def test_a_store_that_ends_other_reads_is_not_one_that_hangs() -> None:
    loader = timed_loader()
    announced(loader, "waiting")
    loader.op_ended(announced(loader, "begun")[0], None, now=0.5)
    assert loader.expire(now=1.2) == 0
    [result] = loader.take_output().loaded
    assert (result.request_id, result.reason) == ("waiting", "the store did not deliver within 1 s")
    assert loader.expire(now=1.5) == 1


# What is left of the request's time


def looked_up(loader: Loader, name: str = "request", *, begin_s: float | None = None, now: float = 0.0) -> LoadOp:
    """The read of the first page of a prompt that arrived at 0 s and must begin within `begin_s`."""
    request = make_request(PROMPT, request_id=name)
    request.spec, request.arrived_s = msgspec.structs.replace(request.spec, begin_s=begin_s), 0.0
    loader.reserve(request, list(range(NUM_PAGES)), 0, now=now)
    [first] = loader.take_ops()
    return first


@pytest.mark.parametrize(("begin_s", "now", "late_at"), [(0.5, 0.0, 0.45), (0.5, 0.48, 0.49), (60.0, 0.0, 1.0)])
def test_a_lookup_in_a_silent_store_ends_before_its_prompt_must_begin(
    begin_s: float, now: float, late_at: float
) -> None:
    loader = timed_loader(lookup=True)
    looked_up(loader, begin_s=begin_s, now=now)
    assert loader.next_deadline == pytest.approx(late_at)
    loader.expire(now=late_at + 0.001)
    [result] = loader.take_output().loaded
    expected = IN_TIME if late_at < 1.0 else "the store did not deliver within 1 s"
    assert (result.num_verified_tokens, result.reason) == (0, expected)
    assert result.retained_id is not None


def test_a_lookup_of_a_prompt_that_has_begun_before_has_its_whole_time() -> None:
    """The limit of its beginning is met."""
    loader, request = timed_loader(lookup=True), make_request(PROMPT)
    request.spec, request.arrived_s = msgspec.structs.replace(request.spec, begin_s=0.5), 0.0
    request.begin()
    loader.reserve(request, list(range(NUM_PAGES)), 0, now=2.0)
    loader.take_ops()
    assert loader.next_deadline == pytest.approx(3.0)


@pytest.mark.parametrize(("announced_at", "late_at"), [(3.0, 4.0), (4.0, 4.5), (4.8, 4.9), (4.98, 4.99)])
def test_pages_that_are_announced_late_are_given_up_before_their_reservation_ends(
    announced_at: float, late_at: float
) -> None:
    loader = timed_loader()
    loader.reserve(reader_of(), list(range(NUM_PAGES)), 0, now=0.0)
    loader.handle_progress(KVProgress("request", NUM_FULL, num_tokens=len(PROMPT)), now=announced_at)
    loader.take_ops()
    assert loader.next_deadline == pytest.approx(late_at)
    assert late_at < RESERVATION_S


@pytest.mark.parametrize(("now", "late_at"), [(2.0, 3.0), (4.2, 4.6)])
def test_a_second_store_has_what_the_first_connector_left_of_the_reservation(now: float, late_at: float) -> None:
    loader, request = timed_loader(lookup=True, prefix_only=True), reader_of()
    request.deadline = RESERVATION_S
    loader.reserve(request, list(range(NUM_PAGES)), 0, now=now)
    loader.take_ops()
    assert loader.next_deadline == pytest.approx(late_at)


def test_a_second_store_is_asked_for_every_full_block_of_a_prompt_that_comes_from_elsewhere() -> None:
    """No token of it is computed here."""
    request = reader_of(PROMPT[: 3 * BLOCK_SIZE])
    assert timed_loader(lookup=True, prefix_only=True).num_external_tokens(request, 0) == 3 * BLOCK_SIZE


# When the store counts as one that hangs


@pytest.mark.parametrize("is_aborted", [True, False], ids=["aborted", "computed"])
def test_a_read_that_outlives_its_request_counts_once_its_store_was_silent_for_the_time_out(is_aborted: bool) -> None:
    loader = timed_loader(lookup=True)
    load = looked_up(loader, begin_s=0.5).owner
    if is_aborted:
        assert loader.request_finished(make_request(PROMPT))
    assert loader.expire(now=0.46) == 0
    assert load.holds_blocks
    assert loader.next_deadline == pytest.approx(1.0)
    assert loader.expire(now=0.9) == 0
    assert loader.expire(now=1.0) == 1
    assert loader.next_deadline is None
    assert loader.expire(now=9.0) == 0, "it has been counted"


@pytest.mark.parametrize("end", ["missing", "skipped"])
def test_an_abort_of_a_read_that_ends_counts_nothing(end: str) -> None:
    loader = timed_loader(lookup=True)
    first = looked_up(loader)
    assert loader.request_finished(make_request(PROMPT))
    loader.op_ended(first, end, now=0.5)
    assert loader.expire(now=5.0) == 0


def test_requests_that_leave_a_store_that_hangs_count_at_once() -> None:
    """Their reads have not begun: they end as soon as they are cancelled."""
    loader = timed_loader(lookup=True)
    looked_up(loader, "begun", begin_s=0.5)
    assert loader.expire(now=1.0) == 1
    second = looked_up(loader, "second", now=1.0)
    assert loader.request_finished(make_request(PROMPT, request_id="second"))
    assert loader.expire(now=1.1) == 1
    loader.op_ended(second, "skipped", now=1.1)
    assert loader.expire(now=5.0) == 0


@pytest.mark.parametrize("answer", ["missing", "page_digest"])
def test_a_read_that_is_stuck_in_a_store_that_answers_others_never_makes_it_hang(answer: str) -> None:
    """Nor does it once the store is left alone for longer than the time-out."""
    loader = timed_loader(lookup=True)
    looked_up(loader, "stuck", begin_s=0.5)
    other = looked_up(loader, "other")
    assert loader.expire(now=0.46) == 0
    loader.op_ended(other, answer, now=0.5)
    assert loader.expire(now=1.0) == 0
    looked_up(loader, "aborted", now=5.0)
    assert loader.request_finished(make_request(PROMPT, request_id="aborted"))
    assert loader.expire(now=5.1) == 0
    assert loader.expire(now=6.0) == 1, "nothing has been answered since it began"


def test_a_store_that_hung_counts_as_hanging_only_until_its_next_answer() -> None:
    loader = timed_loader(lookup=True)
    looked_up(loader, "stuck", begin_s=0.5)
    assert loader.expire(now=1.0) == 1
    loader.op_ended(looked_up(loader, "other", now=1.0), "missing", now=1.1)
    looked_up(loader, "aborted", now=5.0)
    assert loader.request_finished(make_request(PROMPT, request_id="aborted"))
    assert loader.expire(now=5.1) == 0


def test_an_answer_excuses_a_silence_that_is_judged_late() -> None:
    loader = timed_loader(lookup=True)
    looked_up(loader, "stuck", begin_s=0.5)
    loader.op_ended(looked_up(loader, "other"), None, now=0.1)
    loader.expire(now=0.5)
    assert loader.expire(now=60.0) == 0


@pytest.mark.parametrize("failure", ["store_timeout", "skipped", "store_down"])
def test_reads_that_end_without_an_answer_excuse_no_silence(failure: str) -> None:
    loader = timed_loader(lookup=True)
    looked_up(loader, "stuck", begin_s=0.5)
    loader.op_ended(looked_up(loader, "other"), failure, now=0.5)
    loader.expire(now=0.5)
    assert loader.expire(now=1.0) == 1


def test_a_store_that_hangs_fails_no_prompt_that_must_begin_in_time_and_is_used_no_more(tmp_path: Path) -> None:
    ensure_secret(tmp_path / "secret")
    now, begin_s = 0.0, 0.4 * LOAD_TIMEOUT_S
    connector = ScriptedStoreConnector(NUM_BLOCKS, lambda: now, str(tmp_path / "secret"))
    core = ModellessCore(connector, lambda: now)
    for number in range(3):
        assert not connector._io.load_breaker.is_open
        spec = EngineRequest(
            request_id=f"r{number}",
            prompt_token_ids=[number, *range(BLOCK_SIZE)],
            params=SamplingParams(max_tokens=1, ignore_eos=True),
            begin_s=begin_s,
        )
        request = Request.from_spec(spec, arrival=number, fingerprint=FINGERPRINT.hex())
        request.arrived_s = now
        core.add(request)
        assert len(connector.in_flight) > number, "it looks into the store"
        while request.finish_reason is None:
            now += 0.1
            core.step()
        assert request.finish_reason == "length"
    assert connector._io.load_breaker.is_open
