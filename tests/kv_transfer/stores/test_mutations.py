"""Hundreds of mutations of stored pages, store by store: each is found before its block counts, counted by its name,
and costs what follows it in its request; the pages before it are used, and the next request notices nothing."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.page.format import PageKey
from kv_transfer.secret import ensure_secret, load_secret
from kv_transfer.stores.base import BlockStore
from kv_transfer.stores.files import SharedStorage
from kv_transfer.stores.redis.connector import RedisStore
from tests.kv_transfer.harness import BLOCK_SIZE, Core
from tests.kv_transfer.memory_store import MemoryStore
from tests.kv_transfer.stores.mutations import NUM_PAGES, PAGE_BYTES, Written, catalogue, reader_of
from tests.kv_transfer.stores.redis.redis_server import RedisServer, name_of, options_of, redis_server

_PROMISED = 500
_CONTROL_EVERY = 50


class Shelf:
    """A store, and what else than a value can lie in it: label → (reason, how to put it under a key)."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.plants: dict[str, tuple[str, Callable[[PageKey], None]]] = {}


class Folder(Shelf):
    """Pages as files, `outside` is a folder that links may point to."""

    def __init__(self, folder: Path) -> None:
        storage = SharedStorage(folder / "store", capacity_bytes=1 << 30)
        super().__init__(storage)
        self._root, self._outside = storage.path, folder / "outside"
        self._outside.mkdir()
        self.plants = {
            "a link to the page itself": ("page_not_a_file", self._link_to_itself),
            "a dangling link": ("page_not_a_file", lambda key: self._place(key).symlink_to("nowhere")),
            "a link to a device": ("page_not_a_file", lambda key: self._place(key).symlink_to("/dev/zero")),
            "a FIFO": ("page_not_a_file", lambda key: os.mkfifo(self._place(key))),
            "a folder": ("page_not_a_file", lambda key: self._place(key).mkdir()),
            "a folder that is not empty": ("page_not_a_file", lambda key: (self._place(key) / "x").mkdir(parents=True)),
            "a socket": ("page_not_a_file", self._socket),
        }

    def _place(self, key: PageKey) -> Path:
        """Where the page is; it is there no more."""
        path = self._root.joinpath(*key.parts)
        path.unlink()
        return path

    def _link_to_itself(self, key: PageKey) -> None:
        """To a good copy, of the right length: following it would be a hit."""
        path = self._root.joinpath(*key.parts)
        copy = self._outside / path.name
        path.rename(copy)
        path.symlink_to(copy)

    def _socket(self, key: PageKey) -> None:
        place = self._place(key)
        with socket.socket(socket.AF_UNIX) as bound:
            folder = os.open(place.parent, os.O_RDONLY)
            try:
                bound.bind(f"/proc/self/fd/{folder}/{place.name}")  # the path itself is too long for a socket
            finally:
                os.close(folder)


