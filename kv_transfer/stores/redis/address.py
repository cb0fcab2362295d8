"""Where a Redis is and how to get there: address, name and TCP within a deadline, TLS, account and password."""

from __future__ import annotations

import hmac
import os
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.errors import EngineError
from kv_transfer.stores.base import KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES, StoreError

PASSWORD_VARIABLE = "TANDEM_REDIS_PASSWORD"
_EXPECTED = "redis://host:port/db or rediss://host:port/db, or redis+sentinel://host:port,host:port/service/db"
_LOGIN = f"`username`, and `password_file` or the variable {PASSWORD_VARIABLE}"
_REDIS_PORT, _SENTINEL_PORT = 6379, 26379
_MAX_PASSWORD_BYTES = 4096
_KEEPALIVE = {
    "TCP_KEEPIDLE": KEEPALIVE_IDLE_S,  # on Linux
    "TCP_KEEPALIVE": KEEPALIVE_IDLE_S,  # on macOS
    "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_S,
    "TCP_KEEPCNT": KEEPALIVE_PROBES,
}
_FIRST_LOGIN_WAIT_S, _LONGEST_LOGIN_WAIT_S = 2.0, 60.0


def _wrong(problem: str) -> EngineError:
    return EngineError(f"redis url: {problem}; {_EXPECTED} is expected")


class ConnectionFailed(StoreError):
    """Redis was not reached, or the connection was lost."""

    is_logged = True


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where Redis listens, or the Sentinels that know where: then `service` is its name there."""

    hosts: tuple[tuple[str, int], ...]
    db: int = 0
    tls: bool = False
    service: str = ""

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Raises EngineError, which names the wrong part and repeats none: each may be a password."""
        try:
            parts = urlsplit(url)
            hosts = [urlsplit(f"//{host}") for host in parts.netloc.split(",")]
            pairs = tuple((host.hostname or "", host.port) for host in hosts)
        except ValueError:
            raise _wrong("it is not a URL") from None
        if "@" in url:
            raise EngineError(f"redis url: no login in it, others can see it; use {_LOGIN}")
        if parts.query or parts.fragment:
            raise EngineError(f"redis url: what follows ? or # is not supported; for a login use {_LOGIN}")
        scheme, _, discovery = parts.scheme.partition("+")
        if scheme not in ("redis", "rediss") or discovery not in ("", "sentinel"):
            raise _wrong("its scheme is another one, or missing")
        is_sentinel, path = discovery == "sentinel", [part for part in parts.path.split("/") if part]
        service = path.pop(0) if is_sentinel and path else ""
        if not all(host and port != 0 for host, port in pairs):
            raise _wrong("a host is missing, or a port is 0")
        if not (service if is_sentinel else len(pairs) == 1):
            raise _wrong("the service is missing" if is_sentinel else "it has several hosts")
        db = "/".join(path) or "0"
        if not re.fullmatch("[0-9]{1,5}", db):
            raise EngineError("redis url: what follows the / is not supported, the database is a number")
        default_port = _SENTINEL_PORT if is_sentinel else _REDIS_PORT
        return cls(tuple((host, port or default_port) for host, port in pairs), int(db), scheme == "rediss", service)

    def __str__(self) -> str:
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{self.service}@{hosts}" if self.service else hosts


