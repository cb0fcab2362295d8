"""Pages in an `lmcache server` that has our module (kv_transfer/lmcache_server_module.py). Needs no LMCache here.

    no link ─▶ connecting ─▶ idle ⇄ with one request ─▶ late, reset, nonsense: thrown away, what was not sent with it
                   │ refused, or too late                   the next request makes a new one
                   └─▶ StoreError

LMCache's own client is not used: its one thread for all sends without a deadline and stands still, with every request
and `close` behind it, once a server that is gone has 1000 messages queued. A link here is one socket used by one
thread at a time; its monitor says at once that the server has gone. A page is copied out of an answer that is whole:
nothing of a late answer ever gets to KV memory.
"""

from __future__ import annotations

import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.errors import EngineError, shown
from kv_transfer.lmcache_names import ObjectName
from kv_transfer.lmcache_tasks import scatter
from kv_transfer.lmcache_wire import (
    CONTAINS,
    DELETE,
    GET,
    MAX_VALUE_BYTES,
    PROTOCOL_VERSION,
    PUT,
    Head,
    Status,
    parse_answer,
    request_frames,
)
from kv_transfer.page import Buffer
from kv_transfer.store import BadValue, PageKey, StoreError

_URL = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_CLOSE_S = 2.0
_LOG_INTERVAL_S = 10.0
_log = logging.getLogger(__name__)


class LMCacheServer:
    """See the module. Implements kv_transfer.store.BlockStore."""

    name = "lmcache"

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float = 0.25,
        timeout_s: float = 1.0,
        min_bytes_per_s: float = 50e6,
        down_s: float = 2.0,
    ) -> None:
        matched = _URL.fullmatch(url)
        if matched is None or not 0 < int(matched[2]) < 65536:
            raise EngineError(f"lmcache url {shown(url)}: tcp://host:port of an `lmcache server` is expected")
        self.url = url
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._min_bytes_per_s = min_bytes_per_s
        self._down_s = down_s
        self._context = zmq.Context(io_threads=1)
        self._idle: queue.LifoQueue[_Link] = queue.LifoQueue()
        self._failed_at: float | None = None
        self._said_at = -_LOG_INTERVAL_S

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        num_bytes = sum(len(buffer) for buffer in buffers)
        self._ask(PUT, key, num_bytes, buffers)

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        num_bytes = sum(len(buffer) for buffer in buffers)
        page = self._ask(GET, key, num_bytes)
        if page is None:
            return False
        if len(page) != num_bytes:
            raise BadValue("size")
        scatter(page, buffers, check)
        return True

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        try:
            return self._ask(CONTAINS, key, num_bytes) is not None
        except BadValue:
            return False

    def delete(self, key: PageKey) -> None:
        if self._failed_at is not None and time.monotonic() - self._failed_at < self._down_s:
            raise StoreError("down")  # removing tails must not hold up the end of an instance
        self._ask(DELETE, key, 0)

    def close(self) -> None:
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                break
        # ZMQ's end waits for its thread, which may be looking up a name.
        thread = threading.Thread(target=self._context.term, name="kv-lmcache-close", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _ask(self, method: str, key: PageKey, num_bytes: int, buffers: Sequence[Buffer] = ()) -> memoryview | None:
        """The page that came with OK, empty if there is none to come; None: missing."""
        if num_bytes > MAX_VALUE_BYTES:
            raise StoreError("too_large")
        timeout_s = self._timeout_s + num_bytes / self._min_bytes_per_s
        name = ObjectName.of(key)
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
            self._failed(failure.reason)
            raise failure from error
        self._idle.put(link)
        self._worked()
        return _judge(status, page)

    def _link(self) -> _Link:
        while True:
            try:
                link = self._idle.get_nowait()
            except queue.Empty:
                return _Link(self._context, self.url, time.monotonic() + self._connect_timeout_s)
            if link.is_good:
                return link
            link.close()

    def _failed(self, reason: str) -> None:
        now = time.monotonic()
        self._failed_at = now
        if now - self._said_at >= _LOG_INTERVAL_S:
            self._said_at = now
            _log.warning("lmcache server at %s does not serve: %s; KV is computed instead", self.url, reason)

    def _worked(self) -> None:
        if self._failed_at is not None:
            self._failed_at, self._said_at = None, -_LOG_INTERVAL_S
            _log.warning("lmcache server at %s answers again", self.url)


class _Link:
    """One connection; one thread at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], url: str, deadline: float) -> None:
        self._number = 0
        self._socket = context.socket(zmq.DEALER)
        self._monitor = None
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a server that is not there
            self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_VALUE_BYTES + 4096)
            self._socket.setsockopt(zmq.IPV6, 1)
            self._monitor = self._socket.get_monitor_socket(_GONE)
            self._monitor.setsockopt(zmq.LINGER, 0)
            self._socket.connect(url)
            self._wait(zmq.POLLOUT, deadline, late="connect_timeout")
        except BaseException:
            self.close()
            raise

    @property
    def is_good(self) -> bool:
        """Nothing was heard of its end."""
        return self._monitor is not None and not self._monitor.poll(0)

    def exchange(
        self, method: str, head: Head, buffers: Sequence[Buffer], deadline: float
    ) -> tuple[Status, memoryview]:
        """Raises StoreError; the link is of no use then."""
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
            told = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            raise StoreError("reset" if told["event"] == zmq.EVENT_DISCONNECTED else "refused")
        raise StoreError(late)


def _judge(status: Status, page: memoryview) -> memoryview | None:
    if status == Status.OK:
        return page
    if status == Status.MISSING:
        return None
    if status == Status.BAD_VALUE:
        raise BadValue("size")
    raise StoreError(status.name.lower())
