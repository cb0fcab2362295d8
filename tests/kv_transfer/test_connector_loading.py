"""One core loads what another has saved: only what it lacks, and no more than it can trust."""

from __future__ import annotations

import time

import pytest

from engine import failpoints
from engine.messages import KVProgress
from kv_transfer.store import MemoryStore
from tests.kv_transfer.harness import BLOCK_SIZE, Core, GatedStore, make_request
from tests.kv_transfer.pairs import NUM_FULL, NUM_PAGES, PROMPT, pair, reader_of, writer_of


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
    assert decode.connector.counters.num_loaded_blocks == NUM_PAGES - 2
    assert decode.has(reader, len(PROMPT))


def test_all_full_blocks_local_moves_only_the_tail(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.reserve(reader, num_local_blocks=NUM_FULL)
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.num_external_tokens) == (len(PROMPT), 3)
    assert decode.connector.counters.num_loaded_blocks == 1


def test_nothing_to_move_is_a_result_once_the_holder_is_done(store: MemoryStore) -> None:
    _, decode = pair(store)
    prompt = PROMPT[: NUM_FULL * BLOCK_SIZE]
    reader = reader_of(prompt)
    assert decode.connector.get_num_new_matched_tokens(reader, len(prompt)) == 0
    decode.reserve(reader, num_local_blocks=NUM_FULL)
    assert not decode.loaded
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.num_external_tokens) == (len(prompt), 0)


def test_holder_that_fails_half_way_leaves_a_verified_prefix(store: MemoryStore) -> None:
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


def test_holder_with_another_prompt_is_not_believed(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.reserve(reader)
    decode.connector.handle(KVProgress("request", 99, num_tokens=7))
    result = decode.result(reader)
    assert result.num_verified_tokens == 0
    assert result.reason == f"7 tokens were offered, {len(PROMPT)} are needed"


def test_word_about_unknown_and_finished_requests_is_ignored(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.connector.handle(KVProgress("nobody", 3))
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
    assert decode.loaded == [], "late reads count for nobody"
    result = decode.complete(again)
    assert result.num_verified_tokens == len(PROMPT)
    assert decode.has(again, len(PROMPT))


def test_store_that_hangs_is_given_up_and_keeps_its_blocks(store: MemoryStore) -> None:
    gated = GatedStore()
    gated.gate.set()
    prefill, decode = Core(gated), Core(gated, load_timeout_s=0.05, num_io_threads=1)
    prefill.prefill(writer_of())
    gated.gate.clear()
    gated.num_entered = 0
    reader = reader_of()
    decode.reserve(reader)
    decode.connector.handle(KVProgress("request", NUM_FULL, num_tokens=len(PROMPT)))
    decode.wait(lambda: gated.num_entered == 1)
    time.sleep(0.06)
    decode.step()
    result = decode.result(reader)
    assert result.num_verified_tokens == 0
    assert result.reason == "the store did not deliver within 0.05 s"
    assert result.retained_id not in (None, *decode.freed), "a read under way still writes to its block"
    gated.gate.set()
    decode.wait(lambda: decode.freed == [result.retained_id])
    assert gated.num_entered == 1


def test_store_that_hangs_is_left_alone_and_holds_up_nobody_else(store: MemoryStore) -> None:
    gated = GatedStore()
    decode = Core(gated, load_timeout_s=0.02, num_io_threads=1, breaker_failures=2, breaker_retry_s=0.01)
    for number in range(2):
        reader = make_request(PROMPT, request_id=f"hangs-{number}", transfer_id=f"t{number}", remote=True)
        decode.reserve(reader)
        decode.connector.handle(KVProgress(reader.request_id, NUM_FULL, num_tokens=len(PROMPT)))
        time.sleep(0.04)
        decode.step()
        assert decode.result(reader).reason == "the store did not deliver within 0.02 s"
    reader = make_request(PROMPT, request_id="later", transfer_id="later", remote=True)
    decode.reserve(reader)
    decode.connector.handle(KVProgress("later", NUM_FULL, num_tokens=len(PROMPT)))
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.retained_id) == (0, None), "it waited for a store that is known to hang"
    assert decode.connector.counters.load_failures["store_down"] >= 1
    gated.gate.set()


def test_failpoints_stand_on_the_way(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.reserve(reader)
    failpoints.configure("kv.load=fail@3;kv.save=fail;kv.store.put=fail;kv.store.get=fail@9")
    try:
        assert decode.complete(reader).num_verified_tokens < len(PROMPT)
        assert decode.connector.counters.load_failures["failpoint"] == 1
        other = writer_of([9] * 9, request_id="other", transfer_id="other")
        prefill.prefill(other)
        assert prefill.ended == "failed"
    finally:
        failpoints.configure(None)
