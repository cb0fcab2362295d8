"""Pages in an `lmcache server` that runs kv_transfer/stores/lmcache/server_module.py. Needs no LMCache in the instance.
Also the names of pages, there and in LMCache's folder.

    no link ─▶ connecting ─▶ idle ⇄ with one request ─▶ late, reset, protocol error: closed, with what was not sent
                   │ refused, or too late                   the next request makes another link
                   └─▶ StoreError

    request    uid │ "server_module_call" │ {method, payload: length of the head (4 bytes) ∙ head ∙ page}
    answer     uid │ "server_module_call" │ {success, payload: status (1 byte) ∙ page, error}

Frames of ZMQ, each but the payload MessagePack. Whole pages go through the socket: LMCache's own engines copy into the
server's shared memory, where one that was stopped for long could write into what has become another's object.
Nothing here is pickled. Both sides check numbers and names before anything is reserved.

LMCache's own client is not used: its one thread sends for all callers without a deadline, and once 1000 messages are
queued for a server that is gone it stands still, with every request and `close` behind it. A link is one socket used by
one thread at a time; its monitor reports at once that the server has gone. A page is copied out of a whole answer:
nothing of a late answer ever gets to KV memory.
"""

from __future__ import annotations

import contextlib
import math
import queue
import re
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.errors import EngineError, shown
from kv_transfer.page.format import Buffer, PageKey
from kv_transfer.stores.base import (
    KEEPALIVE_IDLE_S,
    KEEPALIVE_INTERVAL_S,
    KEEPALIVE_PROBES,
    BadValue,
    OutageLog,
    StoreError,
)

if TYPE_CHECKING:
    from kv_transfer.stores.lmcache.connector import LMCacheOptions

