"""Tandem's module in an `lmcache server`: pages for its storage layer, whose own requests carry KV of tokens only.

    lmcache server --server-module '{"module_path": "kv_transfer.stores.lmcache.server_module"}' …

    put       reserve in L1 ─▶ copy ─▶ finish: visible, L2 follows later        another value there: deleted first
    get       prefetch (L2 to L1) ─▶ copy out ─▶ read lock released             too late: released when it ends
                └ not there ─▶ L2 to memory of this request ─▶ copy out         no memory: tried again until it is late
    contains  in L1, or in an L2 adapter                                        nothing is loaded; too late: as above
    delete    L1, once it is not locked ─▶ every L2 adapter                     so no delayed write comes after it

Runs in the server's threads for such calls (`--max-cpu-workers`). Every wait has the client's time-out. Names that
cannot be a page's are rejected before LMCache sees them. LMCache has one L1 here; several (`--l1-manager`) are not
supported. How to run it: docs/connectors/lmcache.md.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.multiprocess.ext_server_module import server_module_handler

from kv_transfer.stores.lmcache.server import CONTAINS, DELETE, GET, PUT, Head, Status, parse_request

if TYPE_CHECKING:
    from lmcache.v1.multiprocess.ext_server_module import ExtServerModuleBuildContext

_PAUSE_S = 0.002
_RETRY_S = 0.05
"""LMCache logs each reservation that fails."""
_MEMORY_WAIT_S = 1.2
"""LMCache evicts once a second; a reader that waits holds one of its threads."""
_UNREADABLE_S = 0.2
"""A page is damaged if it cannot be read for so long: a failure may pass."""
_MAX_LATE = 32
_MAX_WAIT_S = 30.0
_ANSWER_SHARE = 0.8
"""Of the client's time-out: the rest is for the way of the answer."""
Answer = bytes | bytearray
Act = Callable[["PageModule", Head, memoryview], Answer]
Handler = Callable[["PageModule", bytes], Answer]


def _handler(method: str) -> Callable[[Act], Handler]:
    """LMCache's decorator, for a method that gets valid requests only."""

    def decorate(act: Act) -> Handler:
        def handle(module: PageModule, payload: bytes) -> Answer:
            request = parse_request(payload)
            return _status(Status.REFUSED) if request is None else act(module, *request)

        handler: Handler = server_module_handler(method)(handle)
        return handler

    return decorate


def build_server_modules(context: ExtServerModuleBuildContext) -> list[PageModule]:
    """What LMCache calls."""
    return [PageModule(context.server_context)]


