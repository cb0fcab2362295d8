"""A real `lmcache server` with Tandem's module on loopback ports, which tests freeze and kill."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kv_transfer.page.format import PageKey
from kv_transfer.stores.base import StoreError
from kv_transfer.stores.lmcache.connector import LMCacheOptions
from kv_transfer.stores.lmcache.server import LMCacheServer
from tandem.local_stack.topology import free_ports
from tests.waiting import freeze

_START_S = 60.0
_QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
_ROOT = Path(__file__).parents[4]


class ServerProcess:
    """One server, its logs in a folder. Ended by its pid."""

    def __init__(self, folder: Path, *l2_adapters: dict[str, object], l1_gb: float = 0.25) -> None:
        self.port, self._http_port = free_ports(2)
        self._log = folder / "lmcache.log"
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--transport", "zmq", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--http-host", "127.0.0.1", "--http-port", str(self._http_port)]
        command += [
            "--l1-size-gb",
            str(l1_gb),
            "--no-l1-use-lazy",
            "--max-cpu-workers",
            "4",
            "--eviction-policy",
            "LRU",
        ]
        command += ["--disable-observability", "--server-module"]
        command += [json.dumps({"module_path": "kv_transfer.stores.lmcache.server_module"})]
        for adapter in l2_adapters:
            command += ["--l2-adapter", json.dumps(adapter)]
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns once the module answers."""
        env = {**os.environ, "PYTHONPATH": str(_ROOT), **_QUIET}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=env, cwd=_ROOT)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def _answers(self) -> bool:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", self.port)):
                return False
        store = LMCacheServer(LMCacheOptions(url=self.url))
        try:
            store.contains(PageKey(bytes(32), secrets.token_bytes(32)), 1)
        except StoreError:
            return False
        finally:
            store.close()
        return True

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def freeze(self) -> None:
        freeze(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """SIGTERM, as an operator does; its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(30)

    def stop(self) -> None:
        """End it, whatever its state."""
        if self._process is not None and self._process.poll() is None:
            self.kill()


@contextlib.contextmanager
def lmcache_server(folder: Path, *l2_adapters: dict[str, object], l1_gb: float = 0.25) -> Iterator[ServerProcess]:
    """One that runs, for as long as the block does."""
    server = ServerProcess(folder, *l2_adapters, l1_gb=l1_gb)
    try:
        server.start()
        yield server
    finally:
        server.stop()