PROTOCOL_VERSION = 1
MAX_VALUE_BYTES = 256 << 20
OPERATION = "server_module_call"
PUT, GET, CONTAINS, DELETE = ("tandem_kv.put", "tandem_kv.get", "tandem_kv.contains", "tandem_kv.delete")
_LENGTH = struct.Struct(">I")
_MODEL = "tandem-v1-"
_TANDEM_MODEL = re.compile(_MODEL + "[0-9a-f]{16}")
_SALT = re.compile("[0-9a-f]{64}")
_HASH_BYTES = 32
_MAX_HEAD_BYTES = 1024
_URL = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_IP = re.compile(r"\[.*\]|[0-9.]+")
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Names a page in LMCache: the parts of its ObjectKey that differ between pages; rank and object group are 0.

        PageKey ─▶ ObjectName(model "tandem-v1-<space>", chunk hash = block hash, salt = scope of a tail)
                     ├─▶ ObjectKey of lmcache.v1.distributed     └─▶ <model>@0x00000000@0@<hash>[@<salt>].data, its file

    All names are hex digits of hashes: no string of a user is ever in one. LMCache splits names at `@`, which none of
    these contains. Pages of other engines have the models' names in place of "tandem-v1-…", so that they can share a
    place.
    """

    model_name: str
    chunk_hash: bytes
    cache_salt: str = ""

    @classmethod
    def of(cls, key: PageKey) -> ObjectName:
        return cls(_MODEL + key.space[:8].hex(), key.block_hash, key.scope.hex())

    @property
    def is_valid(self) -> bool:
        """It could be the name of a page: for a server, which receives names."""
        return (
            _TANDEM_MODEL.fullmatch(self.model_name) is not None
            and len(self.chunk_hash) == _HASH_BYTES
            and (not self.cache_salt or _SALT.fullmatch(self.cache_salt) is not None)
        )

    @property
    def file_name(self) -> str:
        """The file that fs_native makes of it, relative to its folder."""
        salt = f"@{self.cache_salt}" if self.cache_salt else ""
        return f"{self.model_name}@0x00000000@0@{self.chunk_hash.hex()}{salt}.data"


class LMCacheServer:
    """Implements kv_transfer.stores.base.BlockStore."""

    name = "lmcache"

    def __init__(self, options: LMCacheOptions) -> None:
        matched = _URL.fullmatch(options.url)
        if matched is None or not 0 < int(matched[2]) < 65536:
            raise EngineError(f"lmcache url {shown(options.url)}: tcp://host:port of an `lmcache server` is expected")
        self._options = options
        self._is_ip = _IP.fullmatch(matched[1]) is not None
        self._prefers_ipv6 = True
        self._context = zmq.Context(io_threads=1)
        self._idle: queue.LifoQueue[_Link] = queue.LifoQueue()
        self._outages = OutageLog(f"lmcache server at {options.url}")

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        self._call(PUT, ObjectName.of(key), sum(map(len, buffers)), buffers)

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        num_bytes = sum(map(len, buffers))
        page = self._call(GET, ObjectName.of(key), num_bytes)
        if page is None:
            return False
        if len(page) != num_bytes:
            raise BadValue("size")
        for index, buffer in enumerate(buffers):
            memoryview(buffer).cast("B")[:] = page[: len(buffer)]
            page = page[len(buffer) :]
            if index == 0:
                check()
        return True

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        try:
            return self._call(CONTAINS, ObjectName.of(key), num_bytes) is not None
        except BadValue:
            return False

    def delete(self, key: PageKey) -> None:
        if self._outages.failed_within(self._options.breaker_retry_s):
            raise StoreError("down")  # removing tails must not hold up the end of an instance
        self._call(DELETE, ObjectName.of(key), 0)

    def close(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()
        # ZMQ's end waits for its thread, which may be looking up a name.
        thread = threading.Thread(target=self._context.term, name="kv-lmcache-close", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _call(self, method: str, name: ObjectName, num_bytes: int, buffers: Sequence[Buffer] = ()) -> memoryview | None:
        """The page that came with OK, empty where none belongs to the answer; None: missing."""
        if num_bytes > MAX_VALUE_BYTES:
            raise StoreError("too_large")
        timeout_s = self._options.timeout_s + num_bytes / self._options.min_bytes_per_s
        head = Head(PROTOCOL_VERSION, name.model_name, name.chunk_hash, name.cache_salt, num_bytes, timeout_s)
        try:
            link = self._link()
            try:
                status, page = link.exchange(method, head, buffers, time.monotonic() + timeout_s)
            except BaseException:
                link.close()
                raise
        except (StoreError, zmq.ZMQError) as error:
            failure = error if isinstance(error, StoreError) else StoreError("zmq")
            self._outages.note_failure(failure.reason)
            raise failure from error
        self._idle.put(link)
        self._outages.note_answer()
        if status == Status.BAD_VALUE:
            raise BadValue("size")
        if status not in (Status.OK, Status.MISSING):
            raise StoreError(status.name.lower())
        return page if status == Status.OK else None

    def _link(self) -> _Link:
        while True:
            try:
                link = self._idle.get_nowait()
            except queue.Empty:
                return self._connect()
            if link.is_good:
                return link
            link.close()

    def _connect(self) -> _Link:
        """Of a name ZMQ dials one address: with IPv6 the first of that family if it has any. Where the server does not
        accept there, the other family is tried, and is the first one of the next connection."""
        deadline = time.monotonic() + self._options.connect_timeout_s
        try:
            return _Link(self._context, self._options.url, deadline, ipv6=self._prefers_ipv6)
        except StoreError as error:
            if self._is_ip:
                raise
            self._prefers_ipv6 = not self._prefers_ipv6
            if error.reason != "refused":
                raise
            with contextlib.suppress(StoreError):
                return _Link(self._context, self._options.url, deadline, ipv6=self._prefers_ipv6)
            raise


class _Link:
    """One connection; one thread at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], url: str, deadline: float, *, ipv6: bool) -> None:
        self._number = 0
        self._socket = context.socket(zmq.DEALER)
        self._monitor = None
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a server that is not there
            self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_VALUE_BYTES + 4096)
            self._socket.setsockopt(zmq.IPV6, int(ipv6))
            self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
            self._monitor = self._socket.get_monitor_socket(_GONE)
            self._monitor.setsockopt(zmq.LINGER, 0)
            self._socket.connect(url)
            self._wait(zmq.POLLOUT, deadline, late="connect_timeout")
        except BaseException:
            self.close()
            raise

    @property
    def is_good(self) -> bool:
        """Its monitor has not reported an end."""
        return self._monitor is not None and not self._monitor.poll(0)

    def exchange(
        self, method: str, head: Head, buffers: Sequence[Buffer], deadline: float
    ) -> tuple[Status, memoryview]:
        """Raises StoreError; the link must be closed then."""
        self._number += 1
        self._wait(zmq.POLLOUT, deadline)
        self._socket.send_multipart(request_frames(self._number, method, head, buffers), zmq.DONTWAIT, copy=False)
        while True:
            self._wait(zmq.POLLIN, deadline)
            frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            answer = parse_answer([frame.buffer for frame in frames], self._number)
            if answer is not None:
                return answer

    def close(self) -> None:
        self._socket.disable_monitor()
        if self._monitor is not None:
            self._monitor.close(0)
        self._socket.close(0)

    def _wait(self, event: int, deadline: float, *, late: str = "timeout") -> None:
        poller = zmq.Poller()
        poller.register(self._socket, event)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000))))
        if self._socket in ready:
            return
        if ready and self._monitor is not None:
            message = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            raise StoreError("reset" if message["event"] == zmq.EVENT_DISCONNECTED else "refused")
        raise StoreError(late)


