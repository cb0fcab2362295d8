"""How a connection to Redis comes to be: address, TLS, login, and what is noticed on the way.

    resolve ─▶ TCP ─▶ TLS ─▶ HELLO 2 AUTH … SETNAME …, INFO server, SELECT ─▶ Connection
                                │ login refused: no other attempt for 2 s, 4 s, … 60 s, or until the password changes

Every connection resolves the name and reads the password anew: a service may have moved, a secret may have been
rotated. The password is in a file or in an environment variable, never in the address, which is seen by all who list
processes.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from engine.errors import EngineError, shown
from kv_transfer.redis_link import Connection
from kv_transfer.redis_wire import LinkError, Refused, ReplyReader, TcpWire, TlsWire, Wire, encode, link_error

PASSWORD_VARIABLE = "TANDEM_REDIS_PASSWORD"
CLIENT_NAME = "tandem-kv"
_DEFAULT_PORT = 6379
_MAX_PASSWORD_BYTES = 4096
_RECEIVE_BYTES = 4 << 20
# On one machine the two ends best take turns, with the page in a cache between them: 2.5 GB/s on two cores, 1.5 with
# the next GET sent ahead. Over a network that would cost a round trip for each page.
_LOCAL_IN_FLIGHT, _REMOTE_IN_FLIGHT = 1, 8
_FIRST_LOGIN_WAIT_S, _LONGEST_LOGIN_WAIT_S = 2.0, 60.0
_INFO_LINE = re.compile(rb"([a-z_0-9]+):([^\r\n]*)")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where Redis listens."""

    host: str
    port: int
    db: int = 0
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """redis://host:port/db, or rediss:// for TLS. Raises EngineError, which does not repeat a password."""
        try:
            parts = urlsplit(url)
            host, port, secret = parts.hostname, parts.port, parts.username or parts.password
        except ValueError as error:
            raise EngineError("redis url: not a URL; redis://host:port/db is expected") from error
        if secret:
            raise EngineError(
                "redis url: no login in it, others can see it; use `username`, and `password_file` or the variable"
                f" {PASSWORD_VARIABLE}"
            )
        if parts.scheme not in ("redis", "rediss") or not host or parts.query or parts.fragment:
            raise EngineError(f"redis url {shown(url)}: redis://host:port/db or rediss://host:port/db is expected")
        db = parts.path.strip("/") or "0"
        if not re.fullmatch("[0-9]{1,5}", db):
            raise EngineError(f"redis url {shown(url)}: the database is a number")
        return cls(host, port or _DEFAULT_PORT, int(db), parts.scheme == "rediss")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RedisLogin:
    """Who we are. Without a file the password is the environment variable's; without either there is no login."""

    username: str = "default"
    password_file: str = ""

    def password(self) -> bytes | None:
        """As it is now. Raises OSError."""
        if not self.password_file:
            return os.environ[PASSWORD_VARIABLE].encode() if PASSWORD_VARIABLE in os.environ else None
        with open(self.password_file, "rb") as file:
            return file.read(_MAX_PASSWORD_BYTES).rstrip(b"\r\n")


