"""What every BlockStore promises, on one header and page."""

from __future__ import annotations

import contextlib
import hashlib
import socket

import pytest

from kv_transfer.page.format import PageKey
from kv_transfer.stores.base import BadValue, BlockStore

FINGERPRINT = hashlib.sha256(b"a model").digest()
HEADER, PAGE = b"h" * 256, b"p" * 4096
NUM_BYTES = len(HEADER) + len(PAGE)


def key_of(number: int, *, transfer: str = "") -> PageKey:
    scope = hashlib.sha256(transfer.encode()).digest() if transfer else b""
    return PageKey(FINGERPRINT, hashlib.sha256(str(number).encode()).digest(), scope)


def read(store: BlockStore, key: PageKey, num_bytes: int = len(PAGE)) -> tuple[bytes, bytes] | None:
    header, page = bytearray(len(HEADER)), bytearray(num_bytes)
    return (bytes(header), bytes(page)) if store.get_into(key, (header, page), lambda: None) else None


def check_keepalive(connection: socket.socket) -> None:
    """Of an idle connection to a store."""
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle_s, interval_s, num_probes = [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    assert idle_s <= 60, "clouds forget a connection after some minutes"
    assert idle_s + interval_s * num_probes <= 120, "a connection that was lost is closed before it is used"


def check_contract(store: BlockStore) -> None:
    """A value of another length may also be no value."""
    for key in (key_of(1), key_of(1, transfer="../../etc/passwd\0/\n@")):
        assert read(store, key) is None
        assert not store.contains(key, NUM_BYTES)
        store.delete(key)
        store.put(key, (HEADER, PAGE))
        assert store.contains(key, NUM_BYTES)
        assert read(store, key) == (HEADER, PAGE)
        for num_bytes in (len(PAGE) - 1, len(PAGE) + 1):
            assert not store.contains(key, len(HEADER) + num_bytes)
            with contextlib.suppress(BadValue):
                assert read(store, key, num_bytes) is None
        assert read(store, key) == (HEADER, PAGE), "a read of a wrong length breaks later reads"
        store.put(key, (HEADER, PAGE[::-1]))
        store.put(key, (HEADER[::-1], memoryview(b"q" * len(PAGE))))
        assert read(store, key) == (HEADER[::-1], b"q" * len(PAGE)), "the last writer wins"
        check_header_first(store, key)
        store.delete(key)
        store.delete(key)
        assert read(store, key) is None
        assert not store.contains(key, NUM_BYTES)


def check_header_first(store: BlockStore, key: PageKey) -> bytes:
    """An error that the check of the header raises ends the read, and no later one. Returns what the page has then."""
    header, page = bytearray(len(HEADER)), bytearray(len(PAGE))

    def refuse() -> None:
        assert any(header)
        raise ValueError("no")

    before = read(store, key)
    with pytest.raises(ValueError, match="no"):
        store.get_into(key, (header, page), refuse)
    assert read(store, key) == before
    return bytes(page)
