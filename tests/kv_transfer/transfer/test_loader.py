"""One core loads what another has saved: only what it lacks, and no more than it can trust."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine import failpoints
from engine.core.messages import KVProgress
from engine.kv_connector import KVLoadResult
from engine.scheduling.request import Request
from kv_transfer.page.format import Buffer, PageKey, PageNaming
from kv_transfer.transfer.loader import MISSING, Loader, LoadOp
from tests.kv_transfer.harness import (
    BLOCK_SIZE,
    FINGERPRINT,
    LAYOUT,
    NUM_FULL,
    NUM_PAGES,
    PROMPT,
    BrokenStore,
    Core,
    GatedStore,
    make_request,
    pair,
    reader_of,
    writer_of,
)
from tests.kv_transfer.memory_store import MemoryStore
from tests.waiting import wait_until


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_only_what_is_missing_here_is_read(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.reserve(reader, num_local_blocks=2)
    result = decode.complete(reader)
    assert result.num_verified_tokens == len(PROMPT)
    assert result.num_external_tokens == len(PROMPT) - 2 * BLOCK_SIZE
    assert decode.connector.counters.loaded.num_blocks == NUM_PAGES - 2
    assert decode.has(reader, len(PROMPT))


def test_all_full_blocks_local_moves_only_the_tail(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.reserve(reader, num_local_blocks=NUM_FULL)
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.num_external_tokens) == (len(PROMPT), 3)
    assert decode.connector.counters.loaded.num_blocks == 1


def test_nothing_to_move_is_a_result_once_the_producer_has_finished(store: MemoryStore) -> None:
    _, decode = pair(store)
    prompt = PROMPT[: NUM_FULL * BLOCK_SIZE]
    reader = reader_of(prompt)
    assert decode.connector.get_num_new_matched_tokens(reader, len(prompt)) == 0
    decode.reserve(reader, num_local_blocks=NUM_FULL)
    assert not decode.loaded
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.num_external_tokens) == (len(prompt), 0)


def test_producer_that_fails_half_way_leaves_a_verified_prefix(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.reserve(reader)
    decode.ready(reader, 3)
    decode.connector.handle(KVProgress("request", 3, failed="the stream broke"))
    result = decode.result(reader)
    assert (result.num_verified_tokens, result.num_recomputed_blocks) == (3 * BLOCK_SIZE, NUM_PAGES - 3)
    assert result.reason == "the stream broke"
    assert decode.has(reader, 3 * BLOCK_SIZE)


def test_producer_with_another_prompt_is_rejected(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.reserve(reader)
    decode.connector.handle(KVProgress("request", 99, num_tokens=7))
    result = decode.result(reader)
    assert result.num_verified_tokens == 0
    assert result.reason == f"7 tokens were offered, {len(PROMPT)} are needed"


def test_progress_of_unknown_and_finished_requests_is_ignored(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.connector.handle(KVProgress("unknown", 3))
    decode.reserve(reader)
    decode.complete(reader)
    for _ in range(2):
        decode.connector.handle(KVProgress("request", 5, num_tokens=len(PROMPT)))
        decode.connector.handle(KVProgress("request", 5, failed="late"))
        decode.settle()
    assert len(decode.loaded) == 1


def test_abort_while_reading_frees_blocks_only_after_the_reads_have_ended() -> None:
    store = GatedStore()
    store.gate.set()
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    store.gate.clear()
    store.num_entered = 0
    reader = reader_of()
    decode.reserve(reader)
    decode.connector.handle(KVProgress("request", NUM_FULL, num_tokens=len(PROMPT)))
    decode.wait(lambda: store.num_entered == 2)
    assert decode.finish(reader, "abort")
    # STEP a request of the same name comes while the old one's reads are under way
    again = reader_of()
    decode.reserve(again)
    decode.settle()
    assert decode.freed == []
    store.gate.set()
    decode.wait(lambda: decode.freed == ["request"])
    assert decode.loaded == [], "late reads count for no request"
    result = decode.complete(again)
    assert result.num_verified_tokens == len(PROMPT)
    assert decode.has(again, len(PROMPT))


def test_abort_of_reads_that_wait_behind_a_store_that_hangs_frees_their_blocks_at_once() -> None:
    store = GatedStore()
    decode = Core(store, num_io_threads=1)
    readers = [make_request(PROMPT, request_id=name, transfer_id=name, remote=True) for name in ("begun", "queued")]
    for reader in readers:
        decode.reserve(reader)
        decode.connector.handle(KVProgress(reader.request_id, NUM_FULL, num_tokens=len(PROMPT)))
        decode.wait(lambda: store.num_entered == 1)
    # STEP both are aborted while the only thread hangs in the first one's first page
    for reader in readers:
        assert decode.finish(reader, "abort")
    assert decode.freed == ["queued"]
    store.gate.set()
    decode.wait(lambda: decode.freed == ["queued", "begun"])
    assert store.num_entered == 1, "what had not begun was dropped"
    assert not decode.connector._queued
    assert not decode.connector._in_flight


def test_store_that_hangs_is_given_up_and_keeps_its_blocks(store: MemoryStore) -> None:
    gated = GatedStore()
    gated.gate.set()
    passed_s = 0.0
    prefill, decode = Core(gated), Core(gated, clock=lambda: passed_s, load_timeout_s=0.05, num_io_threads=1)
    prefill.prefill(writer_of())
    gated.gate.clear()
    gated.num_entered = 0
    reader = reader_of()
    decode.reserve(reader)
    decode.connector.handle(KVProgress("request", NUM_FULL, num_tokens=len(PROMPT)))
    decode.wait(lambda: gated.num_entered == 1)
    passed_s = 0.06
    result = decode.result(reader)
    assert result.num_verified_tokens == 0
    assert result.reason == "the store did not deliver within 0.05 s"
    assert result.retained_id not in (None, *decode.freed), "a read under way still writes to its block"
    gated.gate.set()
    decode.wait(lambda: decode.freed == [result.retained_id])
    assert gated.num_entered == 1


def test_store_that_hangs_is_not_used_and_delays_no_other_request(store: MemoryStore) -> None:
    gated = GatedStore()
    decode = Core(gated, load_timeout_s=0.02, num_io_threads=1, breaker_failures=2, breaker_retry_s=0.01)
    for number in range(2):
        reader = make_request(PROMPT, request_id=f"hangs-{number}", transfer_id=f"t{number}", remote=True)
        decode.reserve(reader)
        decode.connector.handle(KVProgress(reader.request_id, NUM_FULL, num_tokens=len(PROMPT)))
        decode.step()
        time.sleep(0.04)
        decode.step()
        assert decode.result(reader).reason == "the store did not deliver within 0.02 s"
    reader = make_request(PROMPT, request_id="later", transfer_id="later", remote=True)
    decode.reserve(reader)
    decode.connector.handle(KVProgress("later", NUM_FULL, num_tokens=len(PROMPT)))
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.retained_id) == (0, None), "it waited for a store that is known to hang"
    assert decode.connector.counters.loaded.failures["store_down"] >= 1
    # STEP saves, which the same threads carry out, do not queue behind them either
    writer = writer_of(request_id="writer", transfer_id="writer")
    decode.allocate(writer)
    decode.progress(writer, len(PROMPT))
    decode.finish(writer, "hand_over")
    decode.wait(lambda: decode.connector.num_transfers == 0)
    assert decode.ended == "failed"
    assert decode.connector.counters.saved.failures["store_down"] >= 1
    gated.gate.set()


class _HangsOnce(BrokenStore):
    """A broken store whose first read never ends."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        if self.num_calls == 0:
            self.num_calls = 1
            assert self._gate.wait(60.0)
        return super().get_into(key, buffers, check)