class Redis(Shelf):
    """Pages as values."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__(RedisStore(options_of(server)))
        self._server = server
        self.plants = {
            "a list": ("page_type", lambda key: self._instead(key, "RPUSH", "x")),
            "a set": ("page_type", lambda key: self._instead(key, "SADD", "x")),
            "a hash": ("page_type", lambda key: self._instead(key, "HSET", "x", "y")),
            "a sorted set": ("page_type", lambda key: self._instead(key, "ZADD", 1, "x")),
            "a stream": ("page_type", lambda key: self._instead(key, "XADD", "*", "x", "y")),
            "a number": ("page_size", lambda key: self._instead(key, "INCR")),
            "a bitmap": ("page_size", lambda key: self._instead(key, "SETBIT", 8 << 20, 1)),
        }

    def _instead(self, key: PageKey, command: str, *arguments: str | int) -> None:
        name = name_of(key)
        self._server.run("DEL", name)
        self._server.run(command, name, *arguments)


_STORES = ["memory", "shared_storage", "redis"]


@pytest.fixture(params=_STORES)
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    if request.param == "redis":
        with redis_server(tmp_path) as server:
            yield Redis(server)
    else:
        yield Folder(tmp_path) if request.param == "shared_storage" else Shelf(MemoryStore())


class Mutated:
    """One decode core; every request has pages of its own, and the same blocks to load them into."""

    def __init__(self, shelf: Shelf, key_file: Path | None) -> None:
        self.store = shelf.store
        self.key = None if key_file is None else load_secret(str(key_file))
        options: dict[str, Any] = {} if key_file is None else {"kv_secret_file": str(key_file)}
        self.core = Core(self.store, num_blocks=NUM_PAGES, **options)
        self.num_requests = 0
        self.num_mutations = 0

    def stock(self) -> Written:
        """Good pages of a new request, stored."""
        self.num_requests += 1
        written = Written.of(self.num_requests, self.key)
        for index, name in enumerate(written.names):
            self.store.put(name.key, (written.value(index),))
        return written

    def load(self) -> tuple[int, Counter[str]]:
        """Load what was stocked last; pages that were used, and what was counted."""
        core, counters = self.core, self.core.connector.counters
        counted = Counter(counters.loaded.failures)
        core.next_block = 0
        core.kv.zero_()
        core.loaded.clear()
        reader = reader_of(self.num_requests)
        core.reserve(reader)
        result = core.complete(reader)
        num_used = NUM_PAGES - result.num_recomputed_blocks
        assert result.num_verified_tokens == min(num_used * BLOCK_SIZE, reader.num_initial_tokens)
        assert core.has(reader, result.num_verified_tokens), "a wrong block is used"
        assert not core.finish(reader, "length")
        return num_used, Counter(counters.loaded.failures) - counted

    def check(self, label: str, first_bad: int, reasons: frozenset[str], num_bad: int = 1) -> None:
        """It was found and counted, and nothing before it is lost. Where several are bad, the inspection that follows
        the first may have removed the others before they are read."""
        num_used, counted = self.load()
        assert num_used == first_bad, label
        assert counted, f"{label} is not counted"
        assert counted.keys() & reasons, f"{label} is counted as {[*counted]}"
        assert counted.keys() <= reasons | ({"missing"} if num_bad > 1 else set()), label
        self.num_mutations += 1
        if self.num_mutations % _CONTROL_EVERY == 0:
            self.check_control()

    def check_control(self) -> None:
        """Good pages are used whole, whatever came before."""
        self.stock()
        assert self.load() == (NUM_PAGES, Counter())
        assert not self.core.connector._io.load_breaker.is_open

    def run_catalogue(self) -> None:
        self.check_control()
        for number, mutation in enumerate(catalogue(digest=self.key is not None)):
            written, index = self.stock(), number % NUM_PAGES
            changed = mutation.change(written, index)
            for bad, value in changed.items():
                assert value != written.value(bad), f"{mutation.label} changes nothing"
                self.store.put(written.names[bad].key, (value,))
            reasons = frozenset({f"page_{reason}" for reason in mutation.reasons} | {"missing"} & mutation.reasons)
            self.check(mutation.label, min(changed), reasons, len(changed))
            first = written.names[min(changed)].key
            is_there = self.store.contains(first, len(changed[min(changed)]))
            assert not is_there or not changed[min(changed)], f"{mutation.label} is left in the store"
        self.check_control()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    ensure_secret(tmp_path / "key")
    return tmp_path / "key"


def test_all_mutations_of_pages_are_found_and_counted(shelf: Shelf, key_file: Path) -> None:
    mutated = Mutated(shelf, key_file)
    mutated.run_catalogue()
    # STEP what is not even a value: three times at every place
    for label, (reason, plant) in shelf.plants.items():
        for index in [*range(NUM_PAGES)] * 3:
            plant(mutated.stock().names[index].key)
            mutated.check(label, index, frozenset({reason}))
    mutated.check_control()
    print(f"{shelf.store.name}: {mutated.num_mutations} mutations, all found and counted")
    assert mutated.num_mutations >= _PROMISED
    mutated.core.connector.shutdown()


@pytest.mark.parametrize(
    "shelf",
    [pytest.param(store, marks=() if store == "memory" else pytest.mark.slow) for store in _STORES],
    indirect=True,
)
def test_without_digests_all_that_a_header_and_a_length_can_tell_is_found(shelf: Shelf) -> None:
    """No store sees the key: in each run one of them is enough."""
    mutated = Mutated(shelf, None)
    mutated.run_catalogue()
    print(f"{shelf.store.name}: {mutated.num_mutations} mutations, all found and counted without digests")
    assert mutated.num_mutations >= _PROMISED
    mutated.core.connector.shutdown()


def test_every_mutation_has_the_length_and_place_it_says() -> None:
    mutations = catalogue(digest=True)
    assert len({mutation.label for mutation in mutations}) > _PROMISED
    written = Written.of(1, b"k" * 32)
    lengths = {len(value) for mutation in mutations for value in mutation.change(written, 0).values()}
    assert {0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1} <= lengths
