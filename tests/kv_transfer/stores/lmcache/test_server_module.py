"""Tandem's module in an `lmcache server`, over a storage manager whose L2 answers when the test lets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from kv_transfer.stores.lmcache.names import ObjectName
from kv_transfer.stores.lmcache.server import CONTAINS, GET, PROTOCOL_VERSION, Head, Status, request_frames
from tests.kv_transfer.stores.contract import NUM_BYTES, key_of
from tests.kv_transfer.stores.lmcache.lmcache_checks import import_lmcache


@dataclass
class SlowPlace:
    """An L2 adapter. Its lookups find and lock the page, once `answers`."""

    answers: bool = False
    num_looked_up: int = 0
    num_locked: int = 0

    def submit_lookup_and_lock_task(self, keys: list[object], layouts: object) -> int:
        self.num_looked_up += 1
        return self.num_looked_up

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        if not self.answers:
            return None
        self.num_locked += 1
        return SimpleNamespace(test=lambda index: True)

    def submit_unlock(self, keys: list[object]) -> None:
        self.num_locked -= 1


@dataclass
class Manager:
    """An L1 without any page."""

    place: SlowPlace = field(default_factory=SlowPlace)

    def submit_prefetch_task(self, spec: object, *, skip_l2: bool) -> object:
        return None

    def wait_prefetch_status(self, handle: object, timeout_s: float) -> bool:
        return True

    def query_prefetch_status(self, handle: object) -> None:
        return None

    def l2_adapters(self) -> list[tuple[int, SlowPlace]]:
        return [(0, self.place)]


def make_module(manager: Manager) -> Any:
    """A PageModule. Its import is LMCache's."""
    server_module = import_lmcache("kv_transfer.stores.lmcache.server_module")
    return server_module.PageModule(SimpleNamespace(storage_manager=manager))


def call(module: Any, method: str) -> Status:
    name = ObjectName.of(key_of(1))
    head = Head(PROTOCOL_VERSION, name.model_name, name.chunk_hash, name.cache_salt, NUM_BYTES, 0.02)
    payload = msgspec.msgpack.decode(request_frames(1, method, head)[2])["payload"]
    handler = module.get if method == GET else module.contains
    return Status(handler(payload)[0])


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
