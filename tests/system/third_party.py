"""A connector as a third party would write it: pages in one SQLite file that all instances open.

`--kv-connector tests.system.third_party:SqliteConnector` names it, --kv-folder the folder of the file.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kv_transfer.page.format import Buffer, PageKey
from kv_transfer.stores.base import BadValue, StoreError
from kv_transfer.stores.connector import StoreConnector, StoreOptions
from kv_transfer.transfer.connector import parse_options

FILE_NAME = "pages.sqlite"
_BUSY_S = 2.5
"""A process that is frozen in the middle of a write keeps the lock: another one's page is lost after this time."""


class SqliteOptions(StoreOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of this connector."""

    path: str
    """Folder of the file, the same for all instances."""


def open_pages(folder: Path) -> sqlite3.Connection:
    """The file, made if it is not there; may be used by any thread that holds a lock of its own."""
    pages = sqlite3.connect(folder / FILE_NAME, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    _retried(lambda: pages.execute("PRAGMA journal_mode=WAL"))
    pages.execute("PRAGMA synchronous=OFF")
    pages.execute("CREATE TABLE IF NOT EXISTS pages (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
    return pages


def _retried(change: Callable[[], object]) -> None:
    """Of two processes that change the journal's mode at once one is rejected without a wait."""
    deadline_s = time.monotonic() + _BUSY_S
    while True:
        try:
            change()
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


@contextmanager
def _store_errors() -> Iterator[None]:
    """A file that is locked, full or damaged costs a computation; any other error is a fault of this connector."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise StoreError("sqlite") from error


class SqliteStore:
    """Implements kv_transfer.stores.base.BlockStore; a name is the key's parts joined by slashes."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pages = open_pages(folder)
        self._lock = threading.Lock()

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        row = ("/".join(key.parts), b"".join(buffers))
        with self._lock, _store_errors():
            self._pages.execute("INSERT OR REPLACE INTO pages VALUES (?, ?)", row)

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        with self._lock, _store_errors():
            row = self._pages.execute("SELECT value FROM pages WHERE name = ?", ("/".join(key.parts),)).fetchone()
        if row is None:
            return False
        value = memoryview(row[0])
        if len(value) != sum(len(buffer) for buffer in buffers):
            raise BadValue("size")
        offset = 0
        for index, buffer in enumerate(buffers):
            memoryview(buffer).cast("B")[:] = value[offset : offset + len(buffer)]
            offset += len(buffer)
            if index == 0:
                check()
        return True

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        with self._lock, _store_errors():
            query = "SELECT length(value) FROM pages WHERE name = ?"
            row = self._pages.execute(query, ("/".join(key.parts),)).fetchone()
        return row is not None and row[0] == num_bytes

    def delete(self, key: PageKey) -> None:
        with self._lock, _store_errors():
            self._pages.execute("DELETE FROM pages WHERE name = ?", ("/".join(key.parts),))

    def close(self) -> None:
        self._pages.close()


class SqliteConnector(StoreConnector):
    """The whole of it: a store, its options, and what StoreConnector makes of them."""

    def __init__(self, *, wake: Callable[[], None], **options: Any) -> None:
        parsed = parse_options(SqliteOptions, SqliteStore.name, options)
        super().__init__(SqliteStore(Path(parsed.path)), parsed, wake=wake)
