"""A store in this process's memory, and a connector over one that several cores find by its name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kv_transfer.page.format import Buffer, PageKey
from kv_transfer.stores.base import BadValue, BlockStore
from kv_transfer.stores.connector import StoreConnector, StoreOptions


class MemoryStore:
    """The shortest example of a store."""

    name = "memory"

    def __init__(self) -> None:
        self.values: dict[PageKey, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        with self._lock:
            self.values[key] = b"".join(buffers)

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        with self._lock:
            value = self.values.get(key)
        if value is None:
            return False
        if len(value) != sum(len(buffer) for buffer in buffers):
            raise BadValue("size")
        offset = 0
        for index, buffer in enumerate(buffers):
            memoryview(buffer)[:] = value[offset : offset + len(buffer)]
            offset += len(buffer)
            if index == 0:
                check()
        return True

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        with self._lock:
            value = self.values.get(key)
        return value is not None and len(value) == num_bytes

    def delete(self, key: PageKey) -> None:
        with self._lock:
            self.values.pop(key, None)

    def close(self) -> None:
        return None


STORES: dict[str, BlockStore] = {}


class NamedStoreConnector(StoreConnector):
    """`store` names one of STORES."""

    def __init__(
        self, *, wake: Callable[[], None], store: str, clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> None:
        super().__init__(STORES[store], StoreOptions(digest=False, **options), wake=wake, clock=clock)
