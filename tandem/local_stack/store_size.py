"""How large the store in a stack's own folder may become, where it is not given."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import psutil

from tandem.connectors import CONNECTORS
from tandem.local_stack.instance_flags import given_settings
from tandem.local_stack.settings import StackSettings

_MAX_BYTES = 16 << 30
"""The stores' own default."""
_MIN_BYTES = 64 << 20
_SHARE = 4
"""One part of so many of the free space; the rest is for other programs."""


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
        free, in_memory = shutil.disk_usage(folder).free, _is_in_memory(folder)
    except OSError:
        return OwnStore()
    if in_memory:
        kv_bytes = None if settings.on_gpus else settings.kv_cache_bytes
        free = min(free, available - (kv_bytes or 0) * settings.num_planned)
    return OwnStore(max(_MIN_BYTES, min(_MAX_BYTES, free // _SHARE)), in_memory)


def _is_in_memory(folder: Path) -> bool:
    file_systems = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    paths = map(str, (resolved, *resolved.parents))
    return next((file_systems[path] for path in paths if path in file_systems), "") == "tmpfs"
