"""The metrics port's HTTP."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import pytest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serving import metrics
from serving.metrics import MetricsServer, MetricsSettings, gauge
from serving.settings import parse_address
from tests.waiting import wait_until


class Constant(Collector):
    def collect(self) -> Iterable[Metric]:
        yield gauge("size", "Of something.", 3)


class Large(Collector):
    """Far more than the buffers of a connection."""

    def collect(self) -> Iterable[Metric]:
        yield gauge("size", "Of something.", {letter * 1_000_000: 1 for letter in "abcdefghijklmnop"}, "label")


class Failing(Collector):
    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def collect(self) -> Iterable[Metric]:
        raise self._errors.pop(0)


@contextmanager
def serving(collector: Collector) -> Iterator[str]:
    """A metrics server's address."""
    server = MetricsServer(MetricsSettings(listen="127.0.0.1:0"), collector, of_process=False)
    server.start()
    try:
        assert server.address is not None
        yield server.address
    finally:
        server.close()


def answer(address: str, method: str) -> tuple[bytes, bytes]:
    """The head, without the date, and all that follows until the server closes."""
    with socket.create_connection(parse_address(address), timeout=20) as connection:
        connection.sendall(f"{method} /metrics HTTP/1.0\r\n\r\n".encode())
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    return b"\n".join(line for line in head.splitlines() if not line.startswith(b"Date")), body


def test_head_is_get_without_the_body() -> None:
    with serving(Constant()) as address:
        whole, body = answer(address, "GET")
        assert b" 200 " in whole
        assert b"size 3.0" in body
        assert f"Content-Length: {len(body)}".encode() in whole
        assert answer(address, "HEAD") == (whole, b"")
        assert b" 405 " in answer(address, "POST")[0]


def test_a_scrape_that_fails_is_a_warning_in_the_log(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two that fail alike are one, and nothing goes past the log, which blanks credentials."""
    errors = [TimeoutError(f"not within {seconds} s") for seconds in (2, 3)]
    wrong = [RuntimeError("a fault that the test asked for") for _ in range(2)]
    with serving(Failing(*errors, *wrong)) as address:
        answers = [answer(address, method) for method in ("GET", "HEAD", "GET", "GET")]
    warnings = [record for record in caplog.records if "scrape" in record.getMessage()]
    assert all(b" 500 " in head for head, _ in answers)
    assert [bool(body) for _, body in answers] == [True, False, True, True]
    assert [(record.getMessage().partition(": ")[2], bool(record.exc_info)) for record in warnings] == [
        ("TimeoutError: not within 2 s", False),
        ("RuntimeError: a fault that the test asked for", True),
    ]
    assert capsys.readouterr().err == ""


def test_a_server_whose_thread_cannot_start_says_so_and_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = MetricsServer(MetricsSettings(listen="127.0.0.1:0"), of_process=False)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(OSError, match=r"cannot serve metrics on 127\.0\.0\.1:0: can't start new thread") as refused:
            server.start()
    assert refused.value.errno == errno.EAGAIN
    assert server.address is None
    server.close()


def test_a_client_that_does_not_read_its_answer_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics._Handler, "timeout", 0.2)
    with serving(Large()) as address:
        wait_until(lambda: 0 < _unread_answer(address) < 16_000_000, "the answer was never cut off")
    assert capsys.readouterr().err == ""


def _unread_answer(address: str) -> int:
    """Bytes that a client gets which begins to read them late."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(parse_address(address))
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        time.sleep(0.5)
        num_bytes = 0
        with suppress(ConnectionResetError):
            while chunk := connection.recv(1 << 20):
                num_bytes += len(chunk)
    return num_bytes
