"""The pages in a connector's store, accessed by a test without the connector: to read, to damage, to remove."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kv_transfer.page.format import HEADER_BYTES
from tests.files_below import files_below
from tests.kv_transfer.stores.redis.redis_server import RedisServer
from tests.system.third_party import open_pages


class StoredPages(Protocol):
    """Pages by name. A name may be gone by the time it is used."""

    def names(self) -> set[str]:
        """Every page that readers can see."""
        ...

    def private(self) -> set[str]:
        """Pages of single transfers, and unfinished ones: none may be left when no transfer runs."""
        ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, value: bytes) -> None:
        """Replaces a page, as a disk or another program might."""
        ...

    def remove(self, name: str) -> None: ...


class FolderPages:
    """One file for each page; what belongs to one transfer lies below `transfers`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> set[str]:
        return {name for name in self._files() if not Path(name).name.startswith(".")}

    def private(self) -> set[str]:
        return {name for name in self._files() if "transfers" in Path(name).parts or Path(name).name.startswith(".")}

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write(self, name: str, value: bytes) -> None:
        (self._folder / name).write_bytes(value)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def _files(self) -> set[str]:
        return {str(path.relative_to(self._folder)) for path in files_below(self._folder)}


class RedisPages:
    """One value for each page, with redis-py."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def names(self) -> set[str]:
        return {name.decode() for name in self._server.names()}

    def private(self) -> set[str]:
        return {name for name in self.names() if "/transfers/" in name}

    def read(self, name: str) -> bytes:
        value = self._server.run("GET", name)
        assert isinstance(value, bytes)
        return value

    def write(self, name: str, value: bytes) -> None:
        with self._server.client() as client:
            client.set(name, value, keepttl=True)

    def remove(self, name: str) -> None:
        self._server.run("DEL", name)


class SqlitePages:
    """One row for each page of the third party's file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> set[str]:
        return {str(row[0]) for row in self._run("SELECT name FROM pages")}

    def private(self) -> set[str]:
        return {name for name in self.names() if "/transfers/" in name}

    def read(self, name: str) -> bytes:
        [(value,)] = self._run("SELECT value FROM pages WHERE name = ?", name)
        assert isinstance(value, bytes)
        return value

    def write(self, name: str, value: bytes) -> None:
        self._run("UPDATE pages SET value = ? WHERE name = ?", value, name)

    def remove(self, name: str) -> None:
        self._run("DELETE FROM pages WHERE name = ?", name)

    def _run(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        with contextlib.closing(open_pages(self._folder)) as pages:
            return pages.execute(statement, values).fetchall()


# Damage. Each function takes the sorted names of one request's pages and must make at least one of them worthless.

Damage = Callable[[StoredPages, list[str], random.Random], None]


def flip_a_payload_bit(pages: StoredPages, names: list[str], source: random.Random) -> None:
    name = source.choice(names)
    value = bytearray(pages.read(name))
    value[source.randrange(HEADER_BYTES, len(value))] ^= 1 << source.randrange(8)
    pages.write(name, bytes(value))


def flip_a_header_bit(pages: StoredPages, names: list[str], source: random.Random) -> None:
    name = source.choice(names)
    value = bytearray(pages.read(name))
    value[source.randrange(0, 212)] ^= 1 << source.randrange(8)
    pages.write(name, bytes(value))


def truncate(pages: StoredPages, names: list[str], source: random.Random) -> None:
    name = source.choice(names)
    pages.write(name, pages.read(name)[: source.choice([0, 100, HEADER_BYTES, 1000])])


def swap(pages: StoredPages, names: list[str], source: random.Random) -> None:
    """Two good pages, each under the other's name."""
    first, second = source.sample(names, 2)
    values = pages.read(first), pages.read(second)
    pages.write(first, values[1])
    pages.write(second, values[0])


def remove_one(pages: StoredPages, names: list[str], source: random.Random) -> None:
    pages.remove(source.choice(names))


def remove_all(pages: StoredPages, names: list[str], source: random.Random) -> None:
    del source
    for name in names:
        pages.remove(name)


DAMAGES: dict[str, Damage] = {
    "payload bit": flip_a_payload_bit,
    "header bit": flip_a_header_bit,
    "truncated": truncate,
    "swapped": swap,
    "one gone": remove_one,
    "all gone": remove_all,
}