class PageModule:
    """Implements LMCache's EngineModule; handlers are called by several threads."""

    def __init__(self, server_context: Any) -> None:
        self.context = server_context
        self._manager = server_context.storage_manager
        self._lock = threading.Lock()
        self._late: list[Callable[[], bool]] = []
        """Of prefetches, lookups and loads that ended after the answer, or will: each may hold a lock. Returns whether
        it has ended, and then has released it."""

    def report_status(self) -> dict[str, Any]:
        return {"tandem_kv": {"num_late": len(self._late)}}

    def close(self) -> None:
        return None

    @_handler(PUT)
    def put(self, head: Head, page: memoryview) -> Answer:
        if len(page) != head.num_bytes or not head.num_bytes:
            return _status(Status.REFUSED)
        deadline, key = _deadline(head), _key(head)
        while key not in (reserved := self._manager.reserve_write([key], _layout(head.num_bytes))):
            same = self._holds(key, page, deadline)
            if same:
                return _status(Status.OK)  # another instance has saved the same block
            if same is not None:
                self._delete_everywhere(key, deadline)
            elif self._manager.delete_l1_keys([key]) == (0, 0):
                return _status(Status.FULL)
            if time.monotonic() > deadline:
                return _status(Status.BUSY)
            time.sleep(_PAUSE_S)
        memoryview(reserved[key].byte_array).cast("B")[:] = page
        self._manager.finish_write([key])
        return _status(Status.OK)

    @_handler(GET)
    def get(self, head: Head, page: memoryview) -> Answer:
        del page
        deadline, key = _deadline(head), _key(head)
        began_s = time.monotonic()
        while True:
            found = self._fetch(key, head.num_bytes, deadline, skip_l2=False)
            if found is False:  # or another reader's fetch has ended first: then it is in L1
                found = self._fetch(key, head.num_bytes, deadline, skip_l2=True)
            if found:
                return self._read(key, head.num_bytes, with_page=True)
            if found is None:
                return _status(Status.LATE)
            answer = self._read_from_l2(key, head.num_bytes, deadline)
            waited_s = time.monotonic() - began_s
            if answer is None and waited_s > min(_MEMORY_WAIT_S, deadline - began_s):
                return _status(Status.LATE)
            if answer is not None and (answer[0] != Status.BAD_VALUE or waited_s > _UNREADABLE_S):
                return answer
            time.sleep(_RETRY_S)

    @_handler(CONTAINS)
    def contains(self, head: Head, page: memoryview) -> Answer:
        del page
        deadline, key = _deadline(head), _key(head)
        if self._fetch(key, head.num_bytes, deadline, skip_l2=True):
            return self._read(key, head.num_bytes, with_page=False)
        is_in_l2 = self._is_in_l2(key, head.num_bytes, deadline)
        return _status(Status.LATE if is_in_l2 is None else Status.OK if is_in_l2 else Status.MISSING)

    @_handler(DELETE)
    def delete(self, head: Head, page: memoryview) -> Answer:
        del page
        done = self._delete_everywhere(_key(head), _deadline(head))
        return _status(Status.OK if done else Status.BUSY)

    def _delete_everywhere(self, key: ObjectKey, deadline: float) -> bool:
        while self._manager.delete_l1_keys([key])[1]:  # held: by a reader, or by the write to L2
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        for _, adapter in self._manager.l2_adapters():
            adapter.delete([key])
        return True

    def _holds(self, key: ObjectKey, page: memoryview, deadline: float) -> bool | None:
        """Whether L1 has exactly this page; None: it has no page that can be read now."""
        if not self._fetch(key, len(page), deadline, skip_l2=True):
            return None
        with self._manager.read_prefetched_results([key]) as objects:
            if objects is None:
                return None
            is_same = memoryview(objects[0].byte_array).cast("B") == page
        self._manager.finish_read_prefetched([key])
        return is_same

    def _fetch(self, key: ObjectKey, num_bytes: int, deadline: float, *, skip_l2: bool) -> bool | None:
        """Loads it to L1, with a read lock; None: not known yet. _read or _release_late release the lock."""
        self._release_late()
        if len(self._late) >= _MAX_LATE:  # an L2 that hangs gets no further requests
            return None
        layout = _layout(num_bytes)
        spec = PrefetchTaskSpec([GroupedObjectKeys([key], 0, layout)], fetching_policy="full")
        handle = self._manager.submit_prefetch_task(spec, skip_l2=skip_l2)
        if not self._manager.wait_prefetch_status(handle, max(0.0, deadline - time.monotonic())):
            self._add_late(partial(self._release_prefetch, handle, key))
            return None
        return _is_hit(self._manager.query_prefetch_status(handle))

    def _read(self, key: ObjectKey, num_bytes: int, *, with_page: bool) -> Answer:
        with self._manager.read_prefetched_results([key]) as objects:
            if objects is None:
                return _status(Status.MISSING)  # the lock is released
            view = memoryview(objects[0].byte_array).cast("B")
            answer = bytearray(_status(Status.OK if len(view) == num_bytes else Status.BAD_VALUE))
            if with_page and len(view) == num_bytes:
                answer += view
            del view
        self._manager.finish_read_prefetched([key])
        return answer

    def _is_in_l2(self, key: ObjectKey, num_bytes: int, deadline: float) -> bool | None:
        """None: not known in time."""
        for _, adapter in self._manager.l2_adapters():
            found = self._lock_in_l2(adapter, key, num_bytes, deadline)
            if found:
                adapter.submit_unlock([key])
            if found is not False:
                return found
        return False

    def _lock_in_l2(self, adapter: Any, key: ObjectKey, num_bytes: int, deadline: float) -> bool | None:
        """Whether the adapter has it, and then has locked it; None: not known in time."""
        if len(self._late) >= _MAX_LATE:
            return None
        task_id = adapter.submit_lookup_and_lock_task([key], {0: _layout(num_bytes)})
        found = _wait(partial(adapter.query_lookup_and_lock_result, task_id), deadline)
        if found is None:
            self._add_late(partial(self._release_lookup, adapter, task_id, key))
            return None
        return bool(found.test(0))

    def _read_from_l2(self, key: ObjectKey, num_bytes: int, deadline: float) -> Answer | None:
        """What the adapters themselves say of a page that no fetch brings to L1: a fetch also fails where L1 has no
        memory, or where another one was first. BAD_VALUE: no adapter that has it can read it, as where a file is cut
        short, which LMCache never removes. None: not known, for L1 has no memory now."""
        answer: Answer = _status(Status.MISSING)
        for _, adapter in self._manager.l2_adapters():
            found = self._lock_in_l2(adapter, key, num_bytes, deadline)
            if found is None:
                return _status(Status.LATE)
            if not found:
                continue
            loaded = self._load(adapter, key, num_bytes, deadline)
            if loaded is None or loaded[0] != Status.BAD_VALUE:
                return loaded
            answer = loaded
        return answer

    def _load(self, adapter: Any, key: ObjectKey, num_bytes: int, deadline: float) -> Answer | None:
        """Read a page that is locked in this L2, and unlock it. Its memory has a key of its own, so that nothing else
        uses it and it never becomes a page. None: there is no memory."""
        own = ObjectKey(secrets.token_bytes(len(key.chunk_hash)), key.model_name, 0)
        reserved = self._manager.reserve_write([own], _layout(num_bytes))
        if own not in reserved:
            adapter.submit_unlock([key])
            return None
        task_id = adapter.submit_load_task([key], [reserved[own]])
        loaded = _wait(partial(adapter.query_load_result, task_id), deadline)
        if loaded is None:
            self._add_late(partial(self._release_load, adapter, task_id, key, own))
            return _status(Status.LATE)
        answer = bytearray(_status(Status.OK if loaded.test(0) else Status.BAD_VALUE))
        if loaded.test(0):
            answer += memoryview(reserved[own].byte_array).cast("B")
        self._free(adapter, key, own)
        return answer

    def _free(self, adapter: Any, key: ObjectKey, own: ObjectKey) -> None:
        adapter.submit_unlock([key])
        self._manager.delete_l1_keys([own], force=True)  # a reservation; LMCache logs that it is discarded

    def _add_late(self, release: Callable[[], bool]) -> None:
        with self._lock:
            self._late.append(release)

    def _release_late(self) -> None:
        with self._lock:
            late, self._late = self._late, []
        for release in late:
            if not release():
                self._add_late(release)

    def _release_prefetch(self, handle: Any, key: ObjectKey) -> bool:
        if not self._manager.wait_prefetch_status(handle, 0.0):
            return False
        if _is_hit(self._manager.query_prefetch_status(handle)):
            self._manager.finish_read_prefetched([key])
        return True

    def _release_lookup(self, adapter: Any, task_id: Any, key: ObjectKey) -> bool:
        found = adapter.query_lookup_and_lock_result(task_id)
        if found is not None and found.test(0):
            adapter.submit_unlock([key])
        return found is not None

    def _release_load(self, adapter: Any, task_id: Any, key: ObjectKey, own: ObjectKey) -> bool:
        if adapter.query_load_result(task_id) is None:
            return False
        self._free(adapter, key, own)
        return True


def _wait(query: Callable[[], Any], deadline: float) -> Any:
    """What an adapter's query returns once its task has ended; None: not in time."""
    while (result := query()) is None and time.monotonic() <= deadline:
        time.sleep(_PAUSE_S / 4)
    return result


def _status(status: Status) -> bytes:
    return bytes([status])


def _deadline(head: Head) -> float:
    return time.monotonic() + _ANSWER_SHARE * min(max(head.timeout_s, 0.0), _MAX_WAIT_S)


def _key(head: Head) -> ObjectKey:
    return ObjectKey(head.chunk_hash, head.model_name, 0, 0, head.cache_salt)


def _layout(num_bytes: int) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size([num_bytes])], [torch.uint8])


def _is_hit(result: Any) -> bool:
    return result is not None and bool(result.hit_cells[0].test(0))
