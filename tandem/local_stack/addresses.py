"""The addresses that a stack is to listen on and to call, tried before any process starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from tandem.local_stack.settings import StackSettings

_START_REDIS = "start one, for example: redis-server --port 6379"


def check_addresses(settings: StackSettings) -> None:
    """Reports early, by the flag's name, what a process would report seconds later. Raises ValueError."""
    _check_port(settings.host, "--port", settings.port)
    _check_port(settings.host, "--http-port", settings.http_port or 0)
    if settings.port and settings.port == settings.http_port:
        raise ValueError(f"--port and --http-port are both {settings.port}; choose another --http-port")
    if settings.kv_url is None or not {"redis", "lmcache"} & set(settings.connectors):
        return  # the server of a class that is not known here: only the class can tell
    from engine.errors import EngineError

    is_lmcache = settings.kv_url.startswith("tcp:")
    try:
        _connect_to_one(_hosts(settings.kv_url))
    except EngineError as error:
        raise ValueError(f"--kv-url: {error}") from None
    except (OSError, ValueError) as error:
        what, start = ("lmcache server", "see docs/connectors/lmcache.md") if is_lmcache else ("Redis", _START_REDIS)
        raise ValueError(f"no {what} answers at --kv-url {settings.kv_url}: {error}; {start}") from None


def _hosts(kv_url: str) -> Sequence[tuple[str, int]]:
    """Where an `lmcache server` or a Redis listens, or the Sentinels of a Redis."""
    if kv_url.startswith("tcp:"):
        server = urlsplit(kv_url)
        return [(server.hostname or "127.0.0.1", server.port or 5555)]
    from kv_transfer.stores.redis.address import RedisAddress

    return RedisAddress.parse(kv_url).hosts


def _connect_to_one(hosts: Sequence[tuple[str, int]]) -> None:
    """Raises OSError where none accepts."""
    failure: OSError | None = None
    for host in hosts:
        try:
            return socket.create_connection(host, timeout=2).close()
        except OSError as error:
            failure = error
    assert failure is not None
    raise failure


def _check_port(host: str, flag: str, port: int) -> None:
    try:
        bind_once(host, port)
    except OSError as error:
        if port and error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is taken; choose another {flag}, or omit it") from None
        if port and error.errno == errno.EACCES:
            raise ValueError(f"port {port} is root's; choose another {flag}, above 1023, or omit it") from None
        allowed = "an IPv4 address or a name of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
        raise ValueError(f"cannot listen on --host {host}: {error.strerror}; allowed: {allowed}") from None


def bind_once(host: str, port: int) -> None:
    """Raises OSError where a process could not listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
        probe.bind((host, port))
