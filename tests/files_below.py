"""The files of a folder that other processes write to and clear at the same time."""

from __future__ import annotations

import os
from pathlib import Path

from kv_transfer.stores.files import TEMP_PREFIX


def files_below(folder: Path) -> list[Path]:
    """Every regular file, sorted; no link is followed. A folder that is removed meanwhile is ignored, where
    `Path.rglob` raises, and so is the file that a sweeper creates for a moment to read the clock."""
    paths = (Path(where, name) for where, _, names in os.walk(folder) for name in names)
    return sorted(path for path in paths if path.is_file() and not path.is_symlink() and not _is_probe(path))


def _is_probe(path: Path) -> bool:
    return path.parent.name == "v1" and path.name.startswith(TEMP_PREFIX)