class Status(IntEnum):
    """How a request ended at the server."""

    OK = 0
    MISSING = 1
    BAD_VALUE = 2
    FULL = 3
    """No memory: LMCache evicts once a second."""
    BUSY = 4
    """Another request holds the page."""
    LATE = 5
    """LMCache's storage did not end the task in time."""
    REFUSED = 6
    """No valid request, or of another protocol version."""


class Head(msgspec.Struct, array_like=True, frozen=True):
    """What a request is about."""

    version: int
    model_name: str
    chunk_hash: bytes
    cache_salt: str
    num_bytes: int
    """Length of the value: put and get."""
    timeout_s: float
    """How long the client will wait; the server should have answered by then."""


class _Answer(msgspec.Struct, frozen=True):
    """LMCache's ServerModuleCallResponse, the page left where it is."""

    success: bool
    payload: memoryview
    error: str


_heads = msgspec.msgpack.Decoder(Head)
_answers = msgspec.msgpack.Decoder(_Answer)


def request_frames(number: int, method: str, head: Head, buffers: Sequence[Buffer] = ()) -> list[bytes]:
    """The frames of a request. The envelope is written by hand, so that the page is copied once."""
    packed = msgspec.msgpack.encode(head)
    start = _LENGTH.pack(len(packed)) + packed
    num_bytes = len(start) + sum(len(buffer) for buffer in buffers)
    envelope = b"\x82\xa6method" + msgspec.msgpack.encode(method) + b"\xa7payload\xc6" + _LENGTH.pack(num_bytes)
    body = b"".join([envelope, start, *buffers])
    return [msgspec.msgpack.encode(number), msgspec.msgpack.encode(OPERATION), body]


def parse_request(payload: bytes) -> tuple[Head, memoryview] | None:
    """Head and page as the server gets them; None: invalid."""
    view = memoryview(payload)
    if len(view) < _LENGTH.size:
        return None
    (head_len,) = _LENGTH.unpack_from(view)
    if head_len > min(_MAX_HEAD_BYTES, len(view) - _LENGTH.size):
        return None
    start = _LENGTH.size + head_len
    try:
        head = _heads.decode(view[_LENGTH.size : start])
    except msgspec.MsgspecError:
        return None
    is_named = ObjectName(head.model_name, head.chunk_hash, head.cache_salt).is_valid
    if head.version != PROTOCOL_VERSION or not 0 <= head.num_bytes <= MAX_VALUE_BYTES or not is_named:
        return None
    return head, view[start:]


def parse_answer(frames: Sequence[Buffer], number: int) -> tuple[Status, memoryview] | None:
    """Status and page; None: the answer to another request. Raises StoreError if it is invalid."""
    try:
        if len(frames) < 2 or msgspec.msgpack.decode(frames[0], type=int) != number:
            return None
        answer = _answers.decode(frames[2])
        if not answer.success:
            raise StoreError("no_module" if answer.error.startswith("unknown server module method") else "server")
        return Status(answer.payload[0]), answer.payload[1:]
    except (msgspec.MsgspecError, IndexError, ValueError) as error:
        raise StoreError("protocol") from error
