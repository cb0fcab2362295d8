"""What the tests of all LMCache backends have in common: the contract of a store, leaks, requests under load."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_transfer.store import BadValue, BlockStore, PageKey
from tests.kv_transfer.harness import Core
from tests.kv_transfer.redis_load import Load
from tests.kv_transfer.test_shared_storage import HEADER, PAGE, key_of

NUM_BYTES = len(HEADER) + len(PAGE)


def read(store: BlockStore, key: PageKey, num_bytes: int = len(PAGE)) -> tuple[bytes, bytes] | None:
    header, page = bytearray(len(HEADER)), bytearray(num_bytes)
    return (bytes(header), bytes(page)) if store.get_into(key, (header, page), lambda: None) else None


def check_contract(store: BlockStore) -> None:
    """Everything that a BlockStore promises; a value of another length may also be no value."""
    for key in (key_of(1), key_of(1, transfer="../../etc/passwd\0/\n@")):
        assert read(store, key) is None
        assert not store.contains(key, NUM_BYTES)
        store.delete(key)
        store.put(key, (HEADER, PAGE))
        assert store.contains(key, NUM_BYTES)
        assert read(store, key) == (HEADER, PAGE)
        for num_bytes in (len(PAGE) - 1, len(PAGE) + 1):
            assert not store.contains(key, len(HEADER) + num_bytes)
            with contextlib.suppress(BadValue):
                assert read(store, key, num_bytes) is None
        assert read(store, key) == (HEADER, PAGE), "a wrong length has spoiled it for the right one"
        store.put(key, (HEADER, PAGE[::-1]))
        store.put(key, (HEADER[::-1], memoryview(b"q" * len(PAGE))))
        assert read(store, key) == (HEADER[::-1], b"q" * len(PAGE)), "the last writer wins"
        check_header_first(store, key)
        store.delete(key)
        store.delete(key)
        assert read(store, key) is None
        assert not store.contains(key, NUM_BYTES)


def check_header_first(store: BlockStore, key: PageKey) -> None:
    header, page = bytearray(len(HEADER)), bytearray(len(PAGE))

    def refuse() -> None:
        assert any(header)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.get_into(key, (header, page), refuse)
    assert not any(page), "the page was filled though its header is wrong"


def check_many_threads(store: BlockStore, num_threads: int = 4, num_keys: int = 12) -> None:
    """All keys by all threads at once: what is read is one of the values whole."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for index in range(num_keys):
                key, value = key_of(100 + index), bytes([index]) * len(PAGE)
                store.put(key, (HEADER, value))
                assert read(store, key) in ((HEADER, value), None)
                if number == 0:
                    store.contains(key, NUM_BYTES)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for index in range(num_keys):
        assert read(store, key_of(100 + index)) == (HEADER, bytes([index]) * len(PAGE))
        store.delete(key_of(100 + index))


@contextlib.contextmanager
def nothing_leaks() -> Iterator[None]:
    """No thread, descriptor or shared memory is left."""
    shared_memory, num_fds = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    num_tasks = len(os.listdir("/proc/self/task"))
    threads = {thread.ident for thread in threading.enumerate()}
    yield
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and len(os.listdir("/proc/self/task")) > num_tasks:
        time.sleep(0.01)
    left = [thread.name for thread in threading.enumerate() if thread.ident not in threads]
    assert left == []
    assert len(os.listdir("/proc/self/task")) <= num_tasks, "a native thread is left"
    assert len(os.listdir("/proc/self/fd")) <= num_fds
    assert {name for name in os.listdir("/dev/shm") if name.startswith(("lmcache", "tandem"))} <= shared_memory


class LMCacheLoad(Load):
    """Hand-overs one after another, through stores of ours."""

    def __init__(self, make_store: Callable[[], BlockStore], *, retry_s: float = 0.5) -> None:
        self.stores = [make_store(), make_store()]  # type: ignore[assignment]
        self.prefill, self.decode = (Core(store, breaker_retry_s=retry_s) for store in self.stores)
        self.hits: list[float] = []
        self.misses: list[float] = []
        self.longest_s = 0.0
        self.failure: BaseException | None = None
        self.open_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)


def pages_in(folder: Path) -> list[Path]:
    """Finished pages, tails included."""
    return sorted(folder.rglob("*.data"))
