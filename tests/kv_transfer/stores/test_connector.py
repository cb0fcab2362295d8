"""The connector over a folder: as the engine builds it, and with damaged files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from engine.kv_connector import make_connector
from kv_transfer.page.format import HEADER_BYTES, PageNaming
from kv_transfer.secret import ensure_secret, load_secret
from kv_transfer.stores.files import SharedStorage, SharedStorageConnector
from tests.files_below import files_below
from tests.kv_transfer.harness import (
    BLOCK_SIZE,
    FINGERPRINT,
    LAYOUT,
    NUM_FULL,
    NUM_PAGES,
    PROMPT,
    Core,
    reader_of,
    writer_of,
)
from tests.kv_transfer.memory_store import MemoryStore


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SharedStorage]:
    store = SharedStorage(tmp_path / "store", capacity_bytes=1 << 30)
    yield store
    store.close()


def flip(path: Path, others: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def flip_header(path: Path, others: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    content[90] ^= 1
    path.write_bytes(content)


def truncate(path: Path, others: list[Path]) -> None:
    os.truncate(path, HEADER_BYTES)


def empty(path: Path, others: list[Path]) -> None:
    os.truncate(path, 0)


def remove(path: Path, others: list[Path]) -> None:
    path.unlink()


def swap(path: Path, others: list[Path]) -> None:
    content = others[0].read_bytes()
    others[0].write_bytes(path.read_bytes())
    path.write_bytes(content)


def link(path: Path, others: list[Path]) -> None:
    path.unlink()
    path.symlink_to(others[0])


def fifo(path: Path, others: list[Path]) -> None:
    path.unlink()
    os.mkfifo(path)


def bad_sector(path: Path, others: list[Path]) -> None:
    """Its inode's number is not given to another file while it is open."""
    BAD_FILES.append(os.open(path, os.O_RDONLY))


BAD_FILES: list[int] = []