def test_store_is_tried_again_while_one_of_two_threads_hangs() -> None:
    gate, now = threading.Event(), 1000.0
    store = _HangsOnce(gate)
    limits: dict[str, Any] = {"load_timeout_s": 1000.0, "breaker_failures": 2, "breaker_retry_s": 0.01}
    core = Core(store, num_blocks=4096, clock=lambda: now, **limits)
    hanging = make_request(PROMPT, request_id="hangs")
    core.connector.update_state_after_alloc(hanging, core.allocate(hanging), 0)
    core.wait(lambda: store.num_calls == 1)
    for number in range(2):
        seek(core, make_request(PROMPT, request_id=f"fails-{number}"))
    assert core.connector._io.load_breaker.is_open
    # STEP for a while no operation ends, then the store works again
    now += 5.0
    store.broken = False
    Core(store).prefill(writer_of())
    numbers = itertools.count()

    def is_found() -> bool:
        request = make_request(PROMPT, request_id=f"again-{next(numbers)}")
        return seek(core, request).num_verified_tokens == NUM_FULL * BLOCK_SIZE

    wait_until(is_found, "the store is not read any more", within_s=20.0)
    gate.set()


def test_failpoints_stand_on_the_way(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.reserve(reader)
    failpoints.configure("kv.load=fail@3;kv.save=fail;kv.store.put=fail;kv.store.get=fail@9")
    try:
        assert decode.complete(reader).num_verified_tokens < len(PROMPT)
        assert decode.connector.counters.loaded.failures["failpoint"] == 1
        other = writer_of([9] * 9, request_id="other", transfer_id="other")
        prefill.prefill(other)
        assert prefill.ended == "failed"
    finally:
        failpoints.configure(None)


# A prompt that is not handed over: what the store has of it is loaded, the rest is computed.


@pytest.fixture
def filled_store() -> MemoryStore:
    """Has the prompt's pages, its tail's too."""
    store = MemoryStore()
    Core(store).prefill(make_request(PROMPT, hold=True))
    return store


def seek(core: Core, request: Request, num_local_blocks: int = 0) -> KVLoadResult:
    """Admit a request that is to be computed here, and wait for what was found of it."""
    table = core.allocate(request)
    core.fill(request, num_local_blocks)
    assert core.connector.get_num_new_matched_tokens(request, num_local_blocks * BLOCK_SIZE) > 0
    core.connector.update_state_after_alloc(request, table, num_local_blocks)
    return core.result(request)


def full_block_keys(store: MemoryStore) -> list[PageKey]:
    """In the order in which they were written: that of the prompt."""
    return [key for key in store.values if not key.scope]


def test_full_blocks_are_found_and_the_tail_is_not_looked_up(filled_store: MemoryStore) -> None:
    core, request = Core(filled_store), make_request(PROMPT)
    result = seek(core, request)
    assert (result.num_verified_tokens, result.num_external_tokens) == (NUM_FULL * BLOCK_SIZE, NUM_FULL * BLOCK_SIZE)
    assert (result.num_recomputed_blocks, result.reason) == (0, None)
    assert core.has(request, NUM_FULL * BLOCK_SIZE)
    assert core.connector.counters.loaded.num_blocks == NUM_FULL
    assert not core.finish(request, "stop")


def test_one_token_is_left_to_compute(filled_store: MemoryStore) -> None:
    core, request = Core(filled_store), make_request(PROMPT[: 3 * BLOCK_SIZE])
    assert seek(core, request).num_verified_tokens == 2 * BLOCK_SIZE
    assert Core(filled_store).connector.get_num_new_matched_tokens(make_request(PROMPT[:BLOCK_SIZE]), 0) == 0


def test_local_blocks_are_not_read(filled_store: MemoryStore) -> None:
    core, request = Core(filled_store), make_request(PROMPT)
    result = seek(core, request, num_local_blocks=3)
    assert (result.num_verified_tokens, result.num_external_tokens) == (NUM_FULL * BLOCK_SIZE, 2 * BLOCK_SIZE)
    assert core.connector.counters.loaded.num_blocks == 2


def test_a_new_prompt_costs_one_lookup() -> None:
    store = GatedStore()
    store.gate.set()
    core = Core(store)
    result = seek(core, make_request(PROMPT))
    assert (result.num_verified_tokens, result.num_recomputed_blocks, store.num_entered) == (0, 0, 1)


def test_what_precedes_a_missing_block_is_used(filled_store: MemoryStore) -> None:
    filled_store.delete(full_block_keys(filled_store)[3])
    core, request = Core(filled_store), make_request(PROMPT)
    assert seek(core, request).num_verified_tokens == 3 * BLOCK_SIZE
    assert core.has(request, 3 * BLOCK_SIZE)


def test_a_damaged_block_is_counted_removed_and_computed(filled_store: MemoryStore) -> None:
    key = full_block_keys(filled_store)[2]
    filled_store.values[key] = filled_store.values[key][:-1]
    core = Core(filled_store)
    assert seek(core, make_request(PROMPT)).num_verified_tokens == 2 * BLOCK_SIZE
    assert core.connector.counters.loaded.failures["page_size"] == 1
    assert key not in filled_store.values


def test_a_shutdown_ends_the_search_for_more_damage(filled_store: MemoryStore) -> None:
    class Inspected(GatedStore):
        """Reads wait from the second on."""

        def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
            if self.num_entered:
                return super().get_into(key, buffers, check)
            self.num_entered = 1
            return MemoryStore.get_into(self, key, buffers, check)

    store = Inspected()
    store.values = dict.fromkeys(filled_store.values, b"damaged")
    core = Core(store, num_io_threads=1, shutdown_timeout_s=0.01)
    assert seek(core, make_request(PROMPT)).num_verified_tokens == 0
    core.wait(lambda: store.num_entered == 2)
    core.shut_down_before(store.gate)
    assert store.num_entered == 2


def test_a_dead_store_is_used_until_the_breaker_opens() -> None:
    store = BrokenStore()
    core = Core(store, breaker_failures=2)
    for number in range(5):
        assert seek(core, make_request(PROMPT, request_id=str(number))).num_verified_tokens == 0
    assert store.num_calls == 2


def test_a_store_that_hangs_is_given_up_and_keeps_the_blocks() -> None:
    store = GatedStore()
    core, request = Core(store, load_timeout_s=0.05), make_request(PROMPT)
    result = seek(core, request)
    assert result.num_verified_tokens == 0
    assert result.retained_id is not None
    assert result.retained_id not in core.freed
    store.gate.set()
    core.wait(lambda: core.freed == [result.retained_id])


def test_an_abort_keeps_the_blocks_until_the_read_has_ended() -> None:
    store = GatedStore()
    core, request = Core(store), make_request(PROMPT)
    core.connector.update_state_after_alloc(request, core.allocate(request), 0)
    core.wait(lambda: store.num_entered == 1)
    assert core.finish(request, "abort")
    store.gate.set()
    core.wait(lambda: core.freed == [request.request_id])
    assert not core.loaded


def test_an_aborted_lookup_frees_the_blocks_with_the_read_in_flight_though_it_finds_its_page() -> None:
    loader = Loader(PageNaming.of(FINGERPRINT, LAYOUT), load_timeout_s=10.0, lookup=True)
    request = make_request(PROMPT)
    loader.reserve(request, list(range(NUM_PAGES)), 0, now=0.0)
    [first] = loader.take_ops()
    assert loader.request_finished(request)
    loader.op_ended(first, None, now=0.0)
    assert loader.take_ops() == []
    assert loader.take_output().freed_request_ids == [request.request_id]


def test_lookups_can_be_switched_off(filled_store: MemoryStore) -> None:
    core = Core(filled_store, lookup=False)
    assert core.connector.get_num_new_matched_tokens(make_request(PROMPT), 0) == 0
    loader = bare_loader()
    assert loader.num_external_tokens(make_request(PROMPT), 2 * BLOCK_SIZE) == 0, "its prefix is no reason to load"


# The loader without its connector

ALL = KVProgress("request", NUM_FULL, num_tokens=len(PROMPT))


def bare_loader(**options: bool) -> Loader:
    return Loader(PageNaming.of(FINGERPRINT, LAYOUT), load_timeout_s=1.0, **options)


def announced(loader: Loader, *announcements: KVProgress, prompt: list[int] = PROMPT) -> list[LoadOp]:
    """The reads of a hand-over whose pages are announced at 0 s."""
    loader.reserve(reader_of(prompt), list(range(NUM_PAGES)), 0, now=0.0)
    for announcement in announcements:
        loader.handle_progress(announcement, now=0.0)
    return loader.take_ops()


def end_well(loader: Loader, ops: Sequence[LoadOp], now: float = 0.0) -> None:
    for op in ops:
        loader.op_ended(op, None, now)


def test_a_prompt_whose_next_chunk_takes_long_does_not_make_the_store_late() -> None:
    loader = bare_loader()
    end_well(loader, announced(loader, KVProgress("request", 2)))
    assert loader.next_deadline is None
    assert loader.expire(now=3.0) == 0
    loader.handle_progress(ALL, now=3.0)
    end_well(loader, loader.take_ops(), now=3.0)
    [result] = loader.take_output().loaded
    assert result.num_verified_tokens == len(PROMPT)


def test_a_prompt_without_a_tail_ends_with_its_producer_and_needs_no_more_of_it() -> None:
    loader, prompt = bare_loader(), PROMPT[: NUM_FULL * BLOCK_SIZE]
    end_well(loader, announced(loader, KVProgress("request", NUM_FULL), prompt=prompt))
    assert loader.take_output().loaded == []
    loader.handle_progress(KVProgress("request", NUM_FULL, failed="the stream broke"), now=0.0)
    [result] = loader.take_output().loaded
    assert (result.num_verified_tokens, result.reason) == (len(prompt), None)


@pytest.mark.parametrize(
    ("announcements", "num_read"),
    [
        ([KVProgress("request", 10**6)], NUM_FULL),
        ([KVProgress("request", 3), KVProgress("request", 2), KVProgress("request", 4)], 4),
        ([KVProgress("request", 2), KVProgress("request", 2, failed="x"), KVProgress("request", 4)], 2),
    ],
    ids=["too many", "fewer than before", "after a failure"],
)
def test_whatever_is_announced_each_page_is_read_once(announcements: list[KVProgress], num_read: int) -> None:
    assert [op.block_index for op in announced(bare_loader(), *announcements)] == list(range(num_read))


def test_a_bad_page_cancels_itself_and_what_is_behind_it() -> None:
    ops = announced(loader := bare_loader(), ALL)
    loader.op_ended(ops[2], "page_digest", now=0.0)
    loader.op_ended(ops[4], MISSING, now=0.0)
    assert [op.is_cancelled for op in ops] == [op.block_index >= 2 for op in ops]
    end_well(loader, ops[:2])
    for op in (ops[3], *ops[5:]):
        loader.op_ended(op, "skipped", now=0.0)
    [result] = loader.take_output().loaded
    assert (result.num_verified_tokens, result.reason) == (2 * BLOCK_SIZE, "page_digest")


def test_an_abort_before_its_reads_have_begun_frees_the_blocks_at_once() -> None:
    loader, request = bare_loader(), reader_of()
    loader.reserve(request, list(range(NUM_PAGES)), 0, now=0.0)
    loader.handle_progress(ALL, now=0.0)
    assert not loader.request_finished(request)
    assert loader.take_ops() == []


def test_a_load_that_is_given_up_twice_has_one_result() -> None:
    announced(loader := bare_loader())
    load = loader._loads["request"]
    for failure in ("the peer is gone", "again"):
        loader.give_up(load, failure)
    [result] = loader.take_output().loaded
    assert (result.reason, result.retained_id) == ("the peer is gone", None)


def test_blocks_that_requests_of_one_id_leave_to_their_reads_have_different_names() -> None:
    loader = bare_loader()
    for load in (announced(loader, ALL)[0].owner for _ in range(2)):
        for failure in ("late", "again"):
            loader.give_up(load, failure)
    first, second = loader.take_output().loaded
    assert None not in (first.retained_id, second.retained_id)
    assert first.retained_id != second.retained_id


def test_the_end_of_the_core_cancels_all_reads() -> None:
    ops = announced(loader := bare_loader(), ALL)
    loader.cancel_all()
    assert all(op.is_cancelled for op in ops)
