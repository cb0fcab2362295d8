"""The media of `tandem bench transfer`: one class for each connector, and raw readers as the ceiling of each.

A medium is opened (`with medium.opened(...)`), makes any number of connector configurations and raw readers, and
removes what was stored: pages as soon as their round is over, the rest at the end, also after Ctrl-C.

A raw reader is the plainest loop that the medium allows. It reads the pages that a connector reads in the same round
into the same KV memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import redis
import torch

from engine.config import KVConnectorConfig
from engine.core.messages import TransferEvent
from engine.errors import EngineError
from engine.imports import child_environment
from engine.machine import file_system
from instance.settings import CONNECTORS
from kv_transfer.nixl.agent import NixlAgent, Region, UcxSettings, load_bindings
from kv_transfer.nixl.transfers import MAC_BYTES, TransferMetadata
from kv_transfer.page.format import HEADER_BYTES, PageKey
from kv_transfer.secret import ensure_secret, load_secret
from kv_transfer.stores.base import BlockStore, StoreError
from kv_transfer.stores.files import SharedStorage
from kv_transfer.stores.lmcache import connector as lmcache_connector
from kv_transfer.stores.redis.connection import RECEIVE_BYTES, connection_failed
from kv_transfer.stores.redis.connector import RedisOptions, RedisStore, encode, make_endpoint
from tandem.bench.transfer.endpoint import Shape, TransferFailed, as_bytes
from tandem.connectors import ConnectorChoice, Options

INSTALL_REDIS = "apt-get install redis-server, or --kv-url redis://host:port/0 for a running one"
_SHUTDOWN_TIMEOUT_S = 1.0
_TTL_S = 300.0
"""Pages that a killed measurement leaves in a server expire after this."""
_TIMEOUTS: Options = {"connect_timeout_s": 5.0, "timeout_s": 5.0}
"""Of a store: long, so that a loaded machine is measured and not given up."""
_ROUNDS_IN_MEMORY = 8
_NIXL_POLL_S = 1e-4
_REDIS_START_TIMEOUT_S = 10.0
_BOUND_PROCESS = (
    "import os, sys; from serving.lifecycle import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)


RawReader = Callable[[Sequence[PageKey], Sequence[TransferEvent]], float]
"""Reads these pages into the first blocks without a connector; returns seconds. Belongs to one thread."""


class Medium:
    """One connector over one medium. As it stands: any connector of module:Class, with the given options alone."""

    goals: ClassVar[dict[str, float]] = {}
    """By digests "off" and "on": the share of the first raw reader that the connector must reach."""
    keeps_pages = False
    """A store: every round has its own pages."""
    num_connections = 1
    """How often a measurement connects anew, since a connection may be slow for its whole life."""

    def __init__(self, connector: str, options: Options | None = None) -> None:
        self.name = self.connector = connector
        self.options = options or {}
        self.folder: Path | None = None
        """The measurement's own, while the medium is open."""

    @property
    def has_digests(self) -> bool:
        """Whether `config` decides on digests; if not, the given options do, and both of its results are the same."""
        return self.connector in CONNECTORS

    @property
    def location(self) -> str:
        """Where the pages are or how they move, for the report."""
        return ""

    @contextlib.contextmanager
    def opened(self, shape: Shape) -> Iterator[None]:
        """Provides what the other methods need."""
        with self._own_folder(None):
            yield

    def config(self, digest: bool) -> KVConnectorConfig:
        """For one end: the given options, and those that only the measurement knows."""
        if not self.has_digests:
            return KVConnectorConfig(class_path=self.connector, options=self.options)
        defaults: Options = {"shutdown_timeout_s": _SHUTDOWN_TIMEOUT_S, **self._defaults()}
        if digest:
            assert self.folder is not None
            defaults["kv_secret_file"] = str(self.folder / "secret")
        options = {**defaults, **self.options, **self._location_options(), "digest": digest}
        return KVConnectorConfig(class_path=CONNECTORS[self.connector], options=options)

    def key(self, digest: bool) -> bytes | None:
        """What pages of such an end are named by. Raises EngineError."""
        file = self.config(digest).options.get("kv_secret_file")
        return load_secret(str(file)) if digest and file else None

    def raw_readers(self, shape: Shape, kv: torch.Tensor, stack: contextlib.ExitStack) -> dict[str, RawReader]:
        """The ceilings by name; shares are of the first one. They end with `stack`."""
        return {}

    def clear(self, keys: Sequence[PageKey]) -> None:
        """Removes these pages."""

    def _location_options(self) -> Options:
        return {}

    def _defaults(self) -> Options:
        """Those of a measurement, which given options replace."""
        return {}

    @contextlib.contextmanager
    def _own_folder(self, parent: Path | None) -> Iterator[Path]:
        """A private folder with the digests' key, which is `folder` meanwhile."""
        try:
            folder = tempfile.mkdtemp(prefix="tandem-transfer-", dir=parent)
        except OSError as error:
            raise EngineError(
                f"cannot create a folder in {parent or tempfile.gettempdir()}: {error.strerror}"
            ) from error
        self.folder = Path(folder)
        try:
            ensure_secret(self.folder / "secret")
            yield self.folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def medium_of(choice: ConnectorChoice, *, tls: str = "") -> Medium:
    """The medium of a connector as configured; `tls` is UCX_TLS for nixl."""
    options, url, folder = dict(choice.options), choice.kv_url, choice.kv_folder
    if choice.name == "nixl":
        return NixlMedium(options, tls=tls)
    if choice.name == "shared_storage":
        return SharedStorageMedium(options, parent=folder)
    if choice.name == "redis":
        return RedisMedium(options, url=url)
    if choice.name == "lmcache":
        return LMCacheMedium(options, parent=folder) if url is None else LMCacheServerMedium(options, url=url)
    given = {"url": url, "path": None if folder is None else str(folder)}
    return Medium(choice.name, options | {name: value for name, value in given.items() if value is not None})


