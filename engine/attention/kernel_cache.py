"""Numba's cache of the kernels of a module: a stamp beside its files says which sources they were made of.

numba compares the module's own file and not what its kernels call in others. It also writes the name of new code, which
is often that of older code, before the code. So all files of other sources are removed before numba reads them.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,no-any-unimported"

from __future__ import annotations

import functools
import glob
import hashlib
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import numba

_ENGINE = Path(__file__).parents[1]


def sources() -> list[Path]:
    """The files of which kernels are made."""
    attention = _ENGINE / "attention"
    return [attention / "compilation.py", attention / "simd.py", *sorted(_ENGINE.glob("*/*_kernels.py"))]


@functools.cache
def sources_digest() -> str:
    """Of all of them, since one kernel calls what others are made of, and of the compiler's versions."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for file in sources():
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class KernelCache:
    """The caller holds the lock of the module's source."""

    folder: Path
    module: str

    @classmethod
    def of(cls, body) -> KernelCache:
        """Of the module of this kernel. Raises RuntimeError where numba finds no folder to write to."""
        folder = numba.njit(cache=True)(body).stats.cache_path  # compiles nothing
        return cls(Path(folder), Path(body.__code__.co_filename).stem)

    def remove_other_sources(self) -> None:
        """Removes the files unless they were made of these sources."""
        stamp = self.folder / f"{self.module}.sources"
        if not stamp.exists() or stamp.read_text(errors="replace") != sources_digest():
            self.remove()
            stamp.write_text(sources_digest())

    def remove(self) -> None:
        """Sorted, code goes before the index that names it: at no moment does an index lack code that is there."""
        for file in sorted(self.folder.glob(f"{glob.escape(self.module)}.*.nb[ic]*")):
            file.unlink(missing_ok=True)
