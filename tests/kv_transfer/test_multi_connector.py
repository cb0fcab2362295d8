"""Two connectors as one: the first hands over, the second keeps prefixes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.errors import EngineError
from engine.kv_connector import KVLoadResult
from kv_transfer.multi_connector import MultiConnector
from tests.kv_transfer.harness import BLOCK_SIZE, FINGERPRINT, LAYOUT, BrokenStore, Core, GatedStore, make_request
from tests.kv_transfer.memory_store import STORES, MemoryStore

PROMPT = list(range(100, 100 + 5 * BLOCK_SIZE + 3))  # five full blocks and a tail of three tokens
NUM_FULL, NUM_PAGES = 5, 6
CLASS_PATH = "tests.kv_transfer.memory_store:NamedStoreConnector"


class ListCore(Core):
    """A core whose connector is a list of two; options of the first and of the second."""

    def __init__(self, first: dict[str, object] | None = None, second: dict[str, object] | None = None) -> None:
        super().__init__(MemoryStore())
        members = [("first", first or {}), ("second", second or {})]
        configs = [{"class_path": CLASS_PATH, "options": {"store": name, **options}} for name, options in members]
        self.connector = MultiConnector(wake=self.woken.set, connectors=configs)  # type: ignore[assignment]
        self.connector.register_kv_cache(self.kv, LAYOUT, FINGERPRINT)


@pytest.fixture(autouse=True)
def stores() -> Iterator[tuple[MemoryStore, MemoryStore]]:
    first, second = MemoryStore(), MemoryStore()
    STORES.update(first=first, second=second)
    yield first, second
    STORES.clear()


def gate(name: str) -> GatedStore:
    """From now on this store waits."""
    STORES[name] = gated = GatedStore()
    return gated


def seek(core: Core, request_id: str = "seeker") -> KVLoadResult:
    """A prompt that is to be computed here."""
    request = make_request(PROMPT, request_id=request_id)
    assert core.connector.get_num_new_matched_tokens(request, 0) == NUM_FULL * BLOCK_SIZE
    core.connector.update_state_after_alloc(request, core.allocate(request), 0)
    result = core.result(request)
    assert core.has(request, result.num_verified_tokens)
    return result


def test_both_have_the_full_blocks_and_the_first_has_the_tail(stores: tuple[MemoryStore, MemoryStore]) -> None:
    first, second = stores
    prefill, decode = ListCore(), ListCore()
    prefill.prefill(make_request(PROMPT, hold=True))
    prefill.wait(lambda: len(second.values) == NUM_FULL)
    assert len(first.values) == NUM_PAGES
    assert not any(key.scope for key in second.values)
    reader = make_request(PROMPT, remote=True)
    decode.reserve(reader)
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.num_recomputed_blocks) == (len(PROMPT), 0)
    assert decode.has(reader, len(PROMPT))
    prefill.release()
    assert (prefill.connector.num_transfers, prefill.ended) == (0, "released")
    prefill.wait(lambda: len(first.values) == NUM_FULL)


def test_a_prefix_is_found_where_only_the_second_has_it(stores: tuple[MemoryStore, MemoryStore]) -> None:
    first, second = stores
    core = ListCore()
    core.prefill(make_request(PROMPT, hold=True))
    core.wait(lambda: len(second.values) == NUM_FULL)
    first.values.clear()
    result = seek(ListCore())
    assert (result.num_external_tokens, result.num_recomputed_blocks) == (NUM_FULL * BLOCK_SIZE, 0)


def test_what_the_first_lost_comes_from_the_second(stores: tuple[MemoryStore, MemoryStore]) -> None:
    first, second = stores
    prefill, decode = ListCore(), ListCore()
    prefill.prefill(make_request(PROMPT, hold=True))
    prefill.wait(lambda: len(second.values) == NUM_FULL)
    for key in [key for key in first.values if not key.scope][2:]:
        first.delete(key)
    reader = make_request(PROMPT, remote=True)
    decode.reserve(reader)
    result = decode.complete(reader)
    assert result.num_verified_tokens == result.num_external_tokens == NUM_FULL * BLOCK_SIZE
    assert result.num_recomputed_blocks == 1, "the tail is the transfer's own"
    assert result.reason == "missing"
    assert decode.has(reader, NUM_FULL * BLOCK_SIZE)


def test_a_prefix_that_no_connector_has_gives_one_result(stores: tuple[MemoryStore, MemoryStore]) -> None:
    core = ListCore()
    assert seek(core).num_verified_tokens == 0
    core.settle()
    assert len(core.loaded) == 1


def test_reads_given_up_end_the_search(stores: tuple[MemoryStore, MemoryStore]) -> None:
    prefill = ListCore()
    prefill.prefill(make_request(PROMPT, hold=True))
    prefill.wait(lambda: len(stores[1].values) == NUM_FULL)
    gated = gate("first")
    core = ListCore({"load_timeout_s": 0.05})
    result = seek(core)
    assert result.num_verified_tokens == 0
    assert result.retained_id is not None, "the first may still write to these blocks"
    gated.gate.set()
    core.wait(lambda: core.freed == [result.retained_id])


def test_blocks_stay_until_the_slower_one_has_saved_them() -> None:
    gated = gate("second")
    core, request = ListCore(), make_request(PROMPT, hold=True)
    core.prefill(request)
    core.release()
    assert not core.freed
    gated.gate.set()
    core.wait(lambda: core.freed == [request.request_id])
    assert len(gated.values) == NUM_FULL, "a reader that was quick does not end what is saved for others"


def test_a_slow_store_cannot_keep_all_blocks() -> None:
    gated = gate("second")
    core = ListCore()
    connector = core.connector._connectors[1]  # type: ignore[attr-defined]
    connector._producer._max_waiting = 3
    core.prefill(make_request(PROMPT, hold=True))
    gated.gate.set()
    core.wait(lambda: bool(core.freed))
    assert len(gated.values) == 3


def test_a_store_that_keeps_up_gets_all_of_a_prompt_however_many_blocks_are_ready_at_once() -> None:
    """As of a long conversation, whose earlier turns are in the prefix cache."""
    core, request = ListCore(), make_request(PROMPT, hold=True)
    producer = core.connector._connectors[1]._producer  # type: ignore[attr-defined]
    producer._max_waiting = NUM_FULL - 1
    core.allocate(request)
    core.fill(request)
    core.progress(request, NUM_FULL * BLOCK_SIZE)
    core.wait(lambda: not producer._num_waiting)
    assert core.finish(request, "hand_over")
    core.release()
    core.wait(lambda: core.freed == [request.request_id])
    assert len(STORES["second"].values) == NUM_FULL  # type: ignore[attr-defined]


def test_an_abort_saves_no_more_than_has_begun() -> None:
    gated = gate("second")
    core, request = ListCore(second={"num_io_threads": 1}), make_request(PROMPT, hold=True)
    core.allocate(request)
    core.fill(request)
    core.progress(request, len(PROMPT))
    core.wait(lambda: gated.num_entered == 1)
    assert core.finish(request, "abort")
    gated.gate.set()
    core.wait(lambda: core.freed == [request.request_id])
    assert len(gated.values) == 1


def test_one_that_only_loads_saves_nothing(stores: tuple[MemoryStore, MemoryStore]) -> None:
    core = ListCore(second={"save": False})
    core.prefill(make_request(PROMPT, hold=True))
    core.settle()
    assert not stores[1].values


def test_a_broken_prefix_store_harms_nothing() -> None:
    STORES["second"] = BrokenStore()
    prefill, decode = ListCore(), ListCore()
    prefill.prefill(make_request(PROMPT, hold=True))
    reader = make_request(PROMPT, remote=True)
    decode.reserve(reader)
    assert decode.complete(reader).num_verified_tokens == len(PROMPT)


def test_what_hands_over_must_save(stores: tuple[MemoryStore, MemoryStore]) -> None:
    with pytest.raises(EngineError, match="cannot hand KV over with save off"):
        ListCore(first={"save": False})


@pytest.mark.parametrize("first", [CLASS_PATH, "kv_transfer.nixl.connector:NixlConnector"])
def test_where_a_further_one_cannot_be_made_the_first_leaves_no_thread(first: str) -> None:
    before = set(threading.enumerate())
    options = {"store": "first"} if first == CLASS_PATH else {"digest": False}
    configs: list[dict[str, Any]] = [
        {"class_path": first, "options": options},
        {"class_path": "no.such:Thing", "options": {}},
    ]
    with pytest.raises(EngineError, match=r"cannot import 'no\.such:Thing'"):
        MultiConnector(wake=lambda: None, connectors=configs)
    assert set(threading.enumerate()) <= before


def test_only_a_store_can_be_a_further_one() -> None:
    configs = [{"class_path": "engine.kv_connector:NullKVConnector", "options": {}}] * 2
    with pytest.raises(EngineError, match=r"cannot follow the first connector \(.*prefix_only"):
        MultiConnector(wake=lambda: None, connectors=configs)
