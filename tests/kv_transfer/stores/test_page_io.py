"""A dead store costs one try now and then, and one that accepts no writes is still read; what is cancelled while it is
copied is not stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch

from kv_transfer.page.format import Buffer, PageKey, PageNaming
from kv_transfer.page.memory import PageMemory, make_page_memory
from kv_transfer.stores.base import StoreError, UnreadableValue
from kv_transfer.stores.page_io import STORE_DOWN, CircuitBreaker, PageIO
from kv_transfer.transfer.connector import SKIPPED
from kv_transfer.transfer.loader import DAMAGED, Load, LoadOp
from kv_transfer.transfer.producer import ProducedTransfer, SaveOp
from tests.kv_transfer.harness import FINGERPRINT, LAYOUT, make_request
from tests.kv_transfer.memory_store import MemoryStore
from tests.process_logs import ProcessLogs


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
        self.pages: PageMemory = make_page_memory([layer])
        self._layer = layer
        self._transfer = transfer
        self._before = before_the_copy_ends

    def page_out(self, block_id: int) -> memoryview:
        page = self.pages.page_out(block_id)
        if self._before:
            self._transfer.cancelled = True
        self._layer[block_id] = 7
        return page

    def page_in(self, block_id: int) -> memoryview:
        return self.pages.page_in(block_id)

    def commit(self, block_id: int, page: memoryview) -> None:
        self.pages.commit(block_id, page)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_save_that_is_cancelled_while_its_block_is_copied_stores_nothing(is_cancelled: bool) -> None:
    transfer = ProducedTransfer("request", "transfer", num_pages=1, num_full_blocks=1, num_tokens=4)
    layer = torch.zeros((2, *LAYOUT.page_shape))
    memory = _OverwrittenPages(layer, transfer, before_the_copy_ends=is_cancelled)
    store, breaker = MemoryStore(), CircuitBreaker(max_failures=2, retry_s=2.0)
    breaker.record(ok=False)
    io = PageIO(store, memory, None, bytes(16), breaker, CircuitBreaker())
    name = PageNaming.of(FINGERPRINT, LAYOUT).private_page()
    result = io.execute(SaveOp(0, 1, name, transfer))
    assert result.failure == (SKIPPED if is_cancelled else None)
    breaker.record(ok=False)
    assert breaker.is_open == is_cancelled, "what was not stored is no success"
    page = LAYOUT.bytes_per_block
    assert [value[-page:] for value in store.values.values()] == ([] if is_cancelled else [bytes(page)])


class _FullStore(MemoryStore):
    """Accepts writes until `is_full`."""

    is_full = False
    num_rejected = 0

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        if self.is_full:
            self.num_rejected += 1
            raise StoreError("oom")
        super().put(key, buffers)


class _StoreUser:
    """Saves and loads full blocks of one prompt."""

    def __init__(self, store: MemoryStore, *, retry_s: float, key: bytes | None = None) -> None:
        self.breaker = CircuitBreaker(max_failures=3, retry_s=retry_s)
        memory = make_page_memory([torch.zeros((2, *LAYOUT.page_shape))])
        self.io = PageIO(store, memory, key, bytes(16), self.breaker, CircuitBreaker(retry_s=retry_s))
        naming, prompt = PageNaming.of(FINGERPRINT, LAYOUT), make_request(range(LAYOUT.block_size * 20))
        hashes = naming.block_hashes(prompt)
        self.pages = [naming.full_block(hashes, prompt.root_hash, number) for number in range(20)]
        self.writer = self._writer()

    def _writer(self) -> ProducedTransfer:
        return ProducedTransfer("writer", "transfer", num_pages=1, num_full_blocks=1, num_tokens=LAYOUT.block_size)

    def save(self, number: int) -> str | None:
        """Returns why it failed."""
        self.writer = self._writer()
        return self.io.execute(SaveOp(0, 1, self.pages[number], self.writer)).failure

    def load(self, number: int) -> str | None:
        owner = Load(
            "reader", "transfer", num_tokens=LAYOUT.block_size, block_size=LAYOUT.block_size, num_full_blocks=1,
            num_local_blocks=0, pages=self.pages, block_ids=(1,), is_lookup=True, num_started=0,
        )  # fmt: skip
        return self.io.execute(LoadOp(number, 1, owner)).failure


class _AnyPage(MemoryStore):
    """Returns the first page that it has under every name, and checks nothing."""

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        return super().get_into(next(iter(self.values)), buffers, lambda: None)


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["without digests", "with digests"])
def test_another_page_is_found_where_a_store_does_not_call_the_check(key: bytes | None) -> None:
    user = _StoreUser(_AnyPage(), retry_s=60.0, key=key)
    assert user.save(0) is None
    assert user.load(0) is None
    assert user.load(1) == f"{DAMAGED}block_hash"


class _Faulty(MemoryStore):
    """Has faults of its own, one for all odd pages and one for the others."""

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        raise KeyError("odd") if key.block_hash[0] % 2 else ValueError("even")


def test_a_fault_of_a_store_is_logged_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture, process_logs: ProcessLogs
) -> None:
    user = _StoreUser(_Faulty(), retry_s=0.0)
    with process_logs.expected("KeyError: 'odd'|ValueError: even"):
        assert {user.save(number) for number in range(20)} == {"store_keyerror", "store_valueerror"}
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"the memory connector has a fault, counted as {reason}; KV is computed"
        for reason in ("store_keyerror", "store_valueerror")
    ]
    assert all(record.exc_info is not None for record in caplog.records)


@pytest.mark.parametrize("saves", [True, False])
def test_a_damaged_page_goes_where_this_instance_writes(saves: bool) -> None:
    store = MemoryStore()
    user = _StoreUser(store, retry_s=60.0)
    assert user.save(0) is None
    [key] = store.values
    store.values[key] = bytes(len(store.values[key]))
    user.io = dataclasses.replace(user.io, saves=saves)
    assert (user.load(0) or "").startswith(DAMAGED)
    assert (key in store.values) is not saves


def test_a_full_store_is_read_and_not_written() -> None:
    store = _FullStore()
    user = _StoreUser(store, retry_s=60.0)
    assert user.save(0) is None
    store.is_full = True
    failures = []
    for number in range(1, 20):
        failures.append(user.save(number))
        # Neither shows that the store accepts writes.
        assert user.save(0) in (None, STORE_DOWN)
        assert user.load(0) is None
    assert failures == 3 * ["store_oom"] + 16 * [STORE_DOWN]
    assert store.num_rejected == 3


@pytest.mark.parametrize("number", [0, 1], ids=["a page that is there", "a new page"])
def test_a_store_that_answers_again_is_written_again(number: int) -> None:
    store = _FullStore()
    user = _StoreUser(store, retry_s=0.0)
    assert user.save(0) is None
    store.is_full = True
    assert [user.save(number) for number in range(1, 4)] == 3 * ["store_oom"]
    assert user.breaker.is_open
    store.is_full = False
    assert user.save(number) is None
    assert not user.breaker.is_open


class _LostMedium(MemoryStore):
    """Finds its pages and cannot read them, as a network file system whose server is lost."""

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        raise UnreadableValue("unreadable")


def test_pages_that_cannot_be_read_one_after_the_other_are_kept_and_not_tried() -> None:
    store = _LostMedium()
    user = _StoreUser(store, retry_s=60.0)
    assert [user.save(number) for number in range(6)] == 6 * [None]
    assert [user.load(number) for number in range(6)] == 3 * ["page_unreadable"] + 3 * [STORE_DOWN]
    assert len(store.values) == 4, "two could have been bad sectors"


def test_an_inspection_removes_no_page_that_cannot_be_read() -> None:
    store = _LostMedium()
    user = _StoreUser(store, retry_s=60.0)
    assert user.save(0) is None
    assert not user.io.inspect(user.pages[0])
    assert store.values


def test_a_bad_sector_that_opened_the_breaker_is_removed_by_the_next_try() -> None:
    store = _LostMedium()
    user = _StoreUser(store, retry_s=0.0)
    assert [user.save(number) for number in range(3)] == 3 * [None]
    assert [user.load(number) for number in (1, 2, 0)] == 3 * ["page_unreadable"]
    assert len(store.values) == 1
    assert user.load(0) == "page_unreadable"
    assert not store.values


class _StoreOfCancelledSaves(_FullStore):
    """While it looks for a page, the transfer is cancelled: the open breaker has refused another page of it."""

    user: _StoreUser | None = None

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        if self.user is not None and self.user.breaker.is_open:
            self.user.writer.cancelled = True
        return super().contains(key, num_bytes)


def test_a_trial_is_not_cancelled_by_the_pages_that_the_breaker_refuses_meanwhile() -> None:
    store = _StoreOfCancelledSaves()
    user = store.user = _StoreUser(store, retry_s=0.0)
    store.is_full = True
    assert [user.save(number) for number in range(3)] == 3 * ["store_oom"]
    store.is_full = False
    assert user.save(3) is None
    assert not user.breaker.is_open
