"""A Redis for the length of a measurement: loopback, a random port, nothing on disk, gone with this process."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from engine.errors import EngineError
from tandem.machine import free_ports

INSTALL = "apt-get install redis-server, or --kv-url redis://host:port/0 for one that runs"
_START_S = 10.0
_WITH_US = (
    "import os, sys; from serving.lifetime import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)


def installed() -> str | None:
    """The server's program, if there is one."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


@contextlib.contextmanager
def private_redis(folder: Path, max_bytes: int) -> Iterator[str]:
    """Its URL, for as long as the block runs. Raises EngineError."""
    program = installed()
    if program is None:
        raise EngineError(f"no redis-server is installed: {INSTALL}")
    [port] = free_ports(1)
    server = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
    server += ["--appendonly", "no", "--maxmemory", str(max_bytes), "--maxmemory-policy", "noeviction"]
    process = subprocess.Popen(
        [sys.executable, "-c", _WITH_US, str(os.getpid()), *server],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        _wait(port, process)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            if connection.recv(16).startswith(b"+PONG"):
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise EngineError(f"the private redis-server did not start (status {process.poll()})")
        time.sleep(0.02)
