"""The TCP connections of this process, found by their peers: gRPC's server has no way to end one.

Their sockets are among this process's descriptors. What is done to a duplicate is done to the connection.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import unquote

_AT_ONCE = 100
"""Connections that are looked at before others have their turn, some 10 µs each."""
_TCP = (socket.AF_INET, socket.AF_INET6)
_SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h
_BPF_RETURN = 0x06  # BPF_RET | BPF_K: so many bytes of a packet are kept, here none


def tcp_connections() -> Iterator[socket.socket]:
    """A duplicate of each connected TCP socket of this process, which is closed when the next one is asked for."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError), _duplicate(int(name)) as connection:  # or closed meanwhile, or not connected
            if connection.family in _TCP:
                connection.getpeername()
                yield connection


async def connections_from(peers: set[str]) -> list[socket.socket]:
    """Duplicates of this process's TCP connections from `peers` ("ipv4:10.0.0.7:5000"), to be closed by the caller."""
    wanted = {unquote(peer) for peer in peers}
    found: dict[str, socket.socket] = {}
    for number, connection in enumerate(tcp_connections(), start=1):
        with suppress(OSError):  # gone meanwhile
            peer = _as_grpc_writes(connection.getpeername())
            if peer in wanted and peer not in found:
                found[peer] = connection.dup()
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return list(found.values())


def drop_what_comes(connection: socket.socket) -> None:
    """Has the kernel forget every packet of this connection as it comes (Linux; elsewhere nothing happens)."""
    if not sys.platform.startswith("linux"):
        return
    program = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, 0))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def end(connection: socket.socket) -> None:
    """With a reset: what is under way is of no use. Closes the duplicate."""
    with connection, suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)


def _duplicate(descriptor: int) -> socket.socket:
    """Its owner may close its own at any time, and the number be another's by then. Raises OSError for no socket."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _as_grpc_writes(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    host, port = address[0].removeprefix("::ffff:"), address[1]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
