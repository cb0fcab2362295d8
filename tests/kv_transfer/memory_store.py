"""A store in this process's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kv_transfer.page.format import Buffer, PageKey
from kv_transfer.stores.base import BadValue


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
