"""Prometheus metrics of a process: families of samples, and the HTTP port.

    scrape ─▶ a thread of MetricsServer ─▶ Collector.collect() ─▶ the event loop's counters, as they are

Nothing is done per event for a scrape: a collector reads counters that exist anyway. It runs on a thread of the server,
so it may only read what is safe to read while the event loop writes: numbers, and copies of dicts.
"""

from __future__ import annotations

import errno
import io
import logging
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from serving.histogram import Histogram
from serving.logging import Repeats, without_values
from serving.settings import Address, Section, format_address, parse_address, setting

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

_MAX_SCRAPES = 8
_READ_TIMEOUT_S = 5.0
_POLL_S = 0.2
_log = logging.getLogger(__name__)


F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)
Samples = Mapping[str, float] | Iterable[tuple[Sequence[str], float]]
"""Values by the one label's value, or by the values of several labels. A number is the sample of no labels."""


def _family(kind: type[F], name: str, documentation: str, samples: float | Samples, *labels: str) -> F:
    family = kind(name, documentation, labels=labels)
    if isinstance(samples, int | float):
        samples = [((), samples)]
    for values, value in samples.items() if isinstance(samples, Mapping) else samples:
        family.add_metric([values] if isinstance(values, str) else list(values), value)
    return family


gauge = partial(_family, GaugeMetricFamily)
counter = partial(_family, CounterMetricFamily)


def histogram(name: str, documentation: str, by_value: Mapping[Any, Histogram], label: str) -> HistogramMetricFamily:
    """One histogram for each value of the label."""
    family = HistogramMetricFamily(name, documentation, labels=[label])
    for value, counted in by_value.items():
        family.add_metric([value], counted.buckets(), counted.sum)
    return family


class MetricsSettings(Section):
    """Where this process serves its metrics: plain HTTP without authentication, for a private network."""

    listen: Address | None = setting(
        None, "host:port that serves Prometheus text at /metrics, port 0 takes a free one; none: not served."
    )


class MetricsServer:
    """Serves the collectors' metrics and the process's own, or nothing without an address in the settings."""

    def __init__(self, settings: MetricsSettings, *collectors: Collector | None, of_process: bool = True) -> None:
        """`of_process`: with memory, CPU time and open files of this process."""
        self._listen = settings.listen
        self.registry = CollectorRegistry(auto_describe=False)
        """What is served, for another port of this process; to be read off the event loop."""
        if of_process:
            ProcessCollector(registry=self.registry)
        for collector in filter(None, collectors):
            self.registry.register(collector)
        self._server: _BoundedServer | None = None

    def start(self) -> None:
        """Listens. Raises OSError where the address is taken or not this host's, or no thread can be started."""
        if self._listen is None:
            return
        try:
            self._server = _BoundedServer(*parse_address(self._listen))
        except OSError as error:
            raise OSError(f"cannot serve metrics on {self._listen}: {error}") from error
        self._server.set_app(_App(self.registry))
        thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True, name="metrics")
        try:
            thread.start()
        except RuntimeError as error:
            self._server.server_close()
            self._server = None  # `shutdown` would wait for the thread
            raise OSError(errno.EAGAIN, f"cannot serve metrics on {self._listen}: {error}") from error
        _log.info("metrics at http://%s/metrics", self.address)

    @property
    def address(self) -> str | None:
        """host:port that is listened on; None: it does not listen."""
        if self._server is None:
            return None
        return format_address(str(self._server.server_address[0]), self._server.server_port)

    def close(self) -> None:
        """Stops within a fifth of a second; blocks, so never call it on an event loop. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


class _App:
    """prometheus_client's, which lacks HEAD and leaves an error of a collector to wsgiref, as a traceback on stderr."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._get: Any = make_wsgi_app(registry)
        self._failures, self._lock = Repeats(), threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        is_head = environ["REQUEST_METHOD"] == "HEAD"
        status, headers, body = self._answer({**environ, "REQUEST_METHOD": "GET"} if is_head else environ)
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [] if is_head else [body]

    def _answer(self, environ: WSGIEnvironment) -> tuple[str, list[tuple[str, str]], bytes]:
        """Status, headers and body; a 500 where a collector has failed."""
        begun: list[tuple[str, list[tuple[str, str]]]] = []
        try:
            body = b"".join(self._get(environ, lambda *head: begun.append(head)))
        except Exception as error:
            self._log(error)
            headers = [("Content-Type", "text/plain; charset=utf-8")]
            return "500 Internal Server Error", headers, b"no metrics: see the log of this process\n"
        [(status, headers)] = begun
        return status, headers, body

    def _log(self, error: Exception) -> None:
        """A warning, once for all scrapes in a row that fail alike; with a traceback unless it is a mere delay."""
        text = f"{type(error).__name__}: {error}"
        with self._lock:
            is_repeat = self._failures.is_repeat(without_values(text))
        if not is_repeat:
            _log.warning("a scrape of the metrics failed: %s", text, exc_info=not isinstance(error, TimeoutError))


class _BoundedServer(ThreadingWSGIServer):
    """prometheus_client's server with a limit on connections and a read timeout, which `start_http_server` lacks: there
    every silent client keeps a thread, and binding waits for a DNS lookup of the host's own name."""

    request_queue_size = 2 * _MAX_SCRAPES

    def __init__(self, host: str, port: int) -> None:
        self._places = threading.BoundedSemaphore(_MAX_SCRAPES)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # not HTTPServer's, which does the lookup
        self.server_name, self.server_port = "metrics", self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._places.release()
            raise

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
        pass  # scrapes are not logged

    def get_stderr(self) -> TextIO:
        return io.StringIO()  # dropped: wsgiref's traceback of a client that does not read its answer
