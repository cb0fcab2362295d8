"""Pages in LMCache's files: whole ones or none, and a disk that hangs costs time-outs only."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError
from kv_transfer.page.naming import PageNaming
from kv_transfer.secret import ensure_secret
from kv_transfer.stores.base import BadValue
from kv_transfer.stores.lmcache.disk import LMCacheDisk
from kv_transfer.stores.lmcache.store import ObjectName, import_lmcache
from tests.kv_transfer.harness import BLOCK_SIZE, FINGERPRINT, LAYOUT, Core, make_request
from tests.kv_transfer.stores.contract import HEADER, NUM_BYTES, PAGE, check_contract, key_of, read
from tests.kv_transfer.stores.lmcache.lmcache_checks import LMCacheLoad, check_many_threads, nothing_leaks, pages_in
from tests.kv_transfer.stores.redis.redis_load import PROMPT
from tests.waiting import Stopwatch


def disk(path: Path, **options: object) -> LMCacheDisk:
    """Patient: a busy machine is not a broken disk."""
    return LMCacheDisk(path, **{"capacity_bytes": 1 << 30, "timeout_s": 20.0, **options})  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LMCacheDisk]:
    store = disk(tmp_path / "store")
    yield store
    store.close()


def test_store_keeps_its_contract_and_leaves_nothing(tmp_path: Path) -> None:
    disk(tmp_path / "warm").close()  # imports
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


def test_two_processes_share_pages(store: LMCacheDisk) -> None:
    store.put(key_of(1), (HEADER, PAGE))
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from kv_transfer.stores.lmcache.disk import LMCacheDisk\n"
        "from tests.kv_transfer.stores.contract import read, key_of, HEADER, PAGE\n"
        "store = LMCacheDisk(sys.argv[1], capacity_bytes=1 << 30, timeout_s=20.0)\n"
        "assert read(store, key_of(1)) == (HEADER, PAGE)\n"
        "store.put(key_of(2), (HEADER, PAGE)); store.delete(key_of(1)); store.close()\n"
    )
    subprocess.run([sys.executable, "-c", code, os.fspath(store.path)], check=True, timeout=60)
    assert read(store, key_of(1)) is None
    assert read(store, key_of(2)) == (HEADER, PAGE)


def test_lmcache_server_finds_the_same_files(store: LMCacheDisk) -> None:
    api = import_lmcache("lmcache.v1.distributed.api")
    files = import_lmcache("lmcache.v1.distributed.l2_adapters.fs_l2_adapter")
    for key in (key_of(1), key_of(1, transfer="t")):
        store.put(key, (HEADER, PAGE))
        name = ObjectName.of(key)
        object_key = api.ObjectKey(name.chunk_hash, name.model_name, 0, 0, name.cache_salt)
        assert files._object_key_to_filename(object_key) in {path.name for path in pages_in(store.path)}


@pytest.mark.parametrize("num_bytes", [0, 100, 256, NUM_BYTES - 1, NUM_BYTES + 1])
def test_file_of_another_length_is_rejected_and_overwritten(store: LMCacheDisk, num_bytes: int) -> None:
    store.put(key_of(1), (HEADER, PAGE))
    (path,) = pages_in(store.path)
    path.write_bytes(b"x" * num_bytes)
    with pytest.raises(BadValue, match="size"):
        read(store, key_of(1))
    assert not store.contains(key_of(1), NUM_BYTES)
    store.put(key_of(1), (HEADER, PAGE))  # LMCache alone would leave the file and report it as stored
    assert read(store, key_of(1)) == (HEADER, PAGE)


def _symlink(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def _fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, outside: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("plant", [_symlink, _fifo, _folder])
def test_what_is_not_a_regular_file_is_rejected_at_once(
    store: LMCacheDisk, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(HEADER + PAGE)
    store.put(key_of(1), (HEADER, PAGE))
    (path,) = pages_in(store.path)
    path.unlink()
    plant(path, outside)
    watch = Stopwatch()
    with pytest.raises(BadValue, match="not_a_file"):
        read(store, key_of(1))
    assert not store.contains(key_of(1), NUM_BYTES)
    if plant is not _folder:
        store.put(key_of(1), (b"g" * 256, PAGE))
        assert read(store, key_of(1)) == (b"g" * 256, PAGE)
    assert watch.s < 1.0
    assert outside.read_bytes() == HEADER + PAGE


def test_folder_that_was_removed_is_created_again(store: LMCacheDisk) -> None:
    store.put(key_of(1), (HEADER, PAGE))
    shutil.rmtree(store.path / "v1")
    assert read(store, key_of(1)) is None
    store.put(key_of(1), (HEADER, PAGE))
    assert read(store, key_of(1)) == (HEADER, PAGE)


def test_folder_is_kept_within_its_size(tmp_path: Path) -> None:
    with contextlib.closing(disk(tmp_path / "store", capacity_bytes=10 * NUM_BYTES)) as store:
        for number in range(5):
            store.put(key_of(number), (HEADER, PAGE))
        for path in pages_in(store.path):
            os.utime(path, (1.0, 1.0))  # used long ago; pages written in one moment have no order among them
        for number in range(5, 12):
            store.put(key_of(number), (HEADER, PAGE))
        deadline = time.monotonic() + 5.0
        while len(pages_in(store.path)) > 10:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert all(read(store, key_of(number)) == (HEADER, PAGE) for number in range(5, 12))


def test_path_that_cannot_be_created_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"lmcache path .*Not a directory"):
        disk(tmp_path / "file" / "store")


@pytest.mark.slow
def test_full_disk_is_an_error_with_a_name(tmp_path: Path) -> None:
    # RLIMIT_FSIZE behaves like a full disk, and is a process's own.
    code = (
        "import resource, sys; sys.path.insert(0, '.')\n"
        "from kv_transfer.stores.lmcache.disk import LMCacheDisk\n"
        "from kv_transfer.page.naming import PageKey\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = LMCacheDisk(sys.argv[1], capacity_bytes=1 << 30, timeout_s=20.0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n    store.put(PageKey(bytes(32), bytes(32)), (b'h', bytes(3 << 20)))\n"
        "except Exception as error:\n    print(type(error).__name__)\n"
        "store.put(PageKey(bytes(32), b'1' * 32), (b'h', b'page')); store.close()\n"
    )
    command = [sys.executable, "-c", code, os.fspath(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() in ("StoreError", "OSError")
    (page,) = pages_in(tmp_path / "store")
    assert (b"1" * 32).hex() in page.name


# Damage, as the connector sees it


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


@pytest.mark.parametrize(
    ("damage", "reason"), [(_flip, "page_digest"), (_truncate, "page_size"), (Path.unlink, "missing")]
)
def test_damaged_page_is_a_counted_miss_and_is_removed(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    ensure_secret(tmp_path / "key")
    options: dict[str, Any] = {"kv_secret_file": str(tmp_path / "key"), "num_io_threads": 1}
    prefill, decode = (Core(disk(tmp_path / "store"), **options) for _ in range(2))
    request, reader = make_request(PROMPT, hold=True), make_request(PROMPT, remote=True)
    prefill.prefill(request)
    third = PageNaming.of(FINGERPRINT, LAYOUT).block_hashes(request)[2].hex()
    (path,) = [path for path in pages_in(tmp_path / "store") if third in path.name]
    damage(path)
    decode.reserve(reader)
    result = decode.complete(reader)
    assert result.num_verified_tokens == 2 * BLOCK_SIZE
    assert decode.has(reader, 2 * BLOCK_SIZE)
    assert decode.connector.counters.loaded.failures[reason] == 1
    assert not path.exists()
    prefill.release()
    for core in (prefill, decode):
        core.connector.shutdown()
    assert not [path for path in pages_in(tmp_path / "store") if "transfers" in path.parts], "a tail was not removed"


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


_STUCK = """
import os, sys, time
sys.path.insert(0, ".")
from kv_transfer.stores.lmcache.disk import LMCacheDisk, Folder
from kv_transfer.stores.lmcache.store import ObjectName
from kv_transfer.stores.base import StoreError
from tests.kv_transfer.stores.contract import HEADER, PAGE, key_of, read
from tests.kv_transfer.stores.lmcache.lmcache_checks import pages_in
from tests.waiting import Stopwatch
from pathlib import Path

