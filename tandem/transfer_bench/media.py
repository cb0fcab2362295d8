"""What each connector is told for a measurement, its ceilings, and what has to be cleared away after it.

A medium is opened (`with medium.opened(...)`), makes any number of connectors' configurations and raw readers, and
clears away whatever was put into it: pages as soon as their round is over, the rest at the end, also after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from instance.connectors import CONNECTORS
from kv_transfer.secret import ensure_secret
from kv_transfer.store import PageKey
from tandem.transfer_bench.half import Shape
from tandem.transfer_bench.options import Options
from tandem.transfer_bench.raw import Raw

_SHUTDOWN_S = 1.0


class Medium(Protocol):
    """One connector over one thing that carries pages."""

    name: str
    goals: dict[str, float]
    """By digests "off" and "on": the share of the first raw ceiling that the connector is to reach."""
    keeps_pages: bool
    """A store: every round has pages of its own."""
    folder: Path | None
    """Of this measurement alone, while it is opened; it goes with all that is in it."""
    num_lives: int
    """How often connections are made anew, since one may be slow for its whole life."""

    @property
    def where(self) -> str:
        """What carries the pages, for people."""
        ...

    def opened(self, shape: Shape) -> contextlib.AbstractContextManager[None]:
        """Everything the methods below need is there."""
        ...

    def config(self, digest: bool) -> KVConnectorConfig:
        """For one end."""
        ...

    def raws(self, shape: Shape, kv: torch.Tensor) -> list[Raw]:
        """Ceilings; the first one is what shares are of."""
        ...

    def clear(self, keys: Sequence[PageKey]) -> None:
        """Remove these pages."""
        ...


@dataclass(kw_only=True)
class Common:
    """What media have in common: their class, given options, a folder of their own with the digests' key in it."""

    connector: str
    options: Options = field(default_factory=dict)
    num_lives: int = 1
    folder: Path | None = None

    def config(self, digest: bool) -> KVConnectorConfig:
        """The given options, and on top of them what only the measurement can know."""
        ours: Options = {"digest": digest, **self.named()}
        if digest and "kv_secret_file" not in self.options:
            assert self.folder is not None
            ours["kv_secret_file"] = str(self.folder / "secret")
        if self.connector in CONNECTORS:
            ours["shutdown_timeout_s"] = _SHUTDOWN_S
        return KVConnectorConfig(class_path=CONNECTORS.get(self.connector, self.connector), options=self.options | ours)

    def named(self) -> Options:
        """What the place itself is called in the options."""
        return {}

    @contextlib.contextmanager
    def folder_in(self, parent: Path | None) -> Iterator[Path]:
        """A private folder for as long as the block runs; `folder` meanwhile."""
        try:
            folder = tempfile.mkdtemp(prefix="tandem-transfer-", dir=parent)
        except OSError as error:
            raise EngineError(
                f"no folder can be made in {parent or tempfile.gettempdir()}: {error.strerror}"
            ) from error
        self.folder = Path(folder)
        try:
            ensure_secret(self.folder / "secret")
            yield self.folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(kw_only=True)
class OtherMedium(Common):
    """Any other connector, a third party's too: no ceiling, and told nothing but the given options."""

    name: str = ""
    keeps_pages: bool = False
    goals: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = self.name or self.connector

    @property
    def where(self) -> str:
        return ""

    @contextlib.contextmanager
    def opened(self, shape: Shape) -> Iterator[None]:
        with self.folder_in(None):
            yield

    def config(self, digest: bool) -> KVConnectorConfig:
        if self.connector in CONNECTORS:
            return super().config(digest)
        return KVConnectorConfig(class_path=self.connector, options=self.options)

    def raws(self, shape: Shape, kv: torch.Tensor) -> list[Raw]:
        return []

    def clear(self, keys: Sequence[PageKey]) -> None:
        return None