class SharedStorageMedium(Medium):
    """Files in a private folder within `parent`."""

    keeps_pages = True
    goals: ClassVar[dict[str, float]] = {"off": 0.80, "on": 0.50}
    _store: type[SharedStorage] = SharedStorage

    def __init__(self, options: Options | None = None, *, parent: Path | None = None) -> None:
        super().__init__(self._store.name, options)
        self._parent = parent
        self._capacity_bytes = 1 << 30

    @property
    def location(self) -> str:
        folder = self._parent or Path(tempfile.gettempdir())
        return f"{folder} ({file_system(folder)})"

    @contextlib.contextmanager
    def opened(self, shape: Shape) -> Iterator[None]:
        if self._parent is None:
            self._parent = _default_folder(shape)
        elif not self._parent.is_dir():
            raise EngineError(f"there is no folder {self._parent}: mkdir -p {self._parent}, or another --kv-folder")
        self._capacity_bytes = _ROUNDS_IN_MEMORY * shape.num_bytes + (1 << 30)
        with self._own_folder(self._parent):
            yield

    def _defaults(self) -> Options:
        """Room for all rounds: the sweeper would remove pages that are about to be read."""
        return {"capacity_bytes": self._capacity_bytes}

    def raw_readers(self, shape: Shape, kv: torch.Tensor, stack: contextlib.ExitStack) -> dict[str, RawReader]:
        return {"raw: read the files": _raw_files(self.path_of, shape, kv)}

    def path_of(self, key: PageKey) -> Path:
        """The file of a full block."""
        folders, name = self._store.place(key)
        return self._pages.joinpath(*folders, name)

    def clear(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.path_of(key).unlink(missing_ok=True)

    @property
    def _pages(self) -> Path:
        assert self.folder is not None
        return self.folder / "pages"

    def _location_options(self) -> Options:
        return {"path": str(self._pages)}


class LMCacheMedium(SharedStorageMedium):
    """LMCache's files in a private folder within `parent`."""

    goals: ClassVar[dict[str, float]] = {}
    _store = lmcache_connector.LMCacheDisk


def _default_folder(shape: Shape) -> Path:
    """Shared memory if there is enough: the speed of a disk would hide the connector's."""
    shm = Path("/dev/shm")
    needed = _ROUNDS_IN_MEMORY * shape.num_bytes
    if shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > needed:
        return shm
    return Path(tempfile.gettempdir())


def _raw_files(path_of: Callable[[PageKey], Path], shape: Shape, kv: torch.Tensor) -> RawReader:
    """open, read, close: one file after another."""
    pages, header = _page_views(shape, kv), bytearray(HEADER_BYTES)

    def read(keys: Sequence[PageKey], events: Sequence[TransferEvent]) -> float:
        paths = [path_of(key) for key in keys]
        started_s = time.perf_counter()
        for path, page in zip(paths, pages, strict=False):
            descriptor = os.open(path, os.O_RDONLY)
            num_read = os.readv(descriptor, [header, page])
            os.close(descriptor)
            if num_read != HEADER_BYTES + len(page):
                raise TransferFailed("a file was read in part")
        return time.perf_counter() - started_s

    return read


class NixlMedium(Medium):
    """Memory of another process; `tls` is UCX_TLS, empty for UCX's own choice."""

    goals: ClassVar[dict[str, float]] = {"off": 0.80, "on": 0.60}

    def __init__(self, options: Options | None = None, *, tls: str = "") -> None:
        super().__init__("nixl", options)
        self.name = f"nixl/{tls}" if tls else "nixl"
        self._tls = tls
        self._raw: _RawNixl | None = None

    @property
    def location(self) -> str:
        return "UCX" if self._raw is None else f"UCX by {transport(self._raw.agent.transport)}"

    @contextlib.contextmanager
    def opened(self, shape: Shape) -> Iterator[None]:
        load_bindings()
        before = tempfile.tempdir
        with self._own_folder(None) as folder:
            tempfile.tempdir = str(folder)  # UCX writes its log there until its library is loaded
            try:
                yield
            finally:
                tempfile.tempdir = before

    def raw_readers(self, shape: Shape, kv: torch.Tensor, stack: contextlib.ExitStack) -> dict[str, RawReader]:
        tls, devices = (str(self.options.get(name, "")) for name in ("ucx_tls", "ucx_net_devices"))
        address = str(self.options.get("address", "127.0.0.1"))
        self._raw = _RawNixl(UcxSettings(self._tls or tls, devices, address), shape, kv)
        stack.callback(self._raw.close)
        return {"raw: bare nixl read": self._raw.read}

    def _location_options(self) -> Options:
        return {"ucx_tls": self._tls} if self._tls else {}


def transport(lanes: str) -> str:
    """The kind of transport that UCX chose, and then UCX's own description of it."""
    kinds = (("cuda_ipc", "NVLink"), ("rc_", "RDMA"), ("dc_", "RDMA"), ("cma", "CMA"), ("xpmem", "shared memory"))
    kind = next((kind for name, kind in kinds if name in lanes), "TCP" if "tcp" in lanes else "unknown")
    return f"{kind} [{' '.join(lanes.split())}]"


class _RawNixl:
    """One transfer of all pages, posted and polled."""

    def __init__(self, settings: UcxSettings, shape: Shape, kv: torch.Tensor) -> None:
        region = Region("DRAM", 0, kv.data_ptr(), shape.block_bytes, shape.num_blocks)
        self.agent = NixlAgent(f"bare-{os.urandom(8).hex()}", settings)
        self.agent.check_devices()
        self.agent.register(region)
        self._local = self.agent.prepare(region)
        self._remote: dict[str, int] = {}

    def read(self, keys: Sequence[PageKey], events: Sequence[TransferEvent]) -> float:
        encoded = next(event.connector_metadata for event in events if event.connector_metadata)
        metadata = msgspec.msgpack.decode(encoded[MAC_BYTES:], type=TransferMetadata)
        if metadata.agent_name not in self._remote:
            name = self.agent.add_peer(metadata.agent_metadata)
            self._remote[name] = self.agent.prepare(metadata.pages(num_layers=1), name)
        block_ids = metadata.block_ids
        started_s = time.perf_counter()
        remote = self._remote[metadata.agent_name]
        transfer = self.agent.make_read(self._local, range(len(block_ids)), remote, block_ids)
        is_done = self.agent.post(transfer)
        while not is_done:
            time.sleep(_NIXL_POLL_S)
            is_done = self.agent.is_done(transfer)
        duration_s = time.perf_counter() - started_s
        self.agent.release_read(transfer)
        return duration_s

    def close(self) -> None:
        for name, handle in self._remote.items():
            self.agent.release_list(handle)
            self.agent.remove_peer(name)
        self.agent.release_list(self._local)
        with contextlib.suppress(Exception):
            self.agent.close()


class LMCacheServerMedium(Medium):
    """An LMCache server, tcp://."""

    keeps_pages = True

    def __init__(self, options: Options | None = None, *, url: str) -> None:
        super().__init__("lmcache", options)
        self._url = url

    @property
    def location(self) -> str:
        return self._url

    def clear(self, keys: Sequence[PageKey]) -> None:
        options = self.config(digest=False).options
        lmcache_options = msgspec.convert(options, lmcache_connector.LMCacheOptions, strict=False)
        _delete(lmcache_connector.make_store(lmcache_options), keys)

    def _location_options(self) -> Options:
        return {"url": self._url}

    def _defaults(self) -> Options:
        return _TIMEOUTS


class RedisMedium(Medium):
    """A Redis at `url`, or without one a private server."""

    keeps_pages = True
    num_connections = 3
    goals: ClassVar[dict[str, float]] = {"off": 0.80, "on": 0.55}

    def __init__(self, options: Options | None = None, *, url: str | None = None) -> None:
        super().__init__("redis", options)
        self._given_url = url
        self._url = url or ""

    @property
    def location(self) -> str:
        return self._given_url or "a private server on loopback"

    @contextlib.contextmanager
    def opened(self, shape: Shape) -> Iterator[None]:
        with self._own_folder(None) as folder, contextlib.ExitStack() as stack:
            max_bytes = _ROUNDS_IN_MEMORY * shape.num_bytes + (256 << 20)
            self._url = self._given_url or stack.enter_context(_private_redis(folder, max_bytes))
            yield

    def raw_readers(self, shape: Shape, kv: torch.Tensor, stack: contextlib.ExitStack) -> dict[str, RawReader]:
        options = self.store_options()
        buffers = {"raw: GET, recv_into": 0, "raw: GET, 4 MB socket buffer": RECEIVE_BYTES}
        return {name: _raw_redis(options, shape, kv, stack, num_bytes) for name, num_bytes in buffers.items()}

    def clear(self, keys: Sequence[PageKey]) -> None:
        _delete(RedisStore(self.store_options()), keys)

    def store_options(self) -> RedisOptions:
        """The options as the connector reads them."""
        return msgspec.convert(self.config(digest=False).options, RedisOptions, strict=False)

    def _location_options(self) -> Options:
        return {"url": self._url}

    def _defaults(self) -> Options:
        return {"ttl_s": _TTL_S, "tail_ttl_s": _TTL_S, **_TIMEOUTS}


def installed_redis() -> str | None:
    """The path of a server's program, if there is one."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


@contextlib.contextmanager
def _private_redis(folder: Path, max_bytes: int) -> Iterator[str]:
    """The URL of a server on loopback, without persistence, that ends with the block. Raises EngineError."""
    program = installed_redis()
    if program is None:
        raise EngineError(f"no redis-server is installed: {INSTALL_REDIS}")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
    server += ["--appendonly", "no", "--maxmemory", str(max_bytes), "--maxmemory-policy", "noeviction"]
    process = subprocess.Popen(
        [sys.executable, "-c", _BOUND_PROCESS, str(os.getpid()), *server],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **child_environment()},
        process_group=0,
    )
    try:
        _wait_for_redis(port, process)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def _wait_for_redis(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _REDIS_START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            if connection.recv(16).startswith(b"+PONG"):
                return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise EngineError(f"the private redis-server did not start (status {process.poll()})")
        time.sleep(0.02)


def _raw_redis(
    options: RedisOptions, shape: Shape, kv: torch.Tensor, stack: contextlib.ExitStack, receive_bytes: int
) -> RawReader:
    """GET and recv_into, one value after another, on one connection. Raises ConnectionFailed."""
    pages = _page_views(shape, kv)
    head = memoryview(bytearray(len(b"$%d\r\n" % (HEADER_BYTES + shape.block_bytes)) + HEADER_BYTES))
    end = memoryview(bytearray(2))
    pool = make_endpoint(options).make_pool(receive_bytes=receive_bytes)
    stack.callback(pool.disconnect)
    try:
        connection: Any = pool.get_connection()
    except (OSError, redis.RedisError) as error:
        raise connection_failed(error) from error
    stream: socket.socket = connection._sock
    stream.settimeout(10.0)

    def read(keys: Sequence[PageKey], events: Sequence[TransferEvent]) -> float:
        # GETRANGE of all of it: an account has the permissions of the connector, which GET is not one of.
        requests = [encode("GETRANGE", f"{options.prefix}:{'/'.join(key.parts)}", 0, -1) for key in keys]
        started_s = time.perf_counter()
        for request, page in zip(requests, pages, strict=False):
            stream.sendall(request)
            for view in (head, page, end):
                _fill(view, stream)
        return time.perf_counter() - started_s

    return read


def _fill(view: memoryview, stream: socket.socket) -> None:
    num_filled = 0
    while num_filled < len(view):
        num_received = stream.recv_into(view[num_filled:])
        if not num_received:
            raise TransferFailed("the raw connection was closed")
        num_filled += num_received


def _page_views(shape: Shape, kv: torch.Tensor) -> list[memoryview]:
    memory = as_bytes(kv).numpy().data
    size = shape.block_bytes
    return [memory[index * size : (index + 1) * size] for index in range(shape.num_blocks)]


def _delete(store: BlockStore, keys: Sequence[PageKey]) -> None:
    """Best effort."""
    with contextlib.suppress(StoreError):
        for key in keys:
            store.delete(key)
    store.close()