store = LMCacheDisk(sys.argv[1], capacity_bytes=1 << 30, num_workers=2, timeout_s=0.2)
store.put(key_of(0), (HEADER, PAGE))
store.put(key_of(1), (HEADER, PAGE))
first, second = (store._pages.file(ObjectName.of(key_of(number))) for number in (0, 1))
os.unlink(second)
os.mkfifo(second)  # what a disk that hangs is like: the client's thread waits in open()
Folder.holds = lambda *_: True  # or the FIFO would be detected
reasons = []
for _ in range(6):
    header, page = bytearray(256), bytearray(4096)
    watch = Stopwatch()
    try:
        store.get_into(key_of(1), (header, page), lambda: None)
    except StoreError as error:
        reasons.append(error.reason)
    assert watch.s < 0.6
    assert not any(header) and not any(page)
assert reasons == ["timeout"] * 4 + ["stuck"] * 2, reasons
assert store._pages.runner.num_abandoned == 4
if sys.argv[2] == "returns":
    while store._pages.runner.num_abandoned:  # the disk is back: every waiting read sees an end of file
        time.sleep(0.01)
        try:
            os.close(os.open(second, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            pass
    assert read(store, key_of(0)) == (HEADER, PAGE)
watch = Stopwatch()
store.close()
assert watch.s < 5.0
print("closed", flush=True)
"""


@pytest.mark.parametrize("then", [pytest.param("returns", marks=pytest.mark.slow), "never"])
def test_disk_that_hangs_costs_time_outs_and_four_buffers_and_no_process(tmp_path: Path, then: str) -> None:
    command = [sys.executable, "-c", _STUCK, os.fspath(tmp_path / "store"), then]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (0, "closed"), ended.stderr
    assert ("tasks open" in ended.stderr) == (then == "never")
