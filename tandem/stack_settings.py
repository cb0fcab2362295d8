"""What a local stack is told. Frozen; the command line and the tests make one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CONNECTORS = ("shared_storage", "redis", "nixl", "lmcache")
"""Those with a short name, of the ones that instance/config.py knows and a stack of several instances can use."""
Disaggregation = Literal["always", "auto", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """Sizes in the units that the names say. Fields that are None leave the choice to the service or to the machine."""

    model: Path
    """Folder of the checkpoint."""
    model_name: str
    """What clients call it."""
    num_prefill: int = 1
    num_decode: int = 1
    max_prefill: int = 0
    max_decode: int = 0
    """Sizes that the pools are planned to grow to: memory and cores are shared out for so many. Smaller ones than the
    pools begin with say nothing; a pool may be resized beyond them."""
    connector: str = "shared_storage"
    """A short name, or module:Class of one's own; several, separated by commas: the first one hands over."""
    kv_url: str | None = None
    """Server of the redis connector, or of lmcache: tcp:// of its server, or redis://. lmcache without: on disk."""
    disaggregation: Disaggregation = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    """Of the router; 0 takes a free one."""
    http_port: int | None = None
    """Of the router's OpenAI HTTP API; 0 takes a free one, None serves none."""
    dtype: str | None = None
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    """Per instance; None takes an equal part of the free memory, at most 2 GiB."""
    num_blocks: int | None = None
    """Per instance, in place of kv_cache_bytes: for tests that want small pools."""
    threads: int | None = None
    """Per instance; None: as many as it has cores."""
    tls: bool = False
    """Everybody speaks mTLS, by a CA that is made for this stack."""
    pin: bool = True
    """Give every instance cores of its own if there are enough."""
    lease_s: float | None = None
    """How long a prefill instance holds KV without a sign of its reader."""
    start_timeout_s: float = 600.0
    """A large model takes minutes to load."""
    router_args: tuple[str, ...] = ()
    instance_args: tuple[str, ...] = ()
    """Further flags, as `python -m router --help` and `python -m decode_service --help` show them."""

    def __post_init__(self) -> None:
        if self.num_prefill < 0 or self.num_decode < 1:
            raise ValueError(
                f"a stack has at least one decode instance and no negative number of prefill instances: "
                f"{self.num_prefill} prefill, {self.num_decode} decode"
            )
        if "redis" in self.connectors and self.kv_url is None:
            raise ValueError("the redis connector needs the address of a Redis: --kv-url redis://host:port/0")
        if self.kv_url is not None and not {"redis", "lmcache"} & set(self.connectors):
            raise ValueError(
                f"the connector {self.connector} has no server: --kv-url is for --connector redis and lmcache"
            )
        if self.num_prefill == 0 and self.disaggregation == "always":
            raise ValueError("disaggregation 'always' needs at least one prefill instance")

    @property
    def num_planned(self) -> int:
        """Instances of both pools when they are as large as planned."""
        return max(self.num_prefill, self.max_prefill) + max(self.num_decode, self.max_decode)

    @property
    def connectors(self) -> list[str]:
        """Their names, one by one."""
        return self.connector.split(",")
