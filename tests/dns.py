"""A DNS server with one name, whose addresses change."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_A = 1
_HEADER_BYTES = 12


class DnsServer:
    """Answers each question with `ips` (IPv4), and none of its answers may be kept."""

    def __init__(self, *ips: str) -> None:
        self.ips = list(ips)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    @contextmanager
    def serving(self) -> Iterator[DnsServer]:
        thread = threading.Thread(target=self._serve)
        thread.start()
        try:
            yield self
        finally:
            host, port = self._socket.getsockname()
            self._socket.sendto(b"", (host, port))
            thread.join()
            self._socket.close()

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(512)
            if not query:
                return
            self._socket.sendto(self._answer(query), sender)

    def _answer(self, query: bytes) -> bytes:
        end = query.index(b"\0", _HEADER_BYTES) + 1
        (kind,) = struct.unpack(">H", query[end : end + 2])
        ips = self.ips if kind == _A else []
        head = query[:2] + struct.pack(">HHHHH", 0x8180, 1, len(ips), 0, 0)
        named = b"\xc0" + bytes([_HEADER_BYTES])  # the question's name
        records = [named + struct.pack(">HHIH", _A, 1, 0, 4) + socket.inet_aton(ip) for ip in ips]
        return head + query[_HEADER_BYTES : end + 4] + b"".join(records)
