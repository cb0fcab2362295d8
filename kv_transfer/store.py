"""Where a store connector keeps pages: anything that can put, get, find and delete a value by key.

A value is a header and a page (kv_transfer/page.py), handed over as buffers so that a page goes straight from and
into KV memory. All methods may block, are called from I/O threads, and must be thread-safe. A store promises little:
a value may vanish or be damaged at any time, since the reader verifies what it gets. It must never show half of a
value as a whole one under its own name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.page import Buffer


class StoreError(Exception):
    """The store did not do what it was asked. `reason` is one word, fit for a counter's label."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class BadValue(StoreError):
    """The store works, but what lies under the key is not a value of the right length."""


@dataclass(frozen=True, slots=True)
class PageKey:
    """Names a page. `scope` is empty for a full block, which is everybody's, and SHA-256(transfer_id) for a tail."""

    fingerprint: bytes
    block_hash: bytes
    scope: bytes = b""

    @property
    def parts(self) -> tuple[str, ...]:
        """The key as path components of hex digits; no string of a user's is ever among them."""
        space, name = self.fingerprint[:8].hex(), self.block_hash.hex()
        if self.scope:
            return ("v1", space, "transfers", self.scope.hex(), name)
        return ("v1", space, name[:2], name)


class BlockStore(Protocol):
    """See above. Errors: StoreError or OSError; what `check` raises goes through."""

    name: str

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        """Make the concatenation of `buffers` the value of `key`, visible all at once. The last writer wins."""
        ...

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        """Fill `buffers`; False: no such value. A value of another length is a BadValue, found before a byte is read.

        `check` is called once buffers[0] is full, before the rest is read where the backend can; it raises to stop
        there.
        """
        ...

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        """Whether there is a value of exactly this length; if so it counts as used now."""
        ...

    def delete(self, key: PageKey) -> None:
        """Remove the value if there is one."""
        ...

    def close(self) -> None:
        """Stop threads, close connections. Nothing is called afterwards."""
        ...


class MemoryStore:
    """A store in this process's memory: for tests, and the shortest statement of what a store does."""

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
