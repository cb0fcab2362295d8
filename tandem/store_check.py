"""Moves KV blocks through the shared-storage store, in its real page format, and says how fast it was."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kv_transfer.page import HEADER_BYTES, PageSpec, check_header, check_payload, seal
from kv_transfer.shared_storage import SharedStorage
from kv_transfer.store import PageKey


@dataclass(frozen=True, slots=True)
class StoreSpeed:
    """What was moved, and how fast: 1 GB is 10^9 bytes."""

    num_blocks: int
    block_bytes: int
    write_gb_s: float
    read_gb_s: float


def move_blocks(num_blocks: int = 32, block_bytes: int = 2 << 20, rounds: int = 2) -> StoreSpeed:
    """Writes blocks, reads them back, verifies their digests; the best of some rounds: the first finds cold memory.

    Raises what the store or the page format raises.
    """
    pages = [os.urandom(block_bytes) for _ in range(num_blocks)]
    with tempfile.TemporaryDirectory(prefix="tandem-doctor-") as folder:
        store = SharedStorage(Path(folder), capacity_bytes=2 * rounds * num_blocks * block_bytes)
        try:
            times = [_move(store, pages, first=index * num_blocks) for index in range(rounds)]
        finally:
            store.close()
    gigabytes = num_blocks * block_bytes / 1e9
    write_s, read_s = (min(column) for column in zip(*times, strict=True))
    return StoreSpeed(num_blocks, block_bytes, gigabytes / write_s, gigabytes / read_s)


def _move(store: SharedStorage, pages: list[bytes], first: int) -> tuple[float, float]:
    """Seconds that writing and reading `pages` took."""
    key, epoch = secrets.token_bytes(32), os.urandom(16)
    specs = [_spec(first + index, len(page)) for index, page in enumerate(pages)]
    header, payload = bytearray(HEADER_BYTES), bytearray(len(pages[0]))
    started_s = time.perf_counter()
    for spec, page in zip(specs, pages, strict=True):
        store.put(_key(spec), [seal(spec, page, key=key, writer_epoch=epoch), page])
    written_s = time.perf_counter()
    for spec in specs:
        if not store.get_into(_key(spec), [header, payload], partial(check_header, header, spec, digest=True)):
            raise OSError("a block that was written a moment ago is gone")
        check_payload(header, payload, spec, key=key)
    return written_s - started_s, time.perf_counter() - written_s


def _spec(index: int, block_bytes: int) -> PageSpec:
    """A page that no model has."""
    return PageSpec(
        fingerprint=b"doctor".ljust(32, b"\0"),
        layout_digest=bytes(32),
        block_hash=index.to_bytes(32, "little"),
        parent_hash=bytes(32),
        num_tokens=16,
        payload_bytes=block_bytes,
    )


def _key(spec: PageSpec) -> PageKey:
    return PageKey(spec.fingerprint, spec.block_hash)