@pytest.fixture
def sectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reads of BAD_FILES fail."""
    preadv = os.preadv

    def read(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if any(os.path.sameopenfile(descriptor, bad) for bad in BAD_FILES):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    yield
    while BAD_FILES:
        os.close(BAD_FILES.pop())


@pytest.mark.usefixtures("sectors")
@pytest.mark.parametrize("damage", [flip, flip_header, truncate, empty, remove, swap, link, fifo, bad_sector])
@pytest.mark.parametrize("index", [0, 2, NUM_FULL])
def test_damage_costs_a_recompute_and_never_a_wrong_block(
    folder: SharedStorage, tmp_path: Path, damage: Callable[[Path, list[Path]], None], index: int
) -> None:
    key = tmp_path / "key"
    secret = ensure_secret(key)
    options: dict[str, Any] = {"kv_secret_file": str(key)}
    prefill, decode = Core(folder, **options), Core(folder, **options)
    request, reader = writer_of(), reader_of()
    prefill.prefill(request)
    # STEP one page is damaged (a swap takes the last two)
    naming = PageNaming.of(FINGERPRINT, LAYOUT, secret)
    hashes = naming.block_hashes(request)
    names = [naming.full_block(hashes, request.root_hash, number) for number in range(NUM_FULL)]
    names.append(naming.tail(request, hashes, "transfer"))
    paths = [folder.path.joinpath(*name.key.parts) for name in names]
    assert sorted(paths) == files_below(folder.path)
    other = NUM_FULL - 1 if index != NUM_FULL - 1 else NUM_FULL
    damage(paths[index], [paths[other]])
    # STEP what precedes it is used
    decode.reserve(reader)
    result = decode.complete(reader)
    first_bad = min(index, other) if damage is swap else index
    assert result.num_verified_tokens == first_bad * BLOCK_SIZE
    assert result.num_recomputed_blocks == NUM_PAGES - first_bad
    assert decode.has(reader, result.num_verified_tokens)
    assert sum(decode.connector.counters.loaded.failures.values()) >= 1
    assert not decode.connector._io.load_breaker.is_open
    # STEP what is bad has gone from the folder, and the next request heals it
    again = writer_of(request_id="again", transfer_id="again")
    prefill.prefill(again)
    prefill.wait(lambda: prefill.events[-1].transfer_id == "again" and prefill.events[-1].num_tokens is not None)
    healed = reader_of(request_id="again", transfer_id="again")
    decode.reserve(healed)
    if damage is not swap:
        assert decode.complete(healed).num_verified_tokens == len(PROMPT)
        assert decode.has(healed, len(PROMPT))


def test_all_damage_is_gone_after_one_request_has_met_the_first_of_it(folder: SharedStorage, tmp_path: Path) -> None:
    secret = ensure_secret(tmp_path / "key")
    prefill, decode = (Core(folder, kv_secret_file=str(tmp_path / "key")) for _ in range(2))
    request, reader = writer_of(), reader_of()
    prefill.prefill(request)
    naming = PageNaming.of(FINGERPRINT, LAYOUT, secret)
    hashes = naming.block_hashes(request)
    names = [naming.full_block(hashes, request.root_hash, index) for index in range(NUM_FULL)]
    paths = [folder.path.joinpath(*name.key.parts) for name in names]
    for index in (1, 2, 4):
        flip(paths[index], [])
    decode.reserve(reader)
    decode.ready(reader, 2)  # the others are not even announced when the first is met
    assert decode.result(reader).num_verified_tokens == BLOCK_SIZE
    decode.wait(lambda: [path.exists() for path in paths] == [True, False, False, True, False])


def test_pages_sealed_with_another_key_are_rejected(folder: SharedStorage, tmp_path: Path) -> None:
    prefill, decode = (Core(folder, kv_secret_file=new_secret(tmp_path / name)) for name in ("theirs", "mine"))
    prefill.prefill(writer_of())
    (theirs,) = (folder.path / "v1").iterdir()
    mine = PageNaming.of(FINGERPRINT, LAYOUT, load_secret(tmp_path / "mine")).space
    theirs.rename(theirs.with_name(mine[:8].hex()))  # a writer without the key copies them to where they are read
    reader = reader_of()
    decode.reserve(reader)
    assert decode.complete(reader).num_verified_tokens == 0
    assert decode.connector.counters.loaded.failures["page_digest"] >= 1


def test_stacks_with_different_keys_share_a_store_and_each_gets_its_own_pages(
    folder: SharedStorage, tmp_path: Path
) -> None:
    files = [new_secret(tmp_path / name) for name in ("one", "other")]
    stacks = [[Core(folder, kv_secret_file=file) for _ in range(2)] for file in files]
    for round_number in range(2):
        for number, (prefill, decode) in enumerate(stacks):
            transfer: dict[str, Any] = {
                "request_id": f"r{round_number}",
                "transfer_id": f"t{round_number}",
            }  # the same in both stacks
            prefill.prefill(writer_of(**transfer))
            reader = reader_of(**transfer)
            decode.reserve(reader)
            assert decode.complete(reader).num_verified_tokens == len(PROMPT)
            assert decode.has(reader, len(PROMPT))
            num_full = len([path for path in files_below(folder.path) if "transfers" not in path.parts])
            assert num_full == NUM_FULL * (number + 1 if round_number == 0 else 2)
    for prefill, decode in stacks:
        assert prefill.connector.counters.num_shared_blocks == NUM_FULL, "the second time they are there"
        assert not decode.connector.counters.loaded.failures


def test_names_do_not_contain_the_key() -> None:
    key = bytes(range(32))
    keyed, plain = PageNaming.of(FINGERPRINT, LAYOUT, key), PageNaming.of(FINGERPRINT, LAYOUT)
    assert plain.space == FINGERPRINT, "without a key names are the fingerprint's"
    assert keyed.space == PageNaming.of(FINGERPRINT, LAYOUT, key).space
    assert keyed.private_page().spec.fingerprint == FINGERPRINT
    assert keyed.space not in (FINGERPRINT, key, PageNaming.of(FINGERPRINT, LAYOUT, bytes(32)).space)


def new_secret(path: Path) -> str:
    ensure_secret(path)
    return str(path)


def options_of(tmp_path: Path, **options: str | int | float | bool) -> dict[str, str | int | float | bool]:
    ensure_secret(tmp_path / "key")
    return {"path": str(tmp_path / "store"), "kv_secret_file": str(tmp_path / "key"), **options}


def test_engine_builds_the_connector_by_its_class_path(tmp_path: Path) -> None:
    config = KVConnectorConfig(
        class_path="kv_transfer.stores.files:SharedStorageConnector",
        options=options_of(tmp_path, num_io_threads="3"),
    )
    connector = make_connector(config, lambda: None)
    assert isinstance(connector, SharedStorageConnector)
    assert connector.name == "shared_storage"
    connector.register_kv_cache(Core(MemoryStore()).kv, LAYOUT, FINGERPRINT)
    connector.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_byte": 1}, "unknown field `capacity_byte`"),
        ({"capacity_bytes": 0}, "capacity_bytes is 0; it must be greater than 0"),
        ({"load_timeout_s": "nan"}, "load_timeout_s is nan; it must be greater than 0 and finite"),
        ({"shutdown_timeout_s": float("inf")}, "shutdown_timeout_s is inf; it must be greater than 0 and finite"),
        ({"scan_interval_s": 1e10}, r"scan_interval_s is 1e\+10; it must be at most 1e\+09"),
        ({"num_io_threads": "many"}, "num_io_threads"),
        ({"tail_max_age_s": 10.0}, r"tail_max_age_s is 10\.0; it must not be less than max_lease_s"),
        ({"kv_secret_file": ""}, "kv_secret_file is not set"),
        ({"kv_secret_file": "/nonexistent/key"}, "openssl rand"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, str | int | float | bool], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        SharedStorageConnector(wake=lambda: None, **{**options_of(tmp_path), **options})


@pytest.mark.parametrize("wrong", [{"kv_secret_file": ""}, {"save": False}])
def test_a_connector_that_cannot_be_made_leaves_no_thread(tmp_path: Path, wrong: dict[str, Any]) -> None:
    before = set(threading.enumerate())
    with pytest.raises(EngineError):
        SharedStorageConnector(wake=lambda: None, **{**options_of(tmp_path), **wrong})
    assert {thread for thread in threading.enumerate() if thread.is_alive()} <= before


def test_shutdown_waits_for_saves_and_removes_what_is_private(folder: SharedStorage) -> None:
    prefill = Core(folder)
    request = writer_of()
    prefill.prefill(request)
    assert len(files_below(folder.path)) == NUM_PAGES
    prefill.connector.shutdown()
    assert len(files_below(folder.path)) == NUM_FULL


def test_a_disk_that_cannot_be_read_loses_no_chain_of_pages(
    folder: SharedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = Core(folder), Core(folder)
    request, reader = writer_of(), reader_of()
    prefill.prefill(request)
    num_written, num_reads = len(files_below(folder.path)), 0

    def read(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal num_reads
        num_reads += 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", read)
    decode.reserve(reader)
    decode.complete(reader)
    for _ in range(2 * NUM_PAGES):  # an inspection submits the next one
        done = threading.Event()
        decode.connector._threads.submit(done.set)
        assert done.wait(60)
    assert num_reads >= 3  # then the breaker opens; as many threads as there are may read before, and an inspection
    assert len(files_below(folder.path)) == num_written - 2, "two could have been bad sectors"
