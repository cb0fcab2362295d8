"""Compiles the CPU kernels once for an installation, and says what they may use of this processor.

numba's cache compares a kernel's own file and not what the kernel calls in others. It also writes the name of new code,
which is often that of older code, before the code. So a stamp beside the files of a module says which sources they were
made of, and all files of other sources are removed before numba reads them.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import hashlib
import logging
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import llvmlite.binding
import numba
import torch
from numba import cfunc, config, njit, types
from numba.core import event
from numba.core.dispatcher import Dispatcher

from engine.machine import START_UP

logger = logging.getLogger(__name__)

Products = Literal["tiles", "pairs", "floats"]
"""How bfloat16 is multiplied: sixteen rows with sixteen columns at once, two numbers at once, or as float32."""

SIGNATURE = types.void(types.CPointer(types.int64))
"""Every kernel gets the address of its int64 arguments."""

kernel_part = functools.partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorates what kernels call, and Python does not: its wrappers for Python would take a tenth of the compilation."""


@functools.cache
def _announce_compilation(how_often: str) -> None:
    logger.info("%scompiling the CPU kernels, %s: 10 to 25 s", START_UP, how_often)


class _Compilation(event.Listener):
    """Announces, once in a process, that numba compiles, which it does not where it loads from its cache."""

    def __init__(self, how_often: str) -> None:
        self._how_often = how_often

    def on_start(self, event):
        _announce_compilation(self._how_often)

    def on_end(self, event):
        pass


def _compiled(body, *, cache: bool):
    started_s = time.monotonic()
    how_often = "once for this installation" if cache else "without a cache"
    with event.install_listener("numba:run_pass", _Compilation(how_often)):
        compiled = cfunc(SIGNATURE, cache=cache)(body)
    if not compiled.cache_hits:
        name = body.__qualname__.partition("_address.")[0]
        logger.info("%scompiled %s in %.1f s", START_UP, name, time.monotonic() - started_s)
    return compiled


def kernel(body):
    """Compiles `void body(int64 *arguments)`, or loads it from numba's cache beside the source, in NUMBA_CACHE_DIR or
    in the home folder, where that was made of the present sources. Of several processes that start together, one
    compiles and the others load. Without a writable cache it compiles at every start, some seconds in all. A cache that
    fails, for want of space or because of a damaged file, is removed, and the next start fills it.

    Raises TypeError if a variable around `body` holds a compiled function: numba would find nothing in its cache, which
    names such functions otherwise in each process.
    """
    if any(isinstance(cell.cell_contents, Dispatcher) for cell in body.__closure__ or ()):
        raise TypeError(f"{body.__qualname__}: functions that a kernel calls must be names of its module")
    with contextlib.ExitStack() as lock:
        with contextlib.suppress(OSError):  # no file, or a file system without locks
            fcntl.flock(lock.enter_context(open(body.__code__.co_filename, "rb")), fcntl.LOCK_EX)
        try:
            cache = _Cache.of(body)
        except Exception as error:  # RuntimeError, or another of a numba whose cache cannot be found
            logger.warning("%s is compiled at every start: %s; set NUMBA_CACHE_DIR", body.__qualname__, error)
            return _compiled(body, cache=False)
        try:
            cache.remove_other_sources()
            return _compiled(body, cache=True)
        except Exception as error:  # a full disk, or what unpickling raises of a damaged file
            logger.warning("cached code of %s in %s is removed, not used: %r", cache.module, cache.folder, error)
            with contextlib.suppress(OSError):
                cache.remove()
            return _compiled(body, cache=False)


def sources() -> list[Path]:
    """The files of which kernels are made."""
    own = Path(__file__)
    beside = [own.with_name("openmp.py"), own.with_name("simd.py")]
    return [own, *beside, *sorted(own.parents[1].glob("*/*_kernels.py"))]


@functools.cache
def sources_digest() -> str:
    """Of all of them, since one kernel calls what others are made of, and of the compiler's versions."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for file in sources():
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Cache:
    """numba's, of the kernels of one module. The caller holds the lock of the module's source."""

    folder: Path
    module: str

    @classmethod
    def of(cls, body) -> _Cache:
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


@functools.cache
def _features() -> frozenset[str]:
    """What numba compiles for: this processor's, unless NUMBA_CPU_FEATURES, NUMBA_CPU_NAME=generic or NUMBA_ENABLE_AVX
    leave some out. LLVM ends the process at an instruction without its feature."""
    named = getattr(config, "CPU_FEATURES", None)
    if named is not None:
        return frozenset(feature[1:] for feature in named.split(",") if feature.startswith("+"))
    host = {feature for feature, is_there in llvmlite.binding.get_host_cpu_features().items() if is_there}
    if not getattr(config, "ENABLE_AVX", True):
        host = {feature for feature in host if not feature.startswith("avx")}
    return frozenset(host)


@functools.cache
def has_wide_registers() -> bool:
    """Whether there are 32 registers of sixteen floats (AVX-512)."""
    return "avx512f" in _features()


@functools.cache
def has_tables() -> bool:
    """Whether an instruction looks up sixteen floats, or 32 numbers of sixteen bits, in a register (AVX-512)."""
    return {"avx512f", "avx512bw"} <= _features()


@functools.cache
def has_fused_products() -> bool:
    """Whether an instruction multiplies and adds (FMA; AVX-512 has it, ARM always): otherwise LLVM calls a function for
    each number."""
    return platform.machine() != "x86_64" or not _features().isdisjoint({"fma", "fma4", "avx512f"})


@functools.cache
def has_pairs() -> bool:
    """Whether there are instructions for pairs of bfloat16 (AVX512_BF16)."""
    return "avx512bf16" in _features()


@functools.cache
def multiplies_pairs() -> bool:
    """Whether pairs of bfloat16 are multiplied at twice the speed of float32, as by AMD's processors. Intel's multiply
    them at half of it: it is faster to convert them to float32 (benchmarks/LOG.md)."""
    return has_pairs() and llvmlite.binding.get_host_cpu_name().startswith("znver")


@functools.cache
def has_tiles() -> bool:
    """Whether kernels may multiply tiles of bfloat16 (AMX): Linux lets a process do so that asks for it."""
    needed = {"amx-tile", "amx-bf16", "avx512f", "avx512bf16"}
    return needed <= _features() and bool(torch.cpu._init_amx())


@functools.cache
def converts_float16() -> bool:
    """Whether float16 is converted by an instruction: otherwise LLVM calls functions that are not there."""
    return platform.machine() == "aarch64" or "f16c" in _features()
