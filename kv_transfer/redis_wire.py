"""One socket to Redis: a deadline on every wait, and RESP read from it without copies that could be spared.

Redis's answers are values here, errors too (`Refused`), since the connection is as good after them as before.
Whatever is *raised* while an answer is read leaves the stream in the middle of something: the connection is at its
end. No text of the server's gets into an exception, because it may quote a value: only words of our own.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from kv_transfer.page import Buffer
from kv_transfer.store import StoreError

_BUFFER_BYTES = 4096  # a line must fit; what of a page comes with it is copied once more
_SCRATCH_BYTES = 1 << 16
_MAX_CONTROL_BYTES = 1 << 18
_MAX_ITEMS = 256
_TIMEVAL = struct.Struct("@ll")
_NUMBER = re.compile(rb"-?[0-9]{1,18}")
_REASONS = {
    b"ASK": "cluster",
    b"BUSY": "busy",
    b"CLUSTERDOWN": "cluster",
    b"LOADING": "loading",
    b"MASTERDOWN": "masterdown",
    b"MISCONF": "misconf",
    b"MOVED": "cluster",
    b"NOAUTH": "auth",
    b"NOPERM": "noperm",
    b"OOM": "oom",
    b"READONLY": "readonly",
    b"WRONGPASS": "auth",
    b"WRONGTYPE": "type",
}

Reply: TypeAlias = "bytes | int | list[Reply] | Refused | None"


class LinkError(StoreError):
    """Redis was not reached, or the connection is of no use any more."""


class Refused(StoreError):
    """Redis answered with an error. `reason` is our word for it."""

    @classmethod
    def of(cls, text: bytes) -> Refused:
        """The error line, without its dash."""
        if text.startswith(b"ERR max number of clients"):
            return cls("maxclients")
        return cls(_REASONS.get(text.split(b" ", 1)[0], "error"))


def link_error(error: OSError) -> LinkError:
    """The one word for what a socket raised."""
    if isinstance(error, TimeoutError | BlockingIOError):  # the latter: a kernel time-out has run out
        return LinkError("timeout")
    if isinstance(error, ssl.SSLError):
        return LinkError("tls")
    if isinstance(error, socket.gaierror):
        return LinkError("resolve")
    if isinstance(error, ConnectionRefusedError):
        return LinkError("refused")
    if isinstance(error, ConnectionError):
        return LinkError("reset")
    return LinkError("unreachable")


class Wire(Protocol):
    """Bytes to and from Redis. Raises OSError; a deadline is a time.monotonic()."""

    is_duplex: bool
    """One thread may send while another receives."""
    is_local: bool
    """Both ends are on this machine."""

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """All of it."""
        ...

    def recv_into(self, view: memoryview, deadline: float, *, whole: bool = False) -> int:
        """At least one byte; `whole`: as much as the kernel will give in one call."""
        ...

    def is_quiet(self) -> bool:
        """Nothing has come that nobody asked for, the end of the stream included. For when no answer is due."""
        ...

    def shutdown(self) -> None:
        """End the stream: whoever waits on it wakes."""
        ...

    def close(self) -> None:
        """Nobody uses it any more."""
        ...


class TcpWire:
    """A plain socket. Its time-outs are the kernel's, of which there is one for each direction."""

    is_duplex = True

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_local = sock.getsockname()[0] == sock.getpeername()[0]
        self._socket = sock
        self._deadlines: dict[int, float] = {}

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while views:
            self._limit(socket.SO_SNDTIMEO, deadline)
            num_sent = self._socket.sendmsg(views)
            while views and num_sent >= len(views[0]):
                num_sent -= len(views[0])
                del views[0]
            if views:
                views[0] = views[0][num_sent:]

    def recv_into(self, view: memoryview, deadline: float, *, whole: bool = False) -> int:
        self._limit(socket.SO_RCVTIMEO, deadline)
        return _some(self._socket.recv_into(view, 0, socket.MSG_WAITALL if whole else 0))

    def is_quiet(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _limit(self, option: int, deadline: float) -> None:
        """At most twice the time: once set, it is for each wait until the deadline has passed."""
        left = _left(deadline)
        if self._deadlines.get(option) != deadline:
            self._deadlines[option] = deadline
            timeval = _TIMEVAL.pack(int(left), max(1, int(left % 1.0 * 1e6)))
            self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)


