"""Runs a compiled kernel on the very threads that torch computes with.

numba's own pool would be a second set of threads beside torch's: both spin while idle, so on a host with as many
threads as cores each slows the other, and numba's portable pool aborts the process when two Python threads use it. A
kernel here is a C function `void kernel(int64_t *arguments)`, handed to the OpenMP runtime that torch has loaded
already: same threads, same count (`torch.set_num_threads`), a few microseconds to start, safe from any Python thread.

arguments[0] is a counter: every thread draws the next task number from it until none is left, so uneven tasks balance
themselves and no thread needs to know its number.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

Launcher = Callable[[int, int], None]
"""Called with the number of threads and the address of the arguments."""


def launcher(kernel_address: int) -> Launcher:
    """Something that runs the kernel at this address on `num_threads` threads and returns when all are done."""
    alone = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(kernel_address)  # keeps the GIL: short work, cheap call
    gomp_parallel = _gomp_parallel()

    def launch(num_threads: int, arguments: int) -> None:
        if num_threads > 1 and gomp_parallel is not None:
            gomp_parallel(kernel_address, arguments, num_threads, 0)
        else:
            alone(arguments)

    return launch


@functools.cache
def _gomp_parallel() -> Callable[[int, int, int, int], object] | None:
    """`GOMP_parallel` of the runtime that torch is linked to (GNU's; LLVM's and Intel's export it too)."""
    for path in _openmp_libraries():
        try:
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
        return function
    logger.warning("torch's OpenMP runtime was not found: the compiled CPU kernels run on one thread")
    return None


def _openmp_libraries() -> list[Path]:
    """The OpenMP runtimes loaded in this process (Linux), else those that came with torch."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line}
        paths = [Path(name) for name in loaded if Path(name).name.startswith(("libgomp", "libomp", "libiomp"))]
    else:
        paths = [*(Path(torch.__file__).parent / "lib").glob("lib*omp*")]
    return sorted(paths, key=lambda path: ("torch" not in str(path), str(path)))
