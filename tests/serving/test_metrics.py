"""The metrics port's HTTP."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serving.metrics import MetricsServer, MetricsSettings, gauge
from serving.settings import parse_address


class Constant(Collector):
    def collect(self) -> Iterable[Metric]:
        yield gauge("size", "Of something.", 3)


def answer(address: str, method: str) -> tuple[bytes, bytes]:
    """The head, without the date, and all that follows until the server closes."""
    with socket.create_connection(parse_address(address), timeout=20) as connection:
        connection.sendall(f"{method} /metrics HTTP/1.0\r\n\r\n".encode())
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    return b"\n".join(line for line in head.splitlines() if not line.startswith(b"Date")), body


def test_head_is_get_without_the_body() -> None:
    server = MetricsServer(MetricsSettings(listen="127.0.0.1:0"), Constant(), of_process=False)
    server.start()
    try:
        assert server.address is not None
        whole, body = answer(server.address, "GET")
        assert b" 200 " in whole
        assert b"size 3.0" in body
        assert f"Content-Length: {len(body)}".encode() in whole
        assert answer(server.address, "HEAD") == (whole, b"")
        assert b" 405 " in answer(server.address, "POST")[0]
    finally:
        server.close()
