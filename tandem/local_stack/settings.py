"""The settings of a local stack, and `--autoscale decode=1..3` as settings of its router."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from engine.config import Device, EngineKind, ModelImpl, Quantization
from engine.errors import suggestion
from engine.partition import Parallelism
from tandem.client.credentials import TOKEN
from tandem.connectors import split_connectors
from tandem.local_stack.desired_state import MAX_SIZE, ROLES, Role

MAX_ROUTER_WORKERS = 64
"""As many as the router's own `workers` allows."""
_LOCAL_HOSTS = ("127.0.0.1", "localhost")
Disaggregation = Literal["always", "auto", "never"]
_BOUNDS = re.compile(r"(?P<pool>[^=]*)=(?P<min>[0-9]{1,4})\.\.(?P<max>[0-9]{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """Sizes in the units that the names say. None leaves the choice to the service or to the machine.

    `tandem up --help` describes the fields that are options.
    """

    model: Path
    """Folder of the checkpoint."""
    model_name: str
    engine: EngineKind = "tandem"
    engine_python: str | None = None
    vllm_gpus: tuple[str, ...] | None = None
    """Those that engine_python's vLLM finds, as in CUDA_VISIBLE_DEVICES. None: it computes on something else."""
    num_prefill: int = 1
    num_decode: int = 1
    max_prefill: int = 0
    max_decode: int = 0
    """Planned sizes: memory and cores are divided for these. Ignored if smaller than the initial sizes; a pool may be
    resized beyond them."""
    connector: str = "shared_storage"
    kv_url: str | None = None
    disaggregation: Disaggregation = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    http_port: int | None = None
    """None disables the router's OpenAI API."""
    port_seed: int | None = None
    """Equal seeds try free ports in the same order, so that a stack has the same ones at each start.
    Not used beside another stack of this user."""
    dtype: str | None = None
    model_impl: ModelImpl = "auto"
    quantization: Quantization = "none"
    lora_adapters: Mapping[str, str] = field(default_factory=dict)
    """Folders by name."""
    device: Device = "cpu"
    """cuda: an instance gets GPUs of its own, as many as it has ranks, while there are enough."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    """Per instance; None: an equal part of the free memory, at most 2 GiB; on GPUs what the engine takes."""
    num_blocks: int | None = None
    """Per instance, instead of kv_cache_bytes: for tests with small pools."""
    threads: int | None = None
    """Per instance, divided among its ranks."""
    api_key: str | None = field(default=None, repr=False)
    """The clients' bearer token."""
    tls: bool = False
    pin: bool = True
    lease_s: float | None = None
    """How long a prefill instance holds KV without a sign of its reader."""
    start_timeout_s: float = 600.0
    """A large model takes minutes to load."""
    router_workers: int = 1
    """Processes of the router."""
    router_args: tuple[str, ...] = ()
    instance_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_decode <= MAX_SIZE:
            raise ValueError(f"decode must be between 1 and {MAX_SIZE}, not {self.num_decode}")
        if not 0 <= self.num_prefill <= MAX_SIZE:
            raise ValueError(f"prefill must be between 0 and {MAX_SIZE}, not {self.num_prefill}")
        if self.api_key is not None and not TOKEN.fullmatch(self.api_key):
            raise ValueError("--api-key must be printable ASCII without spaces")
        if self.engine == "vllm" and self.hands_over and (len(self.connectors) > 1 or "lmcache" in self.connectors):
            raise ValueError(
                f"--engine vllm does not hand KV over through {self.connector}: use shared_storage, redis or nixl"
            )
        if self.engine == "vllm" and self.parallelism.num_ranks > 1:
            raise ValueError(
                "--tensor-parallel-size and --pipeline-parallel-size are for the built-in engine; with --engine vllm "
                "use --instance-arg='--vllm-args={tensor_parallel_size: 2}'"
            )
        if self.engine == "vllm" and self.quantization != "none":
            raise ValueError(
                "--quantization is for the built-in engine; with --engine vllm use "
                "--instance-arg='--vllm-args={quantization: …}'"
            )
        if (name := self.model_name) in self.lora_adapters:
            raise ValueError(f"--lora-adapter {name}=…: the model has this name; give another one to the adapter")
        if self.engine_python is not None and self.engine != "vllm":
            raise ValueError("--engine-python is for --engine vllm")
        split_connectors(self.connector, self.kv_url, None, {})
        if self.num_prefill == 0 and self.disaggregation == "always":
            raise ValueError("disaggregation 'always' needs at least one prefill instance")

    @property
    def has_page(self) -> bool:
        """Whether the router serves the live page: not where clients of other machines could use it, or hold the key
        that it asks for."""
        is_local = self.http_port is not None and self.host in _LOCAL_HOSTS
        return is_local and (self.api_key is not None or not self.tls)

    @property
    def parallelism(self) -> Parallelism:
        """How each instance divides the model."""
        return Parallelism(self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def on_gpus(self) -> bool:
        """Whether the instances compute on GPUs: vLLM's build decides, of the built-in engine `device`."""
        return self.vllm_gpus is not None if self.engine == "vllm" else self.device == "cuda"

    @property
    def num_planned(self) -> int:
        """Instances of both pools at their planned sizes."""
        return max(self.num_prefill, self.max_prefill) + max(self.num_decode, self.max_decode)

    @property
    def hands_over(self) -> bool:
        """Whether there will be prefill instances."""
        return max(self.num_prefill, self.max_prefill) > 0

    @property
    def has_connector(self) -> bool:
        """Whether instances can hand KV over. Some models run in vLLM whose KV cannot be: without prefill instances it
        gets no connector."""
        return self.engine == "tandem" or self.hands_over

    @property
    def connectors(self) -> list[str]:
        return self.connector.split(",")


class Bounds(NamedTuple):
    """Sizes that the autoscaler may give a pool, both included."""

    min_size: int
    max_size: int


def parse_bounds(texts: Iterable[str]) -> dict[Role, Bounds]:
    """The bounds by pool. Raises ValueError, which says what to type."""
    bounds: dict[Role, Bounds] = {}
    for text in texts:
        matched = _BOUNDS.fullmatch(text)
        if matched is None:
            raise ValueError(f"{text!r} is not POOL=MIN..MAX: write decode=1..3")
        role = next((role for role in ROLES if role == matched["pool"]), None)
        if role is None:
            raise ValueError(unknown_pool(matched["pool"]))
        if role in bounds:
            raise ValueError(f"the {role} pool is named twice: give one range")
        bounds[role] = Bounds(int(matched["min"]), int(matched["max"]))
        if not 1 <= bounds[role].min_size <= bounds[role].max_size <= MAX_SIZE:
            raise ValueError(f"{text!r}: a range is MIN..MAX with 1 <= MIN <= MAX <= {MAX_SIZE}, as in {role}=1..3")
    return bounds


def autoscaled(settings: StackSettings, bounds: Mapping[Role, Bounds]) -> StackSettings:
    """The settings of a stack whose router resizes its pools within `bounds`; a pool without bounds keeps its size.

    Raises ValueError if an initial size is outside its bounds, or 0.
    """
    if not bounds:
        return settings
    flags = ["--autoscaler-enabled"]
    sizes: dict[Role, int] = {"prefill": settings.num_prefill, "decode": settings.num_decode}
    for role, size in sizes.items():
        min_size, max_size = bounds.get(role, (size, size))
        if not max(min_size, 1) <= size <= max_size:
            allowed = f"{min_size}..{max_size}" if role in bounds else f"1..{MAX_SIZE}, which autoscaling requires"
            raise ValueError(f"the {role} pool starts with {size} instances, outside {allowed}: set --{role} too")
        flags += [f"--autoscaler-{role}-min-size", str(min_size), f"--autoscaler-{role}-max-size", str(max_size)]
    max_sizes = {role: bounds[role].max_size for role in bounds}
    return replace(
        settings,
        max_prefill=max_sizes.get("prefill", 0),
        max_decode=max_sizes.get("decode", 0),
        router_args=(*flags, *settings.router_args),
    )


def unknown_pool(name: str, rest: str = "") -> str:
    """The message for a pool that does not exist; `rest` follows a suggested name."""
    hint = suggestion(name + rest, [role + rest for role in ROLES], "the pools are prefill and decode")
    return f"there is no pool {name!r}{hint}"
