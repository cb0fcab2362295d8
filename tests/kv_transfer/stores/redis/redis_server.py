"""A real Redis on a loopback port, with nothing on disk, which tests freeze and kill; and Sentinels."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kv_transfer.page.format import PageKey
from kv_transfer.stores.redis.connector import RedisOptions
from tandem.local_stack.topology import free_ports
from tests.waiting import freeze

_START_S = 10.0


class RedisServer:
    """One server. `client` is redis-py's own client and parser, which the connector does not use for pages."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        password: str | None = None,
        tls: Path | None = None,
        config: Path | None = None,
    ) -> None:
        binary = shutil.which("redis-server")
        assert binary is not None, "these tests need a Redis: apt-get install redis-server"
        self.folder = folder
        self.password = password
        self.tls = tls
        [self.port] = free_ports(1)
        self._binary = binary
        self._options = options
        self._sentinel_config = config
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns once it answers."""
        command = [self._binary]
        if self._sentinel_config is None:
            command += ["--save", "", "--appendonly", "no"]
        else:
            command += [str(self._sentinel_config), "--sentinel"]
        command += ["--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--logfile", str(self.folder / "redis.log"), *self._options]
        if self.password is not None:
            command += ["--requirepass", self.password]
        if self.tls is None:
            command += ["--port", str(self.port)]
        else:
            command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            command += ["--tls-cert-file", str(self.tls / "cert.pem"), "--tls-key-file", str(self.tls / "key.pem")]
            command += ["--tls-ca-cert-file", str(self.tls / "cert.pem")]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(redis.RedisError, OSError), self.client() as client:
                if client.ping():
                    return
            assert self._process.poll() is None, (self.folder / "redis.log").read_text()
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)

    @contextlib.contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """A client that tries once and waits for two seconds."""
        tls = {"ssl": True, "ssl_ca_certs": str(self.tls / "cert.pem")} if self.tls else {}
        client = redis.Redis(
            port=self.port,
            password=self.password,
            socket_timeout=2.0,
            retry=Retry(NoBackoff(), 0),
            **tls,  # type: ignore[arg-type]
        )
        try:
            yield client
        finally:
            client.close()

    def run(self, *command: str | int) -> object:
        """One command, its answer."""
        with self.client() as client:
            return client.execute_command(*command)

    def names(self) -> list[bytes]:
        """All keys."""
        with self.client() as client:
            keys: list[Any] = client.keys("*")
            return sorted(keys)

    def num_clients(self) -> int:
        """Connections, without the one of this call."""
        with self.client() as client:
            return len(client.client_list()) - 1

    def freeze(self) -> None:
        freeze(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: what it held is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it, whatever its state."""
        if self._process is not None and self._process.poll() is None:
            self.kill()


@contextlib.contextmanager
def redis_server(
    folder: Path,
    *options: str,
    password: str | None = None,
    tls: Path | None = None,
    config: Path | None = None,
) -> Iterator[RedisServer]:
    """One that runs, for as long as the block does; with `config` a Sentinel."""
    server = RedisServer(folder, *options, password=password, tls=tls, config=config)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def redis_sentinel(folder: Path, primary: RedisServer, service: str) -> Iterator[RedisServer]:
    """A Sentinel that knows one primary, of which it alone decides that it is down: after a minute's silence, so that a
    busy machine is no dead primary."""
    folder.mkdir()
    config = folder / "sentinel.conf"
    config.write_text(
        f"sentinel monitor {service} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {service} 60000\nsentinel failover-timeout {service} 3000\n"
    )
    with redis_server(folder, config=config) as sentinel:
        yield sentinel


PATIENT: Mapping[str, Any] = {"timeout_s": 10.0, "connect_timeout_s": 10.0}
IMPATIENT: Mapping[str, Any] = {"timeout_s": 0.25, "connect_timeout_s": 0.25}
"""As in production."""


def options_of(server: RedisServer, **options: object) -> RedisOptions:
    """Without digests, for stores that are tested alone, and patient: a busy machine is not a dead Redis."""
    return RedisOptions(url=server.url, **{"digest": False, **PATIENT, **options})


def name_of(key: PageKey, prefix: str = "tandem") -> str:
    """What a page is called in Redis."""
    return f"{prefix}:{'/'.join(key.parts)}"


def make_certificate(folder: Path) -> Path:
    """cert.pem and key.pem for 127.0.0.1, its own authority. Returns the folder."""
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"), "-days", "2"]
    subprocess.run([*command, *files, *subject], check=True, capture_output=True)
    return folder
