"""Pages in LMCache's files: the store's contract, and the files and names that LMCache itself reads and writes."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kv_transfer.page.format import Buffer, PageKey
from kv_transfer.stores.lmcache.connector import LMCacheDisk
from kv_transfer.stores.lmcache.server import ObjectName
from tests.kv_transfer.harness import NUM_FULL, PROMPT, Core, reader_of, writer_of
from tests.kv_transfer.stores.contract import HEADER, NUM_BYTES, PAGE, check_contract, key_of, read
from tests.kv_transfer.stores.lmcache.lmcache_checks import (
    LMCacheLoad,
    check_many_threads,
    import_lmcache,
    nothing_leaks,
    pages_in,
)
from tests.waiting import wait_until


def disk(path: Path) -> LMCacheDisk:
    return LMCacheDisk(path, capacity_bytes=1 << 30)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LMCacheDisk]:
    store = disk(tmp_path / "store")
    yield store
    store.close()


def test_store_keeps_its_contract_and_leaves_nothing(tmp_path: Path) -> None:
    with nothing_leaks():
        store = disk(tmp_path / "store")
        check_contract(store)
        check_many_threads(store)
        store.close()
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_paths_are_hex_and_private_whatever_the_transfer_is_called(store: LMCacheDisk) -> None:
    store.put(key_of(1), (HEADER, PAGE))
    store.put(key_of(1, transfer="../../etc/passwd\0/\n"), (HEADER, PAGE))
    for path in pages_in(store.path):
        assert re.fullmatch(r"tandem-v1-[0-9a-f]{16}@0x0{8}@0@[0-9a-f]{64}(@[0-9a-f]{64})?\.data", path.name)
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert len(pages_in(store.path)) == 2


def test_lmcache_server_finds_the_same_files(store: LMCacheDisk) -> None:
    api = import_lmcache("lmcache.v1.distributed.api")
    files = import_lmcache("lmcache.v1.distributed.l2_adapters.fs_l2_adapter")
    for key in (key_of(1), key_of(1, transfer="t")):
        store.put(key, (HEADER, PAGE))
        name = ObjectName.of(key)
        object_key = api.ObjectKey(name.chunk_hash, name.model_name, 0, 0, name.cache_salt)
        assert files._object_key_to_filename(object_key) in {path.name for path in pages_in(store.path)}


def test_lmcache_s_client_reads_what_is_written_here_and_the_reverse(store: LMCacheDisk) -> None:
    folder = store.path / "v1" / "pages"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    client = import_lmcache("lmcache.lmcache_fs").LMCacheFSClient(str(folder), 1, "", False, 0)
    names = [ObjectName.of(key_of(number)) for number in (1, 2)]
    ours, theirs = (f"{name.model_name}@00000000@0@{name.chunk_hash.hex()}" for name in names)
    ended: dict[int, bool] = {}

    def wait_for(task_id: int) -> None:
        def has_ended() -> bool:
            for one, is_done, _, found in client.drain_completions():
                ended[one] = is_done and (not found or bool(found[0]))
            return task_id in ended

        wait_until(has_ended)
        assert ended[task_id]

    try:
        store.put(key_of(1), (HEADER, PAGE))
        value = bytearray(len(HEADER) + len(PAGE))
        wait_for(client.submit_batch_get([ours], [memoryview(value)]))
        assert value == HEADER + PAGE
        written = bytearray(PAGE[::-1] + HEADER)
        wait_for(client.submit_batch_set([theirs], [memoryview(written)]))
        assert read(store, key_of(2)) == (bytes(written[: len(HEADER)]), bytes(written[len(HEADER) :]))
    finally:
        client.close()


def test_folder_is_kept_within_its_size_and_tails_stay(tmp_path: Path) -> None:
    store = LMCacheDisk(tmp_path / "store", capacity_bytes=10 * NUM_BYTES)
    store.put(key_of(0, transfer="t"), (HEADER, PAGE))
    for number in range(5):
        store.put(key_of(number), (HEADER, PAGE))
    for path in pages_in(store.path):
        os.utime(path, (1e9, time.time() - 1000))  # pages written in one moment have no order among them
    for number in range(5, 12):
        store.put(key_of(number), (HEADER, PAGE))
    wait_until(lambda: len(pages_in(store.path)) <= 10)
    assert all(read(store, key_of(number)) == (HEADER, PAGE) for number in range(5, 12))
    assert read(store, key_of(0, transfer="t")) == (HEADER, PAGE)
    store.close()


def test_requests_succeed_while_the_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("not a folder")
    path = tmp_path / "store"

    def mount(what: str) -> None:
        """In one step, or a store would create the folder again in between."""
        (tmp_path / "link").symlink_to(tmp_path / what)
        (tmp_path / "link").rename(path)

    mount("folder")
    with LMCacheLoad(lambda: disk(path)) as load:
        mount("file")
        assert load.wait_for_breaker(3.0) <= 2.0
        load.wait_for_miss(2.0)
        mount("folder")
        assert load.wait_for_hit(5.0) <= 5.0
    assert load.longest_s < 2.0


class _Hanging(LMCacheDisk):
    """Reads wait for the disk while it hangs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, capacity_bytes=1 << 30)
        self.works = threading.Event()

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        assert self.works.wait(60.0)
        return super().get_into(key, buffers, check)


def test_disk_that_hangs_costs_a_time_out_and_keeps_the_blocks_until_it_works_again(tmp_path: Path) -> None:
    store = _Hanging(tmp_path / "store")
    prefill, decode = Core(store), Core(store, load_timeout_s=0.2)
    prefill.prefill(writer_of())
    decode.reserve(reader := reader_of())
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.reason) == (0, "the store did not deliver within 0.2 s")
    assert result.retained_id not in (None, *decode.freed)
    store.works.set()
    decode.wait(lambda: decode.freed == [result.retained_id])
    decode.connector._loader._load_timeout_s = 60.0  # the disk works again: a stall is no failure of it
    decode.reserve(again := reader_of(request_id="again"))
    assert decode.complete(again).num_verified_tokens == len(PROMPT)
    prefill.release()
    for core in (prefill, decode):
        core.connector.shutdown()
    assert len(pages_in(store.path)) == NUM_FULL, "the tail is removed"
