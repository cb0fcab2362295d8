"""One core saves, another loads: through memory, through a folder, and through all that can go wrong on the way."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import failpoints
from engine.config import KVConnectorConfig
from engine.errors import EngineError
from engine.kv_connector import make_connector
from engine.messages import KVProgress, LeaseCommand
from kv_transfer.connector import SharedStorageConnector
from kv_transfer.page import HEADER_BYTES
from kv_transfer.page_naming import PageNaming
from kv_transfer.secret import ensure_secret
from kv_transfer.shared_storage import SharedStorage
from kv_transfer.store import MemoryStore, PageKey
from tests.kv_transfer.harness import (
    BLOCK_SIZE,
    FINGERPRINT,
    LAYOUT,
    LEASE_S,
    BrokenStore,
    Core,
    GatedStore,
    files,
    make_request,
)

PROMPT = list(range(100, 100 + 5 * BLOCK_SIZE + 3))  # five full blocks and a tail of three tokens
NUM_FULL, NUM_PAGES = 5, 6


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def pair(store: MemoryStore) -> tuple[Core, Core]:
    return Core(store), Core(store)


def reader_of(prompt: list[int] = PROMPT, **names: str):  # type: ignore[no-untyped-def]
    return make_request(prompt, remote=True, **names)


def writer_of(prompt: list[int] = PROMPT, **names: str):  # type: ignore[no-untyped-def]
    return make_request(prompt, hold=True, **names)


# Saving


def test_blocks_become_ready_while_later_chunks_are_computed(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    request, reader = writer_of(), reader_of()
    prefill.allocate(request)
    decode.reserve(reader)
    assert prefill.connector.num_transfers == 0
    for num_tokens in (6, 13, len(PROMPT)):
        # STEP a chunk is computed
        prefill.fill(request, -(-num_tokens // BLOCK_SIZE))
        prefill.progress(request, num_tokens)
        num_ready = num_tokens // BLOCK_SIZE
        prefill.wait(lambda: prefill.events[-1].num_ready_blocks == num_ready)  # noqa: B023
        assert len(store.values) == num_ready
        # STEP decode reads it before the next one
        decode.ready(reader, num_ready)
        decode.wait(lambda: decode.connector.counters.num_loaded_blocks == num_ready)  # noqa: B023
        assert decode.has(reader, num_ready * BLOCK_SIZE)
        assert not decode.loaded
    prefill.finish(request, "hand_over")
    prefill.wait(lambda: prefill.events[-1].num_tokens == len(PROMPT))
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.num_external_tokens) == (len(PROMPT), len(PROMPT))
    assert (result.num_recomputed_blocks, result.reason) == (0, None)
    assert decode.has(reader, len(PROMPT))
    ready = [event.num_ready_blocks for event in prefill.events]
    assert ready == sorted(ready)
    assert ready[0] == 0, "the offer itself is an event"


def test_blocks_of_a_finished_request_stay_until_their_saves_have_ended() -> None:
    store = GatedStore()
    prefill = Core(store)
    request = writer_of()
    prefill.allocate(request)
    prefill.fill(request)
    prefill.progress(request, len(PROMPT))
    assert prefill.finish(request, "hand_over")
    prefill.settle()
    assert prefill.freed == []
    store.gate.set()
    prefill.wait(lambda: prefill.freed == ["request"])
    assert prefill.events[-1].num_tokens == len(PROMPT)
    assert prefill.connector.num_transfers == 1, "the lease outlives the blocks"


def test_exact_multiple_of_the_block_size_has_no_tail(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prompt = PROMPT[: NUM_FULL * BLOCK_SIZE]
    request, reader = writer_of(prompt), reader_of(prompt)
    prefill.prefill(request)
    assert len(store.values) == NUM_FULL
    decode.reserve(reader)
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.num_recomputed_blocks) == (len(prompt), 0)
    assert decode.has(reader, len(prompt))


def test_prompt_shorter_than_a_block_is_all_tail(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of([7, 8]))
    reader = reader_of([7, 8])
    decode.reserve(reader)
    assert decode.complete(reader).num_verified_tokens == 2
    assert decode.has(reader, 2)


def test_full_blocks_are_written_once_and_tails_belong_to_their_transfer(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    for number in range(3):
        request = writer_of(request_id=f"r{number}", transfer_id=f"t{number}")
        prefill.prefill(request)
        prefill.wait(lambda: prefill.events[-1].num_tokens is not None)
    assert len(store.values) == NUM_FULL + 3
    assert prefill.connector.counters.num_saved_blocks == NUM_FULL + 3
    assert prefill.connector.counters.num_shared_blocks == 2 * NUM_FULL
    stranger = reader_of(transfer_id="t9")
    decode.reserve(stranger)
    result = decode.complete(stranger)
    assert (result.num_verified_tokens, result.num_recomputed_blocks) == (NUM_FULL * BLOCK_SIZE, 1)
    assert decode.connector.counters.load_failures == {"missing": 1}


def test_release_removes_the_tail_and_keeps_the_full_blocks(store: MemoryStore) -> None:
    prefill, _ = pair(store)
    prefill.prefill(writer_of())
    assert len(store.values) == NUM_PAGES
    prefill.release()
    prefill.release()
    prefill.wait(lambda: len(store.values) == NUM_FULL)
    assert [event.ended for event in prefill.events].count("released") == 1
    assert prefill.connector.num_transfers == 0


def test_expired_lease_ends_the_transfer(store: MemoryStore) -> None:
    prefill, _ = pair(store)
    request = writer_of()
    now = time.monotonic()
    prefill.connector._clock = lambda: now
    prefill.prefill(request)
    prefill.connector.handle(LeaseCommand("transfer", "attach", LEASE_S))
    assert prefill.connector.next_deadline_s() == pytest.approx(LEASE_S)
    now += LEASE_S - 0.01
    prefill.step()
    assert prefill.ended is None
    now += 0.02
    prefill.step()
    assert prefill.ended == "expired"
    assert prefill.num_expired == 1
    prefill.wait(lambda: len(store.values) == NUM_FULL)
    assert prefill.connector.next_deadline_s() is None


def test_release_before_the_offer_saves_nothing(store: MemoryStore) -> None:
    prefill, _ = pair(store)
    prefill.release()
    request = writer_of()
    prefill.allocate(request)
    prefill.progress(request, len(PROMPT))
    assert not prefill.finish(request, "hand_over")
    prefill.settle()
    assert store.values == {}
    assert prefill.ended == "released"
    assert prefill.connector.num_transfers == 0


@pytest.mark.parametrize("reason", ["abort", "stop", "length", "error"])
def test_request_that_is_not_handed_over_fails_its_transfer(store: MemoryStore, reason: str) -> None:
    prefill, _ = pair(store)
    request = writer_of()
    prefill.allocate(request)
    prefill.progress(request, 6)
    held = prefill.finish(request, reason)  # type: ignore[arg-type]
    prefill.wait(lambda: prefill.freed == ["request"] or not held)
    assert prefill.ended == "failed"
    assert prefill.events[-1].reason == f"the request ended: {reason}"
    assert prefill.connector.num_transfers == 0


def test_request_that_ends_in_the_queue_tells_its_reader(store: MemoryStore) -> None:
    prefill, _ = pair(store)
    assert not prefill.finish(writer_of(), "abort")
    assert prefill.ended == "failed"


def test_two_requests_with_one_transfer_id_do_not_disturb_each_other(store: MemoryStore) -> None:
    prefill, _ = pair(store)
    first, second = writer_of(request_id="first"), writer_of([1, 2, 3, 4, 5], request_id="second")
    prefill.prefill(first)
    prefill.allocate(second)
    prefill.progress(second, 5)
    assert not prefill.finish(second, "abort")
    assert prefill.ended is None
    assert prefill.connector.num_transfers == 1
    assert len(store.values) == NUM_PAGES


def test_abort_in_flight_frees_blocks_only_after_the_saves_have_ended() -> None:
    store = GatedStore()
    prefill = Core(store)
    request = writer_of()
    prefill.allocate(request)
    prefill.fill(request)
    prefill.progress(request, len(PROMPT))
    prefill.wait(lambda: store.num_entered == 2)  # both I/O threads are inside
    assert prefill.finish(request, "abort")
    prefill.settle()
    assert prefill.freed == []
    store.gate.set()
    prefill.wait(lambda: prefill.freed == ["request"])
    assert store.num_entered == 2, "what had not begun was dropped"


def test_store_that_cannot_be_written_fails_the_transfer_and_not_the_request() -> None:
    store = BrokenStore()
    prefill = Core(store, breaker_failures=2, breaker_retry_s=60.0)
    for number in range(3):
        request = writer_of(request_id=f"r{number}", transfer_id=f"t{number}")
        prefill.allocate(request)
        prefill.progress(request, len(PROMPT))
        prefill.finish(request, "hand_over")
        prefill.wait(lambda: prefill.connector.num_transfers == 0)
    assert prefill.ended == "failed"
    failures = prefill.connector.counters.save_failures
    assert failures["store_eio"] <= 3
    assert failures["store_down"] > 0
    assert store.num_asked <= 3, "a dead store is left alone"


# Loading


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


# A damaged folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SharedStorage]:
    store = SharedStorage(tmp_path / "store", capacity_bytes=1 << 30)
    yield store
    store.close()


def flip(path: Path, others: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def flip_header(path: Path, others: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    content[90] ^= 1
    path.write_bytes(content)


def truncate(path: Path, others: list[Path]) -> None:
    os.truncate(path, HEADER_BYTES)


def empty(path: Path, others: list[Path]) -> None:
    os.truncate(path, 0)


def remove(path: Path, others: list[Path]) -> None:
    path.unlink()


def swap(path: Path, others: list[Path]) -> None:
    content = others[0].read_bytes()
    others[0].write_bytes(path.read_bytes())
    path.write_bytes(content)


def link(path: Path, others: list[Path]) -> None:
    path.unlink()
    path.symlink_to(others[0])


def fifo(path: Path, others: list[Path]) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [flip, flip_header, truncate, empty, remove, swap, link, fifo])
@pytest.mark.parametrize("index", [0, 2, NUM_FULL])
def test_damage_costs_a_recompute_and_never_a_wrong_block(
    folder: SharedStorage, tmp_path: Path, damage: Callable[[Path, list[Path]], None], index: int
) -> None:
    key = tmp_path / "key"
    ensure_secret(key)
    options = {"kv_secret_file": str(key)}
    prefill, decode = Core(folder, **options), Core(folder, **options)
    request, reader = writer_of(), reader_of()
    prefill.prefill(request)
    # STEP one page is damaged (a swap takes the last two)
    naming = PageNaming.of(FINGERPRINT, LAYOUT)
    hashes = naming.block_hashes(request)
    names = [naming.full_block(hashes, request.root_hash, number) for number in range(NUM_FULL)]
    names.append(naming.tail(request, hashes, "transfer"))
    paths = [folder.path.joinpath(*name.key.parts) for name in names]
    assert sorted(paths) == files(folder.path)
    other = NUM_FULL - 1 if index != NUM_FULL - 1 else NUM_FULL
    damage(paths[index], [paths[other]])
    # STEP what precedes it is used
    decode.reserve(reader)
    result = decode.complete(reader)
    first_bad = min(index, other) if damage is swap else index
    assert result.num_verified_tokens == first_bad * BLOCK_SIZE
    assert result.num_recomputed_blocks == NUM_PAGES - first_bad
    assert decode.has(reader, result.num_verified_tokens)
    assert sum(decode.connector.counters.load_failures.values()) >= 1
    assert decode.connector.counters.num_recomputed_blocks == NUM_PAGES - first_bad
    assert not decode.connector._io.breaker.is_open
    # STEP what is bad has gone from the folder, and the next request heals it
    again = writer_of(request_id="again", transfer_id="again")
    prefill.prefill(again)
    prefill.wait(lambda: prefill.events[-1].transfer_id == "again" and prefill.events[-1].num_tokens is not None)
    healed = reader_of(request_id="again", transfer_id="again")
    decode.reserve(healed)
    if damage is not swap:
        assert decode.complete(healed).num_verified_tokens == len(PROMPT)
        assert decode.has(healed, len(PROMPT))


def test_all_damage_is_gone_after_one_request_has_met_the_first_of_it(folder: SharedStorage, tmp_path: Path) -> None:
    ensure_secret(tmp_path / "key")
    prefill, decode = (Core(folder, kv_secret_file=str(tmp_path / "key")) for _ in range(2))
    request, reader = writer_of(), reader_of()
    prefill.prefill(request)
    naming = PageNaming.of(FINGERPRINT, LAYOUT)
    hashes = naming.block_hashes(request)
    names = [naming.full_block(hashes, request.root_hash, index) for index in range(NUM_FULL)]
    paths = [folder.path.joinpath(*name.key.parts) for name in names]
    for index in (1, 2, 4):
        flip(paths[index], [])
    decode.reserve(reader)
    decode.ready(reader, 2)  # the others are not even announced when the first is met
    assert decode.result(reader).num_verified_tokens == BLOCK_SIZE
    decode.wait(lambda: [path.exists() for path in paths] == [True, False, False, True, False])


def test_pages_sealed_with_another_key_are_not_believed(folder: SharedStorage, tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    ensure_secret(mine)
    ensure_secret(theirs)
    prefill, decode = Core(folder, kv_secret_file=str(theirs)), Core(folder, kv_secret_file=str(mine))
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.reserve(reader)
    assert decode.complete(reader).num_verified_tokens == 0
    assert decode.connector.counters.load_failures["page_digest"] >= 1


# The connector over a folder, as the engine builds it


def options_of(tmp_path: Path, **options: str | int | float | bool) -> dict[str, str | int | float | bool]:
    ensure_secret(tmp_path / "key")
    return {"path": str(tmp_path / "store"), "kv_secret_file": str(tmp_path / "key"), **options}


def test_engine_builds_the_connector_by_its_class_path(tmp_path: Path) -> None:
    config = KVConnectorConfig(
        class_path="kv_transfer.connector:SharedStorageConnector", options=options_of(tmp_path, num_io_threads="3")
    )
    connector = make_connector(config, lambda: None)
    assert isinstance(connector, SharedStorageConnector)
    assert connector.name == "shared_storage"
    connector.register_kv_cache(Core(MemoryStore()).kv, LAYOUT, FINGERPRINT)
    connector.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_byte": 1}, "unknown field `capacity_byte`"),
        ({"capacity_bytes": 0}, "capacity_bytes is 0; it must be greater than 0"),
        ({"num_io_threads": "many"}, "num_io_threads"),
        ({"kv_secret_file": ""}, "kv_secret_file is not set"),
        ({"kv_secret_file": "/nonexistent/key"}, "openssl rand"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, str | int | float | bool], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        SharedStorageConnector(wake=lambda: None, **{**options_of(tmp_path), **options})


def test_shutdown_waits_for_saves_and_removes_what_is_private(folder: SharedStorage) -> None:
    prefill = Core(folder)
    request = writer_of()
    prefill.prefill(request)
    assert len(files(folder.path)) == NUM_PAGES
    prefill.connector.shutdown()
    assert len(files(folder.path)) == NUM_FULL


def test_counters_tell_bytes_and_seconds(store: MemoryStore) -> None:
    prefill, decode = pair(store)
    prefill.prefill(writer_of())
    reader = reader_of()
    decode.reserve(reader)
    decode.complete(reader)
    num_bytes = NUM_PAGES * (HEADER_BYTES + LAYOUT.bytes_per_block)
    saved, loaded = dataclasses.asdict(prefill.connector.counters), dataclasses.asdict(decode.connector.counters)
    assert (saved["num_saved_bytes"], saved["num_saved_blocks"]) == (num_bytes, NUM_PAGES)
    assert (loaded["num_loaded_bytes"], loaded["num_loaded_blocks"]) == (num_bytes, NUM_PAGES)
    assert saved["save_s"] > 0
    assert loaded["load_s"] > 0


def test_a_page_that_could_not_be_removed_at_once_is_removed_later(store: MemoryStore) -> None:
    class BusyStore(MemoryStore):
        num_refusals = 2

        def delete(self, key: PageKey) -> None:
            if self.num_refusals:
                self.num_refusals -= 1
                raise OSError(11, "busy")
            super().delete(key)

    busy = BusyStore()
    prefill = Core(busy)
    prefill.prefill(writer_of())
    assert len(busy.values) == NUM_PAGES
    prefill.release()
    prefill.wait(lambda: len(busy.values) == NUM_FULL)