def tls_context(*, ca_file: str = "", cert_file: str = "", key_file: str = "") -> ssl.SSLContext:
    """Always verifies the server and its name. Raises EngineError."""
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
        if cert_file:
            context.load_cert_chain(cert_file, key_file or None)
    except OSError as error:  # an SSLError is one, too
        raise EngineError(f"redis TLS files: {error.strerror or error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class Dialer:
    """Makes connections to one Redis, and remembers which run of it the last one was to. Thread-safe."""

    def __init__(
        self,
        address: RedisAddress,
        login: RedisLogin,
        *,
        tls: ssl.SSLContext | None = None,
        max_in_flight: int | None = None,
        connect_timeout_s: float = 0.25,
        timeout_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.run_id: str | None = None
        self.num_restarts = 0
        self._login = login
        self._tls = tls
        self._max_in_flight = max_in_flight
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._refused_login: bytes | None = None
        self._login_wait_s = 0.0
        self._login_at = 0.0

    def dial(self) -> Connection:
        """A connection, ready for use. Raises LinkError."""
        try:
            password = self._login.password()
        except OSError as error:
            raise LinkError("password_file") from error
        self._ask_leave(password or b"")
        try:
            wire = self._wire()
        except OSError as error:
            raise link_error(error) from error
        reader = ReplyReader(wire)
        try:
            self._introduce(wire, reader, password)
        except OSError as error:
            wire.close()
            raise link_error(error) from error
        except BaseException:
            wire.close()
            raise
        max_in_flight = self._max_in_flight or (_LOCAL_IN_FLIGHT if wire.is_local else _REMOTE_IN_FLIGHT)
        return Connection(wire, reader, max_in_flight=max_in_flight)

    def _wire(self) -> Wire:
        deadline = time.monotonic() + self._connect_timeout_s
        sock = self._connected(deadline)
        if self._tls is None:
            return TcpWire(sock)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()) + self._timeout_s)
            return TlsWire(self._tls.wrap_socket(sock, server_hostname=self.address.host))
        except BaseException:
            sock.close()
            raise

    def _connected(self, deadline: float) -> socket.socket:
        """TCP to the first of the host's addresses that takes us."""
        failure: OSError = TimeoutError()
        for family, kind, protocol, _, address in _resolve(self.address.host, self.address.port, deadline):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            sock = socket.socket(family, kind, protocol)
            try:
                set_receive_buffer(sock)
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

    def _introduce(self, wire: Wire, reader: ReplyReader, password: bytes | None) -> None:
        deadline = time.monotonic() + self._timeout_s
        login = (b"AUTH", self._login.username, password) if password is not None else ()
        commands = [encode("HELLO", 2, *login, "SETNAME", CLIENT_NAME), encode("INFO", "server")]
        if self.address.db:
            commands.append(encode("SELECT", self.address.db))
        # "max number of clients" is said before the connection is closed, and can still be read then.
        with contextlib.suppress(ConnectionError):
            wire.send([b"".join(commands)], deadline)
        hello = reader.reply(deadline)
        if isinstance(hello, Refused):
            if hello.reason in ("auth", "noperm"):
                self._login_failed(password or b"")
            raise LinkError(hello.reason)
        self._login_wait_s = 0.0
        self._notice_run(reader.reply(deadline))
        if self.address.db and isinstance(selected := reader.reply(deadline), Refused):
            raise LinkError(selected.reason)

    def _notice_run(self, info: object) -> None:
        run_id = parse_info(info).get("run_id") if isinstance(info, bytes) else None
        if run_id is None:  # not every account may ask
            return
        if self.run_id is not None and run_id != self.run_id:
            self.num_restarts += 1
            _log.warning("redis at %s is another run of it: pages that it has lost are computed again", self.address)
        self.run_id = run_id

    def _ask_leave(self, password: bytes) -> None:
        """A login that was refused is not tried again soon, unless the password has changed."""
        if not self._login_wait_s or self._clock() >= self._login_at:
            return
        if self._refused_login is not None and hmac.compare_digest(self._refused_login, password):
            raise LinkError("auth")

    def _login_failed(self, password: bytes) -> None:
        if password != self._refused_login:
            self._login_wait_s = 0.0
        self._refused_login = password
        self._login_wait_s = min(max(2 * self._login_wait_s, _FIRST_LOGIN_WAIT_S), _LONGEST_LOGIN_WAIT_S)
        self._login_at = self._clock() + self._login_wait_s


def set_receive_buffer(sock: socket.socket) -> None:
    """Room for a page or two in the kernel, if it allows so much; before connecting, so that the window can be as wide.

    With the kernel's own tuning 4 of 14 connections settled at 1.7 GB/s (loopback, 1.8 MB values, BBR), the others at
    2.8; with a fixed buffer of 4 MB none of 14. A buffer that was asked for is never tuned again, so that one cut
    short by rmem_max would be worse than none.
    """
    with socket.socket(sock.family, sock.type) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        if trial.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) < _RECEIVE_BYTES:
            return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)


def parse_info(text: bytes) -> dict[str, str]:
    """INFO's lines."""
    return {match[1].decode(): match[2].decode(errors="replace") for match in _INFO_LINE.finditer(text)}


def _resolve(host: str, port: int, deadline: float) -> list[Any]:
    """getaddrinfo with a time-out, which it lacks: a name server that is down holds it for many seconds."""
    outcome: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            outcome.put([*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)])
        except OSError as error:
            outcome.put(error)

    threading.Thread(target=resolve, name="kv-redis-resolve", daemon=True).start()
    try:
        found = outcome.get(timeout=max(0.001, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, OSError):
        raise found
    return found
