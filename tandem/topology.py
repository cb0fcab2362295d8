"""From a stack's settings to its members' command lines: who listens where, on which cores, with how much memory.

What an instance gets is decided once, at the start, so that it is the same for all: an equal share of the memory, and
as many cores and threads, as if both pools had the largest size that they were planned for. One that comes later takes
a share of cores that nobody has; when all are taken it has no cores of its own and runs where the system puts it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.machine import available_bytes, usable_cores
from tandem.credentials import INSTANCE, ROUTER, TLS_FOLDER
from tandem.machine import share_cores
from tandem.member import MemberSpec
from tandem.stack_settings import CONNECTORS, StackSettings

_MAX_KV_BYTES = 2 << 30
_KV_SHARE = 0.4
"""Of the free memory, for the KV of all instances together; weights and activations need the rest."""


class Topology:
    """The members of one stack, whose private folder is `folder`. Owned by LocalStack."""

    def __init__(self, settings: StackSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self.stack_address = f"unix:{folder / 'stack.sock'}"
        """Where the owner answers the routers of the stack (stack_service.py)."""
        self.kv_cache_bytes = _kv_cache_bytes(settings)
        """Of each instance; None where it is told in blocks."""
        shares = share_cores(usable_cores(), settings.num_planned, settings.pin)
        self._free_cores = [share for share in shares if share]
        self._cores: dict[str, tuple[int, ...]] = {}

    def router(self, address: str, admin_address: str, http_address: str | None = None) -> MemberSpec:
        """The router, which follows the owner of the stack, whoever comes and goes."""
        flags = [*_router_flags(self._settings), "--stack", self.stack_address, "--admin-listen", admin_address]
        flags += _tls_flags(self._settings, self._folder, ROUTER)
        if http_address is not None:
            flags += ["--http-listen", http_address]
        return _spec("router", address, self._folder, [*flags, *self._settings.router_args])

    def instance(self, name: str, address: str) -> MemberSpec:
        """prefill-0, decode-1 …; it has its cores until `release`."""
        if self._free_cores:
            self._cores[name] = self._free_cores.pop(0)
        cores = self._cores.get(name, ())
        threads = _threads(self._settings, cores)
        flags = [*_instance_flags(self._settings, self._folder, name, cores), "--num-threads", str(threads)]
        flags += _tls_flags(self._settings, self._folder, INSTANCE)
        if self.kv_cache_bytes is not None:
            flags += ["--kv-cache-bytes", str(self.kv_cache_bytes)]
        return _spec(name, address, self._folder, [*flags, *self._settings.instance_args], threads=threads)

    def release(self, name: str) -> None:
        """That instance is gone: the next one gets its cores."""
        if name in self._cores:
            self._free_cores.append(self._cores.pop(name))


def _spec(name: str, address: str, folder: Path, flags: Sequence[str], threads: int = 1) -> MemberSpec:
    module = "router" if name == "router" else f"{name.partition('-')[0]}_service"
    ready_file, run_folder = folder / "ready" / name, folder / "run" / name
    return MemberSpec(
        name=name,
        argv=(sys.executable, "-m", module, "--listen", address, "--ready-file", str(ready_file), *flags),
        address=address,
        ready_file=ready_file,
        log_file=folder / "logs" / f"{name}.log",
        run_folder=run_folder,
        # TMPDIR: sockets and whatever else a member makes are to go with it. The thread counts are those of the
        # libraries that read only the environment.
        env={"TMPDIR": str(run_folder), "OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)},
    )


def _router_flags(settings: StackSettings) -> Iterator[str]:
    yield from ("--model", str(settings.model), "--model-name", settings.model_name)
    yield from ("--disaggregation", settings.disaggregation)
    # The router is up seconds before the instances; on one machine it costs nothing to look for them often.
    yield from ("--pools-max-backoff-s", "0.2", "--channel-max-backoff-ms", "200")
    if settings.lease_s is not None:
        yield from ("--disaggregation-lease-s", str(settings.lease_s))


def _instance_flags(settings: StackSettings, folder: Path, name: str, cores: tuple[int, ...]) -> Iterator[str]:
    yield from ("--model", str(settings.model), "--served-model-name", settings.model_name, "--instance-id", name)
    if cores:
        yield from ("--cpu-cores", f"[{', '.join(map(str, cores))}]")
    yield from ("--kv-connector", settings.connector)
    names = set(settings.connectors)
    if "shared_storage" in names or ("lmcache" in names and settings.kv_url is None):
        yield from ("--kv-folder", str(folder / "store"))
    if names & set(CONNECTORS):
        yield from ("--kv-secret-file", str(folder / "kv_secret"))
    if settings.kv_url is not None:
        yield from ("--kv-url", settings.kv_url)
    for flag, value in (
        ("--num-blocks", settings.num_blocks),
        ("--dtype", settings.dtype),
        ("--max-model-len", settings.max_model_len),
        ("--lease-s", settings.lease_s),
    ):
        if value is not None:
            yield from (flag, str(value))


def _tls_flags(settings: StackSettings, folder: Path, name: str) -> list[str]:
    """The certificate of `name` and the stack's CA. The instances believe whoever has one of its certificates, and so
    does the router's admin listener; clients of the router need none."""
    if not settings.tls:
        return []
    files = folder / TLS_FOLDER
    pair = ["--tls-cert-file", str(files / f"{name}.crt"), "--tls-key-file", str(files / f"{name}.key")]
    return [*pair, "--tls-ca-file", str(files / "ca.crt"), "--tls-peer-name", INSTANCE]


def _threads(settings: StackSettings, cores: tuple[int, ...]) -> int:
    """Threads of one instance. Without cores of its own it gets an equal share of all, at least one."""
    if settings.threads is not None:
        return settings.threads
    return len(cores) or max(1, len(usable_cores()) // settings.num_planned)


def _kv_cache_bytes(settings: StackSettings) -> int | None:
    if settings.num_blocks is not None:
        return None
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes
    return min(_MAX_KV_BYTES, int(available_bytes() * _KV_SHARE) // settings.num_planned)
