"""Connectors whose pages are files: shared_storage, and lmcache on a disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.errors import EngineError
from kv_transfer.lmcache_names import ObjectName
from kv_transfer.store import PageKey
from tandem.transfer_bench.half import Shape
from tandem.transfer_bench.media import Common
from tandem.transfer_bench.options import Options
from tandem.transfer_bench.raw import Raw, RawFiles

_ROUNDS_IN_MEMORY = 8
_MOUNTS = Path("/proc/mounts")


@dataclass(kw_only=True)
class SharedStorageMedium(Common):
    """Files in a folder of their own within `parent`."""

    name: str = "shared_storage"
    connector: str = "shared_storage"
    parent: Path | None = None
    keeps_pages: bool = True
    goals: dict[str, float] = field(default_factory=lambda: {"off": 0.80, "on": 0.50})

    @property
    def where(self) -> str:
        folder = self.parent or Path(tempfile.gettempdir())
        return f"{folder} ({file_system(folder)})"

    @contextlib.contextmanager
    def opened(self, shape: Shape) -> Iterator[None]:
        if self.parent is None:
            self.parent = _roomy_folder(shape)
        elif not self.parent.is_dir():
            raise EngineError(f"there is no folder {self.parent}: mkdir -p {self.parent}, or another --kv-folder")
        with self.folder_in(self.parent):
            yield

    def named(self) -> Options:
        assert self.folder is not None
        return {"path": str(self.folder / "pages")}

    def raws(self, shape: Shape, kv: torch.Tensor) -> list[Raw]:
        return [RawFiles(self.path_of, shape, kv)]

    def path_of(self, key: PageKey) -> Path:
        """The file of a full block."""
        assert self.folder is not None
        return self.folder.joinpath("pages", *key.parts)

    def clear(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.path_of(key).unlink(missing_ok=True)


@dataclass(kw_only=True)
class LMCacheMedium(SharedStorageMedium):
    """LMCache's files on a disk, in a folder of their own within `parent`."""

    name: str = "lmcache"
    connector: str = "lmcache"
    goals: dict[str, float] = field(default_factory=dict)

    def path_of(self, key: PageKey) -> Path:
        assert self.folder is not None
        return self.folder / "pages" / "v1" / "pages" / ObjectName.of(key).file_name


def file_system(folder: Path) -> str:
    """The kind of the file system that a folder is on, as the kernel calls it."""
    best, kind = Path(), "unknown"
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text().splitlines():
            _, mount, found, *_ = line.split()
            path = Path(mount.replace("\\040", " "))
            if folder.resolve().is_relative_to(path) and len(path.parts) >= len(best.parts):
                best, kind = path, found
    return kind


def _roomy_folder(shape: Shape) -> Path:
    """Memory if there is enough of it: a disk would say more about the disk than about the connector."""
    shm = Path("/dev/shm")
    needed = _ROUNDS_IN_MEMORY * shape.num_bytes
    if shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > needed:
        return shm
    return Path(tempfile.gettempdir())