class RedisLogin:
    """Account and password. Without a file the password is the environment variable's; without either, no login.

    A login that was refused is not tried again soon, unless the password has changed. Thread-safe.
    """

    def __init__(
        self, username: str = "default", password_file: str = "", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.username = username
        self._password_file = password_file
        self._clock = clock
        self._lock = threading.Lock()
        self._refused: bytes | None = None
        self._wait_s = 0.0
        self._next_at = 0.0

    def password(self) -> bytes | None:
        """As it is now. Raises OSError."""
        if not self._password_file:
            return os.environ[PASSWORD_VARIABLE].encode() if PASSWORD_VARIABLE in os.environ else None
        with open(self._password_file, "rb") as file:
            return file.read(_MAX_PASSWORD_BYTES).rstrip(b"\r\n")

    def password_to_try(self) -> bytes | None:
        """The same. Raises ConnectionFailed while it must not be tried."""
        try:
            password = self.password()
        except OSError as error:
            raise ConnectionFailed("password_file") from error
        must_wait = self._wait_s > 0.0 and self._clock() < self._next_at
        if must_wait and self._refused is not None and hmac.compare_digest(self._refused, password or b""):
            raise ConnectionFailed("auth")
        return password

    def note_accepted(self) -> None:
        self._wait_s = 0.0

    def note_refused(self, password: bytes | None) -> None:
        """Of several connections that log in at the same time, the first refusal counts."""
        with self._lock:
            now = self._clock()
            if not hmac.compare_digest(password or b"", self._refused or b""):
                self._wait_s = 0.0
            elif self._wait_s > 0.0 and now < self._next_at:
                return
            self._refused = password or b""
            self._wait_s = min(max(2 * self._wait_s, _FIRST_LOGIN_WAIT_S), _LONGEST_LOGIN_WAIT_S)
            self._next_at = now + self._wait_s


def connect_tcp(host: str, port: int, deadline: float, receive_bytes: int) -> socket.socket:
    """TCP to the first of the host's addresses that accepts. Raises OSError."""
    failure: OSError = TimeoutError()
    for family, kind, protocol, _, address in _resolve(host, port, deadline):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        try:
            _set_receive_buffer(sock, receive_bytes)
            _keep_alive(sock)
            sock.settimeout(left)
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _set_receive_buffer(sock: socket.socket, num_bytes: int) -> None:
    """Room for a page or two in the kernel, if it allows so much; before connecting, so that the window can be as wide.

    With the kernel's own tuning (0) 4 of 14 connections settled at 1.7 GB/s (loopback, 1.8 MB values, BBR), the others
    at 2.8; with a fixed buffer of 4 MB none of 14. A buffer of requested size is never tuned again, so that one cut
    short by rmem_max would be worse than none.
    """
    with socket.socket(sock.family, sock.type) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)
        if not num_bytes or trial.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) < num_bytes:
            return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)


def _resolve(host: str, port: int, deadline: float) -> list[Any]:
    """getaddrinfo with a time-out, which it lacks: a name server that is down delays it for many seconds."""
    outcome: queue.Queue[list[Any] | OSError] = queue.Queue()

    def resolve() -> None:
        try:
            outcome.put([*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)])
        except OSError as error:
            outcome.put(error)
        except UnicodeError:  # a label that is empty, or has more than 63 characters
            outcome.put(socket.gaierror(socket.EAI_NONAME, f"{host} is not a DNS name"))

    threading.Thread(target=resolve, name="kv-redis-resolve", daemon=True).start()
    try:
        found = outcome.get(timeout=max(0.001, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, OSError):
        raise found
    return found


def tls_contexts(*, ca_file: str = "", cert_file: str = "", key_file: str = "") -> Callable[[], ssl.SSLContext]:
    """A function that returns the context for a new connection: of the files as they are, or, while one of them is half
    written or the key is another certificate's, as they were last usable. Raises EngineError where they are not yet.

    Every context verifies the server and its name, against `ca_file` alone if there is one: redis-py's own options
    would trust the system's authorities as well.
    """
    from serving.file_watcher import FileWatcher  # imports pydantic, which plain TCP does not need
    from serving.settings import SettingsError

    def read() -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=ca_file or None)
            if cert_file:
                context.load_cert_chain(cert_file, key_file or None)
        except OSError as error:  # an SSLError is one, too
            raise SettingsError(f"redis TLS files: {error.strerror or error}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    paths = [Path(path) for path in (ca_file, cert_file, key_file) if path]
    try:
        return FileWatcher(paths, read).current
    except SettingsError as error:
        raise EngineError(str(error)) from error
