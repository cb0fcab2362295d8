"""How large the store in a stack's own folder may become, where it is not given."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from tandem.connectors import CONNECTORS
from tandem.local_stack.settings import StackSettings

if TYPE_CHECKING:
    from instance.config import TransferSection

_MAX_BYTES = 16 << 30
"""The stores' own default."""
_MIN_BYTES = 64 << 20
_SHARE = 4
"""One part of so many of the free space; the rest is for other programs."""


class StoreSize(NamedTuple):
    num_bytes: int
    in_memory: bool
    """The folder is on a tmpfs: its files take memory."""


def has_store(settings: StackSettings) -> bool:
    """Whether the instances keep KV in the stack's folder: not where flags or the environment give them another one.
    Raises ValueError for flags or variables with which no instance starts."""
    on_disk = "lmcache" in settings.connectors and settings.kv_url is None
    if not (settings.has_connector and ("shared_storage" in settings.connectors or on_disk)):
        return False
    given = _given(settings)
    return given is None or given.folder is None


def store_size(settings: StackSettings, folder: Path, available: int) -> StoreSize | None:
    """Of the store in `folder`. `available` bytes of memory limit it on a tmpfs, whose free space promises more.

    None leaves it to the store: there is none here, its size is given, or a connector of unknown options would get the
    size too. Raises ValueError for flags or variables with which no instance starts.
    """
    if not has_store(settings) or not set(settings.connectors) <= set(CONNECTORS) or _has_size(settings):
        return None
    try:
        free, in_memory = shutil.disk_usage(folder).free, _is_in_memory(folder)
    except OSError:
        return None
    if in_memory:
        given = None if settings.on_gpus else settings.kv_cache_bytes
        free = min(free, available - (given or 0) * settings.num_planned)
    return StoreSize(max(_MIN_BYTES, min(_MAX_BYTES, free // _SHARE)), in_memory)


def _given(settings: StackSettings) -> TransferSection | None:
    """What the instances' own flags, their settings file and the environment say; None: nothing."""
    if not settings.instance_args and not any(name.upper().startswith("TANDEM_TRANSFER__") for name in os.environ):
        return None
    from tandem.local_stack.instance_flags import instance_settings  # late: it takes half a second

    return instance_settings(settings.instance_args).transfer


def _has_size(settings: StackSettings) -> bool:
    """Whether the instances get a size from elsewhere."""
    if (given := _given(settings)) is None:
        return False
    options = {name.rpartition(".")[2] for name in given.options}
    return given.capacity_bytes is not None or "capacity_bytes" in options


def _is_in_memory(folder: Path) -> bool:
    file_systems = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    paths = map(str, (resolved, *resolved.parents))
    return next((file_systems[path] for path in paths if path in file_systems), "") == "tmpfs"
