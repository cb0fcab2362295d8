"""Where Python code comes from: the modules of child processes, and the objects that settings name.

`python -m` and `python -c` search the working directory before all else, so that a `router.py` or `queue.py` there
would run in place of the module of that name. The command `tandem` does not search it, nor do its children.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""module:Name, as `named` takes it."""


def child_environment() -> dict[str, str]:
    """Variables for a child that runs Python: it searches the working directory only where this process does, as
    `python -m tandem` in a checkout, whose packages may be nowhere else."""
    return {} if _searches_working_directory() else {"PYTHONSAFEPATH": "1"}


def named(path: str) -> Any:
    """What `module:Name` names. The module is searched in the working directory after all other places. Raises
    ImportError or AttributeError."""
    module, _, name = path.partition(":")
    with _working_directory_last():
        return getattr(importlib.import_module(module), name)


def _searches_working_directory() -> bool:
    with suppress(FileNotFoundError):  # it was deleted
        here = os.path.realpath("")
        return any(os.path.realpath(entry) == here for entry in sys.path)
    return False


@contextmanager
def _working_directory_last() -> Iterator[None]:
    """Not longer than for one import: an optional package that is missing must not be found there."""
    if _searches_working_directory():
        yield
        return
    sys.path.append("")
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove("")
