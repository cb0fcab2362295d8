"""Runs compiled kernels on torch's own threads.

numba's pool would be a second set of threads: both spin while idle and so slow each other down where there are as many
threads as cores, and numba's portable pool aborts the process when two Python threads use it. A kernel here is a C
function `void kernel(int64_t *arguments)`, run by the OpenMP runtime that torch has loaded: the same threads, the same
number (`torch.set_num_threads`), started in a few microseconds, from any Python thread.

arguments[0] is a counter from which every thread takes the next task number, which balances uneven tasks.
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
"""Takes the number of threads and the address of the arguments."""


def launcher(kernel_address: int) -> Launcher:
    """A function that runs the kernel at this address on `num_threads` threads and waits for them."""
    alone = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(kernel_address)  # keeps the GIL: cheap calls for short work
    gomp_parallel = _gomp_parallel()

    def launch(num_threads: int, arguments: int) -> None:
        if num_threads > 1 and gomp_parallel is not None:
            gomp_parallel(kernel_address, arguments, num_threads, 0)
        else:
            alone(arguments)

    return launch


@functools.cache
def launcher_for(address_of: Callable[[str], int], dtype: torch.dtype) -> Launcher:
    """The launcher of a kernel's version for `dtype`; `address_of` compiles it."""
    return launcher(address_of(str(dtype).removeprefix("torch.")))


@functools.cache
def _gomp_parallel() -> Callable[[int, int, int, int], object] | None:
    """`GOMP_parallel` of torch's OpenMP runtime: GNU's, or LLVM's and Intel's, which export it too."""
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
    """The OpenMP runtimes loaded in this process (Linux), else those shipped with torch."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line}
        paths = [Path(name) for name in loaded if Path(name).name.startswith(("libgomp", "libomp", "libiomp"))]
    else:
        paths = [*(Path(torch.__file__).parent / "lib").glob("lib*omp*")]
    return sorted(paths, key=lambda path: ("torch" not in str(path), str(path)))
