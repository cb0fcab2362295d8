"""Tandem's module in an `lmcache server`, over a storage manager whose L2 answers when the test lets it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from kv_transfer.stores.lmcache.server import CONTAINS, GET, PROTOCOL_VERSION, Head, ObjectName, Status, request_frames
from tests.kv_transfer.stores.contract import HEADER, NUM_BYTES, PAGE, key_of
from tests.kv_transfer.stores.lmcache.lmcache_checks import import_lmcache

VALUE = HEADER + PAGE


def bit(value: bool) -> Any:
    return SimpleNamespace(test=lambda index: value)


@dataclass
class SlowPlace:
    """An L2 adapter. Its lookups find and lock the page, once `answers`; its loads end once `loads` says how."""

    answers: bool = False
    loads: bool | None = None
    num_looked_up: int = 0
    num_locked: int = 0
    deleted: list[object] = field(default_factory=list)

    def submit_lookup_and_lock_task(self, keys: list[object], layouts: object) -> int:
        self.num_looked_up += 1
        return self.num_looked_up

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        if not self.answers:
            return None
        self.num_locked += 1
        return bit(True)

    def submit_unlock(self, keys: list[object]) -> None:
        self.num_locked -= 1

    def submit_load_task(self, keys: list[object], objects: list[Any]) -> int:
        if self.loads:
            objects[0].byte_array[:] = VALUE
        return 0

    def query_load_result(self, task_id: int) -> Any:
        return None if self.loads is None else bit(self.loads)

    def delete(self, keys: list[object]) -> None:
        self.deleted += keys


@dataclass
class Manager:
    """An L1 without any page, and with no memory unless `has_memory`. No fetch succeeds, until L1 receives the page
    for another reader."""

    place: SlowPlace = field(default_factory=SlowPlace)
    has_memory: bool = False
    is_in_l1: bool = False
    reserved: list[object] = field(default_factory=list)

    def submit_prefetch_task(self, spec: object, *, skip_l2: bool) -> bool:
        return self.is_in_l1 and skip_l2

    def wait_prefetch_status(self, handle: bool, timeout_s: float) -> bool:
        return True

    def query_prefetch_status(self, handle: bool) -> Any:
        return SimpleNamespace(hit_cells=[bit(handle)])

    @contextlib.contextmanager
    def read_prefetched_results(self, keys: list[object]) -> Iterator[list[Any]]:
        yield [SimpleNamespace(byte_array=bytearray(VALUE))]

    def finish_read_prefetched(self, keys: list[object]) -> None:
        pass

    def reserve_write(self, keys: list[object], layout: object) -> dict[object, Any]:
        if not self.has_memory:
            return {}
        self.reserved += keys
        return {keys[0]: SimpleNamespace(byte_array=bytearray(NUM_BYTES))}

    def delete_l1_keys(self, keys: list[object], *, force: bool) -> tuple[int, int]:
        assert force, "what is reserved counts as locked"
        self.reserved.remove(keys[0])
        return 1, 0

    def l2_adapters(self) -> list[tuple[int, SlowPlace]]:
        return [(0, self.place)]


def make_module(manager: Manager) -> Any:
    """A PageModule. Its import is LMCache's."""
    server_module = import_lmcache("kv_transfer.stores.lmcache.server_module")
    return server_module.PageModule(SimpleNamespace(storage_manager=manager))


def call(module: Any, method: str) -> Status:
    return Status(answer_of(module, method)[0])


def answer_of(module: Any, method: str) -> bytes:
    name = ObjectName.of(key_of(1))
    head = Head(PROTOCOL_VERSION, name.model_name, name.chunk_hash, name.cache_salt, NUM_BYTES, 0.02)
    payload = msgspec.msgpack.decode(request_frames(1, method, head)[2])["payload"]
    handler = module.get if method == GET else module.contains
    return bytes(handler(payload))


def test_a_lookup_that_ends_late_is_an_error_and_leaves_no_lock() -> None:
    manager = Manager()
    module = make_module(manager)
    assert [call(module, method) for method in (CONTAINS, GET)] == [Status.LATE, Status.LATE]
    assert module.report_status() == {"tandem_kv": {"num_late": 2}}
    manager.place.answers = True
    assert call(module, CONTAINS) == Status.OK
    assert (manager.place.num_locked, module.report_status()) == (0, {"tandem_kv": {"num_late": 0}})


def test_a_place_that_hangs_gets_no_further_lookups() -> None:
    manager = Manager()
    module = make_module(manager)
    assert {call(module, CONTAINS) for _ in range(40)} == {Status.LATE}
    assert manager.place.num_looked_up == 32


def test_a_page_that_l1_has_no_memory_for_is_late_and_not_damaged() -> None:
    manager = Manager(SlowPlace(answers=True, loads=True))
    assert call(make_module(manager), GET) == Status.LATE
    assert (manager.place.num_locked, manager.place.deleted) == (0, [])


def test_a_page_that_no_fetch_brings_is_read_from_its_place() -> None:
    manager = Manager(SlowPlace(answers=True, loads=True), has_memory=True)
    assert answer_of(make_module(manager), GET) == bytes([Status.OK]) + VALUE
    assert (manager.place.num_locked, manager.reserved) == (0, [])


def test_a_page_that_its_place_cannot_read_is_a_bad_value() -> None:
    manager = Manager(SlowPlace(answers=True, loads=False), has_memory=True)
    assert call(make_module(manager), GET) == Status.BAD_VALUE
    assert (manager.place.num_locked, manager.reserved) == (0, [])


def test_a_page_that_came_to_l1_for_another_reader_is_read_there() -> None:
    manager = Manager(SlowPlace(answers=True, loads=False), has_memory=True, is_in_l1=True)
    assert answer_of(make_module(manager), GET) == bytes([Status.OK]) + VALUE
    assert manager.place.num_looked_up == 0


def test_a_load_that_ends_late_keeps_its_memory_until_then() -> None:
    manager = Manager(SlowPlace(answers=True), has_memory=True)
    module = make_module(manager)
    assert call(module, GET) == Status.LATE
    assert (manager.place.num_locked, len(manager.reserved)) == (1, 1), "the place may still write to it"
    manager.place.loads = False
    assert call(module, CONTAINS) == Status.OK
    assert (manager.place.num_locked, manager.reserved) == (0, [])
