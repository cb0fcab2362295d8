"""The nixl connector: memory of another process, over whatever UCX chooses or is told."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kv_transfer.nixl_agent import load_bindings
from kv_transfer.nixl_ucx import UcxSettings
from kv_transfer.store import PageKey
from tandem.transfer_bench.half import Shape
from tandem.transfer_bench.media import Common
from tandem.transfer_bench.options import Options
from tandem.transfer_bench.raw import Raw, RawNixl


@dataclass(kw_only=True)
class NixlMedium(Common):
    """Memory of another process; `tls` is UCX_TLS, empty for UCX's own choice."""

    name: str = "nixl"
    connector: str = "nixl"
    tls: str = ""
    keeps_pages: bool = False
    goals: dict[str, float] = field(default_factory=lambda: {"off": 0.80, "on": 0.60})
    _raw: RawNixl | None = None

    def __post_init__(self) -> None:
        if self.tls:
            self.name = f"nixl/{self.tls}"

    @property
    def where(self) -> str:
        return "UCX" if self._raw is None else f"UCX by {transport(self._raw.transport)}"

    @contextlib.contextmanager
    def opened(self, shape: Shape) -> Iterator[None]:
        load_bindings()
        before = tempfile.tempdir
        with self.folder_in(None) as folder:
            tempfile.tempdir = str(folder)  # UCX's log has a name until its library is loaded
            try:
                yield
            finally:
                tempfile.tempdir = before

    def named(self) -> Options:
        return {"ucx_tls": self.tls} if self.tls else {}

    def raws(self, shape: Shape, kv: torch.Tensor) -> list[Raw]:
        options = {name: str(self.options.get(name, "")) for name in ("ucx_tls", "ucx_net_devices")}
        address = str(self.options.get("address", "127.0.0.1"))
        self._raw = RawNixl(UcxSettings(self.tls or options["ucx_tls"], options["ucx_net_devices"], address), shape, kv)
        return [self._raw]

    def clear(self, keys: Sequence[PageKey]) -> None:
        return None


def transport(lanes: str) -> str:
    """What UCX said it chose, in one word for people, and then in its own words."""
    kinds = (("cuda_ipc", "NVLink"), ("rc_", "RDMA"), ("dc_", "RDMA"), ("cma", "CMA"), ("xpmem", "shared memory"))
    kind = next((kind for name, kind in kinds if name in lanes), "TCP" if "tcp" in lanes else "unknown")
    return f"{kind} [{' '.join(lanes.split())}]"
