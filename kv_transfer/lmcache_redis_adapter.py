"""Redis as LMCache's L2 storage that does not wedge: LMCache's own client (`resp`) hangs for good on a missing key, a
value of another size, a full Redis or a restarted one. Here the bytes go through kv_transfer.redis_store.

    submit_… ─▶ thread ─▶ Redis answers | fails within its time-out ─▶ result kept, event fd raised ─▶ query_…, once

For `lmcache server --l2-adapter` as well as for our own connector:

    {"type": "plugin", "module_path": "kv_transfer.lmcache_redis_adapter", "class_name": "RedisL2Adapter",
     "adapter_params": {"url": "redis://host:6379/0"}}

adapter_params are the options of our redis connector. Our pages have the same names here as under that connector, so
both share them. LMCache's pages of other engines get names of hashes. No eviction and no listing: every key has a time
to live, and the size is Redis's own maxmemory. This module imports LMCache:
ours import it by import_lmcache().
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from engine.errors import EngineError
from kv_transfer.io_threads import IOThreads
from kv_transfer.lmcache_names import page_key
from kv_transfer.redis_connector import RedisOptions, make_store
from kv_transfer.store import BadValue, PageKey

Kind = Literal["store", "lookup", "load"]
_CLOSE_S = 2.0
_MAX_ERRORS = 1024


@dataclass(frozen=True, slots=True)
class _Work:
    """One task. `job` does the key of an index, `result` is what LMCache asks for, `tell` what its listeners hear."""

    kind: Kind
    num_keys: int
    job: Callable[[int], bool]
    result: Callable[[list[bool]], object]
    tell: Callable[[list[bool]], None] = lambda done: None


class RedisL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache ships no types
    """See the module. Every task ends, at the latest when Redis's time-outs have passed."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: object = None) -> None:
        del l1_memory_desc
        super().__init__()
        try:
            options = msgspec.convert({"digest": False, **params}, RedisOptions, strict=False)
        except msgspec.ValidationError as error:
            raise EngineError(f"adapter_params of RedisL2Adapter: {error}") from error
        self._redis = make_store(options)
        self._threads = IOThreads(options.num_io_threads, "kv-lmcache-redis")
        self._notifiers = {kind: create_event_notifier() for kind in ("store", "lookup", "load")}
        self._lock = threading.Lock()  # of all below
        self._next_id = 0
        self._results: dict[Kind, dict[int, Any]] = {"store": {}, "lookup": {}, "load": {}}
        self._errors: dict[int, Exception] = {}
        self._is_healthy = True

    def get_store_event_fd(self) -> int:
        return int(self._notifiers["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._notifiers["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._notifiers["load"].fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        views = [_view(each) for each in objects]

        def store(index: int) -> bool:
            self._redis.put(_page_key(keys[index]), [views[index]])
            return True

        def result(done: list[bool]) -> L2StoreResult:
            return L2StoreResult(all(done), sum(map(len, views)) if all(done) else 0)

        def tell(done: list[bool]) -> None:
            if all(done):
                self._notify_keys_stored(keys, [0] * len(keys))

        return self._submit(_Work("store", len(keys), store, result, tell))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            ended, self._results["store"] = self._results["store"], {}
        return ended

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        sizes = {group: _num_bytes(layout) for group, layout in group_layout_descs.items()}

        def look(index: int) -> bool:
            size = sizes.get(keys[index].object_group_id)
            return size is not None and self._redis.contains(_page_key(keys[index]), size)

        return self._submit(_Work("lookup", len(keys), look, _bitmap))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._pop("lookup", task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked: Redis may drop what it was just found to have, and then the load is a miss."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        views = [_view(each) for each in objects]

        def load(index: int) -> bool:
            return self._redis.get_into(_page_key(keys[index]), [views[index]], lambda: None)

        def tell(done: list[bool]) -> None:
            self._notify_keys_accessed([key for key, hit in zip(keys, done, strict=True) if hit])

        return self._submit(_Work("load", len(keys), load, _bitmap, tell))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._pop("load", task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        gone = []
        for key in keys:
            try:
                self._redis.delete(_page_key(key))
                gone.append(key)
            except Exception:
                self._is_healthy = False
        self._notify_keys_deleted(gone, [0] * len(gone))

    def take_error(self, task_id: int) -> Exception | None:
        """Why a task of ours did less than it should: LMCache's interface knows only that it did. Once."""
        with self._lock:
            return self._errors.pop(task_id, None)

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": self._is_healthy, "type": type(self).__name__, "address": str(self._redis.dialer.address)}

    def close(self) -> None:
        if not self._threads.shutdown(_CLOSE_S):
            return  # daemons; they would write to event fds that are somebody else's by then
        self._redis.close()
        for notifier in self._notifiers.values():
            notifier.close()

    def _submit(self, work: _Work) -> int:
        with self._lock:
            task_id = self._next_id
            self._next_id += 1
        self._threads.submit(lambda: self._run(task_id, work))
        return task_id

    def _run(self, task_id: int, work: _Work) -> None:
        done = [False] * work.num_keys
        error: Exception | None = None
        for index in range(work.num_keys):
            try:
                done[index] = work.job(index)
            except BadValue as failure:
                error = error or failure
            except Exception as failure:
                error = failure
                break  # Redis is not to be had: the rest would wait as long each
        self._is_healthy = error is None or isinstance(error, BadValue)
        with self._lock:
            if error is not None:
                while len(self._errors) >= _MAX_ERRORS:  # nobody takes them
                    del self._errors[next(iter(self._errors))]
                self._errors[task_id] = error
            self._results[work.kind][task_id] = work.result(done)
        self._notifiers[work.kind].notify()
        with contextlib.suppress(Exception):  # LMCache's listeners are none of the page's business
            work.tell(done)

    def _pop(self, kind: Kind, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._results[kind].pop(task_id, None)


def _page_key(key: ObjectKey) -> PageKey:
    return page_key(key.model_name, key.kv_rank, key.object_group_id, key.chunk_hash, key.cache_salt)


def _view(memory_object: Any) -> memoryview:
    return memoryview(memory_object.byte_array).cast("B")


def _num_bytes(layout: MemoryLayoutDesc) -> int:
    return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True))


def _bitmap(done: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(done))
    for index, is_set in enumerate(done):
        if is_set:
            bitmap.set(index)
    return bitmap
