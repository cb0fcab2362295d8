"""From a stack's settings to its members' command lines: who listens where, on which cores, with how much memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.machine import available_bytes, share_cores, usable_cores
from tandem.member import MemberSpec
from tandem.stack_settings import CONNECTORS, StackSettings

_MAX_KV_BYTES = 2 << 30
_KV_SHARE = 0.4
"""Of the free memory, for the KV of all instances together; weights and activations need the rest."""


def member_specs(settings: StackSettings, folder: Path, ports: Sequence[int]) -> list[MemberSpec]:
    """The router, which gets the first port and the last, then the prefill and the decode instances."""
    names = [f"prefill-{index}" for index in range(settings.num_prefill)]
    names += [f"decode-{index}" for index in range(settings.num_decode)]
    addresses = {name: f"{settings.host}:{port}" for name, port in zip(names, ports[1:-1], strict=True)}
    cores = dict(zip(names, share_cores(usable_cores(), len(names), settings.pin), strict=True))
    router = f"{settings.host}:{ports[0]}"
    router_flags = [*_router_flags(settings, addresses), "--admin-listen", admin_address(ports)]
    specs = [_spec("router", router, folder, [*router_flags, *settings.router_args])]
    for name, address in addresses.items():
        flags = [*_instance_flags(settings, folder, name, cores[name]), *settings.instance_args]
        specs.append(_spec(name, address, folder, flags, threads=_threads(settings, cores[name])))
    return specs


def admin_address(ports: Sequence[int]) -> str:
    """Where the router answers the operators of the stack: on this machine alone, whatever its clients' address is."""
    return f"127.0.0.1:{ports[-1]}"


def _spec(name: str, address: str, folder: Path, flags: Sequence[str], threads: int = 1) -> MemberSpec:
    module = "router" if name == "router" else f"{name.partition('-')[0]}_service"
    ready_file = folder / "ready" / name
    return MemberSpec(
        name=name,
        argv=(sys.executable, "-m", module, "--listen", address, "--ready-file", str(ready_file), *flags),
        address=address,
        ready_file=ready_file,
        log_file=folder / "logs" / f"{name}.log",
        # TMPDIR: sockets and whatever else a member makes are to go with the stack's folder. The thread counts are
        # those of the libraries that read only the environment.
        env={"TMPDIR": str(folder / "run"), "OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)},
    )


def _router_flags(settings: StackSettings, addresses: dict[str, str]) -> Iterator[str]:
    yield from ("--model", str(settings.model), "--model-name", settings.model_name)
    yield from ("--disaggregation", settings.disaggregation)
    for role in ("prefill", "decode"):
        pool = [address for name, address in addresses.items() if name.startswith(role)]
        if pool:
            yield from (f"--{role}", ",".join(pool))
    # The router is up seconds before the instances; on one machine it costs nothing to look for them often.
    yield from ("--pools-max-backoff-s", "0.2", "--channel-max-backoff-ms", "200")
    if settings.lease_s is not None:
        yield from ("--disaggregation-lease-s", str(settings.lease_s))


def _instance_flags(settings: StackSettings, folder: Path, name: str, cores: tuple[int, ...]) -> Iterator[str]:
    yield from ("--model", str(settings.model), "--served-model-name", settings.model_name, "--instance-id", name)
    yield from ("--num-threads", str(_threads(settings, cores)))
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
    if settings.num_blocks is not None:
        yield from ("--num-blocks", str(settings.num_blocks))
    else:
        yield from ("--kv-cache-bytes", str(_kv_cache_bytes(settings)))
    for flag, value in (
        ("--dtype", settings.dtype),
        ("--max-model-len", settings.max_model_len),
        ("--lease-s", settings.lease_s),
    ):
        if value is not None:
            yield from (flag, str(value))


def _threads(settings: StackSettings, cores: tuple[int, ...]) -> int:
    """Threads of one instance. Without cores of its own it gets an equal share of all, at least one."""
    if settings.threads is not None:
        return settings.threads
    return len(cores) or max(1, len(usable_cores()) // (settings.num_prefill + settings.num_decode))


def _kv_cache_bytes(settings: StackSettings) -> int:
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes
    num_instances = settings.num_prefill + settings.num_decode
    return min(_MAX_KV_BYTES, int(available_bytes() * _KV_SHARE) // num_instances)
