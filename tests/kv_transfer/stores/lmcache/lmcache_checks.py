"""Checks of both LMCache backends: threads, leaks, requests under load. How tests import LMCache."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kv_transfer.stores.base import BlockStore
from tests.kv_transfer.harness import Core
from tests.kv_transfer.stores.contract import HEADER, NUM_BYTES, PAGE, key_of, read
from tests.kv_transfer.stores.redis.redis_load import Load


def import_lmcache(module: str) -> Any:
    """A module of LMCache, or one that imports it: without telemetry, with little logging, and without a warning about
    its logging handler."""
    os.environ.update(LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1", LMCACHE_LOG_LEVEL="WARNING")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


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
    """Hand-overs one after another, through given stores."""

    def __init__(self, make_store: Callable[[], BlockStore], *, retry_s: float = 0.5) -> None:
        self.stores = [make_store(), make_store()]
        self.prefill, self.decode = (Core(store, breaker_retry_s=retry_s) for store in self.stores)
        self._prepare()


def pages_in(folder: Path) -> list[Path]:
    """Finished pages, tails included."""
    return sorted(folder.rglob("*.data"))
