"""A dead store costs one try now and then; what is cancelled while it is copied is not stored."""

from __future__ import annotations

import pytest
import torch

from kv_transfer.page.memory import PageMemory, make_page_memory
from kv_transfer.page.naming import PageNaming
from kv_transfer.stores.base import MemoryStore
from kv_transfer.stores.page_io import CircuitBreaker, PageIO
from kv_transfer.transfer.connector import SKIPPED
from kv_transfer.transfer.producer import ProducedTransfer, SaveOp
from tests.kv_transfer.harness import FINGERPRINT, LAYOUT


def test_breaker_opens_tries_again_and_closes() -> None:
    now = 0.0
    breaker = CircuitBreaker(max_failures=3, retry_s=2.0, clock=lambda: now)
    for _ in range(2):
        breaker.record(ok=False)
    assert breaker.allows()
    breaker.record(ok=False)
    assert breaker.is_open
    assert not breaker.allows()
    # STEP one try per retry_s
    now = 2.0
    assert breaker.allows()
    assert not breaker.allows()
    breaker.record(ok=False)
    assert not breaker.allows()
    # STEP one success closes it
    now = 4.0
    assert breaker.allows()
    breaker.record(ok=True)
    assert breaker.allows()
    assert not breaker.is_open


def test_a_try_that_showed_nothing_leaves_the_next_one() -> None:
    breaker = CircuitBreaker(max_failures=1, clock=lambda: 100.0)
    breaker.record(ok=False)
    assert not breaker.allows()
    breaker.not_tried()
    assert breaker.is_open
    assert breaker.allows()
    assert not breaker.allows()


def test_failures_must_follow_each_other() -> None:
    breaker = CircuitBreaker(max_failures=2)
    for good in (False, True, False, True):
        breaker.record(ok=good)
    assert not breaker.is_open


class _OverwrittenPages:
    """A block is written to right after it was copied; before that, or later, its transfer is cancelled."""

    def __init__(self, layer: torch.Tensor, transfer: ProducedTransfer, *, before_the_copy_ends: bool) -> None:
        self._pages: PageMemory = make_page_memory([layer])
        self._layer = layer
        self._transfer = transfer
        self._before = before_the_copy_ends

    def page_out(self, block_id: int) -> memoryview:
        page = self._pages.page_out(block_id)
        if self._before:
            self._transfer.cancelled = True
        self._layer[block_id] = 7
        return page

    def page_in(self, block_id: int) -> memoryview:
        return self._pages.page_in(block_id)

    def commit(self, block_id: int, page: memoryview) -> None:
        self._pages.commit(block_id, page)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_save_that_is_cancelled_while_its_block_is_copied_stores_nothing(is_cancelled: bool) -> None:
    transfer = ProducedTransfer("request", "transfer", num_pages=1, num_full_blocks=1, num_tokens=4)
    layer = torch.zeros((2, *LAYOUT.page_shape))
    memory = _OverwrittenPages(layer, transfer, before_the_copy_ends=is_cancelled)
    store, breaker = MemoryStore(), CircuitBreaker(max_failures=2)
    breaker.record(ok=False)
    io = PageIO(store, memory, None, bytes(16), breaker)
    name = PageNaming.of(FINGERPRINT, LAYOUT).private_page()
    result = io.execute(SaveOp(0, 1, name, transfer))
    assert result.failure == (SKIPPED if is_cancelled else None)
    breaker.record(ok=False)
    assert breaker.is_open == is_cancelled, "what was not stored is no success"
    page = LAYOUT.bytes_per_block
    assert [value[-page:] for value in store.values.values()] == ([] if is_cancelled else [bytes(page)])