class TlsWire:
    """TLS over a socket. OpenSSL wants one thread at a time."""

    is_duplex = False

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_local = sock.getsockname()[0] == sock.getpeername()[0]
        self._socket = sock

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        for buffer in buffers:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(buffer)

    def recv_into(self, view: memoryview, deadline: float, *, whole: bool = False) -> int:
        del whole  # a TLS record at the most
        self._socket.settimeout(_left(deadline))
        return _some(self._socket.recv_into(view))

    def is_quiet(self) -> bool:
        self._socket.settimeout(0.0)
        try:
            self._socket.recv(1)
        except ssl.SSLWantReadError:  # after the session's tickets, which are TLS's own
            return True
        except OSError:
            return False
        return False

    def shutdown(self) -> None:
        # Not SSLSocket's own, which drops the TLS layer: a reader would then take ciphertext for the answer.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class ReplyReader:
    """Takes RESP2 apart. One thread at a time; see the module for what it raises and what it returns."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # of what was received and not read yet
        self._scratch: memoryview | None = None

    def bulk_length(self, deadline: float) -> int | Refused | None:
        """The beginning of a bulk string: its length; `fill` or `skip` what follows, then `skip` 2 for its end."""
        line = self._line(deadline)
        if line[:1] == b"-":
            return Refused.of(line[1:])
        if line[:1] != b"$":
            raise LinkError("protocol")
        length = _number(line)
        return None if length < 0 else length

    def fill(self, target: memoryview, deadline: float) -> None:
        """The next bytes, straight into `target` but for those that came along with a line."""
        num_filled = min(len(target), self._end - self._start)
        target[:num_filled] = self._view[self._start : self._start + num_filled]
        self._start += num_filled
        while num_filled < len(target):
            num_filled += self._wire.recv_into(target[num_filled:], deadline, whole=True)

    def skip(self, num_bytes: int, deadline: float) -> None:
        """Drop the next bytes."""
        if self._scratch is None and num_bytes > self._end - self._start:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while num_bytes:
            in_buffer = min(num_bytes, self._end - self._start)
            self._start += in_buffer
            num_bytes -= in_buffer
            if num_bytes and self._scratch is not None:
                num_bytes -= self._wire.recv_into(self._scratch[:num_bytes], deadline)

    def reply(self, deadline: float, *, depth: int = 0) -> Reply:
        """A whole small answer."""
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return Refused.of(rest)
        number = _number(line)
        if kind == b":":
            return number
        if number < 0:
            return None
        if kind == b"$" and number <= _MAX_CONTROL_BYTES:
            content = bytearray(number)
            self.fill(memoryview(content), deadline)
            self.skip(2, deadline)
            return bytes(content)
        if kind == b"*" and number <= _MAX_ITEMS and depth < 3:
            return [self.reply(deadline, depth=depth + 1) for _ in range(number)]
        raise LinkError("protocol")

    def _line(self, deadline: float) -> bytes:
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._start:
                kept = bytes(self._view[self._start : self._end])
                self._view[: len(kept)] = kept
                self._start, self._end = 0, len(kept)
            if self._end == _BUFFER_BYTES:
                raise LinkError("protocol")
            self._end += self._wire.recv_into(self._view[self._end :], deadline)
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line


def encode(*arguments: bytes | str | int) -> bytes:
    """A command without a page."""
    parts = [str(argument).encode() if isinstance(argument, int) else as_bytes(argument) for argument in arguments]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def as_bytes(text: bytes | str) -> bytes:
    """UTF-8, the file system's way with what is none."""
    return text if isinstance(text, bytes) else os.fsencode(text)


def _number(line: bytes) -> int:
    if not _NUMBER.fullmatch(line, 1):
        raise LinkError("protocol")
    return int(line[1:])


def _some(num_bytes: int) -> int:
    if num_bytes == 0:
        raise LinkError("closed")
    return num_bytes


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
