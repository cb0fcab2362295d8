"""Numbers for Prometheus: where a process serves them, and histograms of latencies.

    scrape ─▶ a thread of MetricsServer ─▶ Collector.collect() ─▶ what the event loop counted, as it stands

Nothing is done per event for the sake of a scrape: a collector reads the counts that are there anyway. It runs on a
thread of the server, so what it reads must bear being read while the event loop writes: numbers, and copies of dicts.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Sequence
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from pydantic import field_validator

from serving.histogram import Histogram
from serving.settings import Section, setting

LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
"""Upper bounds, seconds: vLLM's for the time to first token, as far as a hand-over can take, and finer at its start."""

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/]+):(?P<port>[0-9]{1,5})")
_MAX_SCRAPES = 8
_READ_TIMEOUT_S = 5.0
_POLL_S = 0.2
_log = logging.getLogger(__name__)


class MetricsSettings(Section):
    """Where this process serves its metrics: plain HTTP without authentication, for the inside of a network."""

    listen: str | None = setting(
        None, "host:port that serves Prometheus text at /metrics, port 0 takes a free one; none: nowhere."
    )

    @field_validator("listen")
    @classmethod
    def _is_host_port(cls, value: str | None) -> str | None:
        matched = _HOST_PORT.fullmatch(value) if value is not None else None
        if value is not None and (matched is None or int(matched["port"]) > 65535):
            raise ValueError("must be host:port, an IPv6 host in brackets; port 0 takes a free one")
        return value


class LatencyHistogram(Histogram):
    """How often something took how long, in seconds."""

    __slots__ = ()

    def __init__(self, bounds_s: Sequence[float] = LATENCY_BUCKETS_S) -> None:
        super().__init__(bounds_s)

    @property
    def sum_s(self) -> float:
        """Seconds that all of them took."""
        return self.sum


class MetricsServer:
    """Serves what the collectors tell, and the process's own numbers. Without an address in the settings it does
    nothing. Belongs to the composition root."""

    def __init__(self, settings: MetricsSettings, *collectors: Collector) -> None:
        self._listen = settings.listen
        self.registry = CollectorRegistry(auto_describe=False)
        """What it serves, for another port of this process that serves it too; to be read off the event loop."""
        ProcessCollector(registry=self.registry)
        for collector in collectors:
            self.registry.register(collector)
        self._server: _HttpServer | None = None

    def start(self) -> None:
        """Listens. Raises OSError where the address is taken or not ours."""
        matched = _HOST_PORT.fullmatch(self._listen or "")
        if matched is None:
            return
        host, port = matched["host"].strip("[]"), int(matched["port"])
        try:
            self._server = _HttpServer(host, port, make_wsgi_app(self.registry))
        except OSError as error:
            raise OSError(f"cannot serve metrics on {self._listen}: {error}") from error
        threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True, name="metrics").start()
        _log.info("metrics at http://%s/metrics", self.address)

    @property
    def address(self) -> str | None:
        """host:port that is listened on; None: it does not listen."""
        if self._server is None:
            return None
        host, port = str(self._server.server_address[0]), self._server.server_port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Ends it, within a fifth of a second; not to be called on an event loop. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


class _HttpServer(ThreadingMixIn, WSGIServer):
    """wsgiref's, bounded: few connections at a time, each with little patience."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * _MAX_SCRAPES

    def __init__(self, host: str, port: int, app: Any) -> None:
        self._places = threading.BoundedSemaphore(_MAX_SCRAPES)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's would ask the DNS for its own name
        self.server_name, self.server_port = "metrics", self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a scrape by %s failed", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = _READ_TIMEOUT_S

    def log_message(self, *args: Any) -> None:
        """Scrapes are no news."""
