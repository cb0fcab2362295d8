"""A prompt that nobody hands over: what the store has of it is loaded, the rest is computed."""

from __future__ import annotations

import pytest

from engine.kv_connector import KVLoadResult
from engine.request import Request
from kv_transfer.store import MemoryStore, PageKey
from tests.kv_transfer.harness import BLOCK_SIZE, BrokenStore, Core, GatedStore, make_request

PROMPT = list(range(100, 100 + 5 * BLOCK_SIZE + 3))  # five full blocks and a tail of three tokens
NUM_FULL = 5


@pytest.fixture
def store() -> MemoryStore:
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


def test_full_blocks_are_found_and_the_tail_is_not_sought(store: MemoryStore) -> None:
    core, request = Core(store), make_request(PROMPT)
    result = seek(core, request)
    assert (result.num_verified_tokens, result.num_external_tokens) == (NUM_FULL * BLOCK_SIZE, NUM_FULL * BLOCK_SIZE)
    assert (result.num_recomputed_blocks, result.reason) == (0, None)
    assert core.has(request, NUM_FULL * BLOCK_SIZE)
    assert core.connector.counters.num_loaded_blocks == NUM_FULL
    assert not core.finish(request, "stop")


def test_one_token_is_left_to_compute(store: MemoryStore) -> None:
    core, request = Core(store), make_request(PROMPT[: 3 * BLOCK_SIZE])
    assert seek(core, request).num_verified_tokens == 2 * BLOCK_SIZE
    assert Core(store).connector.get_num_new_matched_tokens(make_request(PROMPT[:BLOCK_SIZE]), 0) == 0


def test_local_blocks_are_not_read(store: MemoryStore) -> None:
    core, request = Core(store), make_request(PROMPT)
    result = seek(core, request, num_local_blocks=3)
    assert (result.num_verified_tokens, result.num_external_tokens) == (NUM_FULL * BLOCK_SIZE, 2 * BLOCK_SIZE)
    assert core.connector.counters.num_loaded_blocks == 2


def test_a_new_prompt_costs_one_question() -> None:
    store = GatedStore()
    store.gate.set()
    core = Core(store)
    result = seek(core, make_request(PROMPT))
    assert (result.num_verified_tokens, result.num_recomputed_blocks, store.num_entered) == (0, 0, 1)
    assert core.connector.counters.num_recomputed_blocks == 0


def test_what_precedes_a_missing_block_is_used(store: MemoryStore) -> None:
    store.delete(full_block_keys(store)[3])
    core, request = Core(store), make_request(PROMPT)
    assert seek(core, request).num_verified_tokens == 3 * BLOCK_SIZE
    assert core.has(request, 3 * BLOCK_SIZE)


def test_a_damaged_block_is_counted_removed_and_computed(store: MemoryStore) -> None:
    key = full_block_keys(store)[2]
    store.values[key] = store.values[key][:-1]
    core = Core(store)
    assert seek(core, make_request(PROMPT)).num_verified_tokens == 2 * BLOCK_SIZE
    assert core.connector.counters.load_failures["page_size"] == 1
    assert key not in store.values


def test_a_dead_store_is_asked_until_the_breaker_opens() -> None:
    store = BrokenStore()
    core = Core(store, breaker_failures=2)
    for number in range(5):
        assert seek(core, make_request(PROMPT, request_id=str(number))).num_verified_tokens == 0
    assert store.num_asked == 2


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


def test_the_search_can_be_switched_off(store: MemoryStore) -> None:
    core = Core(store, lookup=False)
    assert core.connector.get_num_new_matched_tokens(make_request(PROMPT), 0) == 0
