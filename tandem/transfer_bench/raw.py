"""The ceilings: what a medium gives to the plainest loop there is, into memory that is ready.

Each reads the pages that a connector reads in the same round, into the same KV memory, and returns the seconds it took.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from engine.messages import TransferEvent
from kv_transfer.nixl_agent import NixlAgent, Region
from kv_transfer.nixl_metadata import TransferMetadata
from kv_transfer.nixl_ucx import UcxSettings
from kv_transfer.page import HEADER_BYTES
from kv_transfer.redis_dial import RedisAddress, RedisLogin, set_receive_buffer, tls_context
from kv_transfer.redis_wire import encode
from kv_transfer.store import PageKey
from tandem.transfer_bench.half import Shape, TransferFailed, as_bytes

_MAC_BYTES = 32
_PAUSE_S = 1e-4


class Raw(Protocol):
    """One way to read without a connector. Belongs to one thread."""

    name: str

    def read(self, keys: Sequence[PageKey], events: Sequence[TransferEvent]) -> float:
        """Read these pages into the first blocks; returns seconds."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class RawFiles:
    """open, read, close: one file after another."""

    name = "raw: read the files"

    def __init__(self, path_of: Callable[[PageKey], Path], shape: Shape, kv: torch.Tensor) -> None:
        self._path_of = path_of
        self._pages = _pages(shape, kv)
        self._header = bytearray(HEADER_BYTES)

    def read(self, keys: Sequence[PageKey], events: Sequence[TransferEvent]) -> float:
        paths = [self._path_of(key) for key in keys]
        started = time.perf_counter()
        for path, page in zip(paths, self._pages, strict=False):
            descriptor = os.open(path, os.O_RDONLY)
            num_read = os.readv(descriptor, [self._header, page])
            os.close(descriptor)
            if num_read != HEADER_BYTES + len(page):
                raise TransferFailed("a file was read in part")
        return time.perf_counter() - started

    def close(self) -> None:
        return None


class RawRedis:
    """GET and recv_into, one value after another, on one connection."""

    def __init__(
        self, url: str, login: RedisLogin, prefix: str, shape: Shape, kv: torch.Tensor, *, is_tuned: bool
    ) -> None:
        self.name = "raw: GET, 4 MB socket buffer" if is_tuned else "raw: GET, recv_into"
        self._prefix = prefix
        self._pages = _pages(shape, kv)
        self._head = memoryview(bytearray(len(b"$%d\r\n" % (HEADER_BYTES + shape.block_bytes)) + HEADER_BYTES))
        self._end = memoryview(bytearray(2))
        address = RedisAddress.parse(url)
        family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.settimeout(10.0)
        if is_tuned:
            set_receive_buffer(self._socket)
        self._socket.connect(where)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.tls:
            self._socket = tls_context().wrap_socket(self._socket, server_hostname=address.host)
        if (password := login.password()) is not None:
            self._command("AUTH", login.username, password)
        self._command("SELECT", address.db)

    def read(self, keys: Sequence[PageKey], events: Sequence[TransferEvent]) -> float:
        requests = [encode("GET", f"{self._prefix}:{'/'.join(key.parts)}") for key in keys]
        started = time.perf_counter()
        for request, page in zip(requests, self._pages, strict=False):
            self._socket.sendall(request)
            for view in (self._head, page, self._end):
                self._fill(view)
        return time.perf_counter() - started

    def close(self) -> None:
        self._socket.close()

    def _fill(self, view: memoryview) -> None:
        num_filled = 0
        while num_filled < len(view):
            num_received = self._socket.recv_into(view[num_filled:])
            if not num_received:
                raise TransferFailed("the raw connection was closed")
            num_filled += num_received

    def _command(self, *words: str | int | bytes) -> None:
        self._socket.sendall(encode(*words))
        answer = b""
        while not answer.endswith(b"\r\n"):
            answer += self._socket.recv(4096)
        if not answer.startswith(b"+"):
            raise TransferFailed("the raw connection was refused")


class RawNixl:
    """One transfer of all pages, posted and polled: what the library does by itself."""

    name = "raw: bare nixl read"

    def __init__(self, settings: UcxSettings, shape: Shape, kv: torch.Tensor) -> None:
        region = Region("DRAM", 0, kv.data_ptr(), shape.block_bytes, shape.num_blocks)
        self._agent = NixlAgent(f"bare-{os.urandom(8).hex()}", settings)
        self._agent.register(region)
        self._ours = self._agent.prepare(region)
        self._theirs: dict[str, int] = {}

    def read(self, keys: Sequence[PageKey], events: Sequence[TransferEvent]) -> float:
        encoded = next(event.connector_metadata for event in events if event.connector_metadata)
        metadata = msgspec.msgpack.decode(encoded[_MAC_BYTES:], type=TransferMetadata)
        if metadata.agent_name not in self._theirs:
            name = self._agent.add_peer(metadata.agent_metadata)
            self._theirs[name] = self._agent.prepare(metadata.pages, name)
        block_ids = metadata.block_ids
        started = time.perf_counter()
        transfer = self._agent.read(self._ours, range(len(block_ids)), self._theirs[metadata.agent_name], block_ids)
        is_done = self._agent.post(transfer)
        while not is_done:
            time.sleep(_PAUSE_S)
            is_done = self._agent.is_done(transfer)
        duration_s = time.perf_counter() - started
        self._agent.release(transfer)
        return duration_s

    @property
    def transport(self) -> str:
        """What UCX chose, in its words."""
        return self._agent.transport

    def close(self) -> None:
        for name, handle in self._theirs.items():
            self._agent.release_list(handle)
            self._agent.remove_peer(name)
        self._agent.release_list(self._ours)
        with contextlib.suppress(Exception):
            self._agent.close()


def _pages(shape: Shape, kv: torch.Tensor) -> list[memoryview]:
    memory = as_bytes(kv).numpy().data
    size = shape.block_bytes
    return [memory[index * size : (index + 1) * size] for index in range(shape.num_blocks)]
