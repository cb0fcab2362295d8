"""Runs compiled kernels on torch's own threads.

numba's pool would be a second set of threads: both spin while idle and so slow each other down where there are as many
threads as cores, and numba's portable pool aborts the process when two Python threads use it. A kernel here is a C
function `void kernel(int64_t *arguments)`, run by the OpenMP runtime that torch has loaded: the same threads, the same
number (`torch.set_num_threads`), started in a few microseconds, from any Python thread.

arguments[0] is a counter from which every thread takes the next task number, which balances uneven tasks.

Launches can be recorded, and run again as a program: one launch for some hundreds, which saves a third of a millisecond
for each layer of a model.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.attention.compilation import kernel
from engine.attention.simd import INT64, next_task, pointer

logger = logging.getLogger(__name__)

Arguments = ctypes.Array[ctypes.c_int64]
Launcher = Callable[[int | None, Arguments], None]
"""Takes the number of threads and the kernel's arguments. None, for short work: this thread, which keeps the GIL. With
a number other Python threads run meanwhile, also beside a single thread."""

_SHORT_ELEMENTS = 1 << 15
"""Below this many elements one thread finishes before a second has started."""
_LINE = 8
"""Numbers of a cache line: counters that several threads change have lines of their own."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded launch. The memory that its arguments point to must live as long as it is run."""

    kernel_address: int
    num_threads: int
    arguments: bytes


class _Recording(threading.local):
    launches: list[Launch] | None = None
    """Into which this thread's launches are recorded."""


_recording = _Recording()


@contextlib.contextmanager
def recording(launches: list[Launch]) -> Iterator[None]:
    """Appends this thread's launches to `launches` and does not run them."""
    _recording.launches, outer = launches, _recording.launches
    try:
        yield
    finally:
        _recording.launches = outer


@functools.cache
def launcher(kernel_address: int) -> Launcher:
    """A function that runs the kernel at this address and waits for it."""
    keeping_gil = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(kernel_address)
    without_gil = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel_address)
    gomp = _gomp()

    def run(num_threads: int | None, arguments: Arguments) -> None:
        if _recording.launches is not None:
            _recording.launches.append(Launch(kernel_address, num_threads or 1, bytes(arguments)))
        elif num_threads is None:
            keeping_gil(ctypes.addressof(arguments))
        elif num_threads > 1 and gomp is not None:
            gomp.parallel(kernel_address, ctypes.addressof(arguments), num_threads, 0)
        else:
            without_gil(ctypes.addressof(arguments))

    return run


def num_threads_for(num_elements: int) -> int | None:
    """For a `Launcher` whose kernel works on so many elements."""
    return torch.get_num_threads() if num_elements >= _SHORT_ELEMENTS else None


@functools.cache
def launcher_for(address_of: Callable[[str], int], dtype: torch.dtype) -> Launcher:
    """The launcher of a kernel's version for `dtype`; `address_of` compiles it."""
    return launcher(address_of(str(dtype).removeprefix("torch.")))


def launch(address_of: Callable[[str], int], dtype: torch.dtype, num_elements: int, arguments: Arguments) -> None:
    """Runs the kernel's version for `dtype`, which works on so many elements."""
    launcher_for(address_of, dtype)(num_threads_for(num_elements), arguments)


class LaunchProgram:
    """Recorded launches, run again one after the other in one launch. Those of one thread run on the same one, and all
    threads wait for each other before and after every other."""

    def __init__(self, launches: list[Launch]) -> None:
        lines = [-(-len(launch.arguments) // (8 * _LINE)) * _LINE for launch in launches]
        self._counters = np.cumsum([0, *lines[:-1]])
        memory = np.zeros(sum(lines) + _LINE, np.int64)
        self._arguments = memory[-(memory.ctypes.data // 8) % _LINE :]
        for start, launch in zip(self._counters, launches, strict=True):
            numbers = np.frombuffer(launch.arguments, np.int64)
            self._arguments[start : start + len(numbers)] = numbers
        kernels = [launch.kernel_address for launch in launches]
        addresses = self._arguments.ctypes.data + 8 * self._counters
        are_parallel = [launch.num_threads > 1 for launch in launches]
        self._table = np.column_stack((kernels, addresses, are_parallel)).astype(np.int64)
        gomp, num_threads = _gomp(), max(launch.num_threads for launch in launches)
        self._own = (ctypes.c_int64 * 4)(0, len(launches), self._table.ctypes.data, 0)
        run, own = run_launches_address(), ctypes.addressof(self._own)
        self._launch: Callable[[], object]
        if gomp is not None and num_threads > 1:
            self._own[3] = gomp.barrier_address
            self._launch = functools.partial(gomp.parallel, run, own, num_threads, 0)
        else:  # without the GIL: it takes a whole step
            self._launch = functools.partial(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(run), own)

    def run(self) -> None:
        """Returns when the last launch has ended."""
        self._arguments[self._counters] = 0
        self._own[0] = 0
        self._launch()


@functools.cache
def run_launches_address() -> int:
    """`void(int64*)`: counter, launches, table int64 [launches, 3], address of the runtime's `void barrier()` (0: one
    thread). A row of the table: address of the kernel, that of its arguments, whether all threads run it."""

    @kernel
    def compiled(a):
        is_first_thread = next_task(a) == 0
        num_launches, table, barrier = a[1], pointer(a[2], INT64), a[3]
        was_parallel = False
        for launch in range(0, 3 * num_launches, 3):
            is_parallel = table[launch + 2] != 0
            if barrier != 0 and launch > 0 and (is_parallel or was_parallel):
                _call_barrier(barrier)
            if is_parallel or is_first_thread:
                _call_kernel(table[launch], table[launch + 1])
            was_parallel = is_parallel

    return int(compiled.address)


@intrinsic
def _call_barrier(typingctx, address):
    """Calls the function `void()` at this address."""

    def codegen(context, builder, sig, args):
        function = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _call_kernel(typingctx, address, arguments):
    """Calls the kernel at this address."""

    def codegen(context, builder, sig, args):
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


class _Gomp:
    """torch's OpenMP runtime: GNU's, or LLVM's and Intel's, which export the same functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError where it has other functions."""
        self.parallel: Callable[[int, int, int, int], object] = library.GOMP_parallel
        """Runs a function with an argument on so many threads, and waits for them."""
        library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        library.GOMP_parallel.restype = None
        self.barrier_address = ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value or 0
        """Of `void()`: the threads of a parallel run wait for each other."""


@functools.cache
def _gomp() -> _Gomp | None:
    for path in _openmp_libraries():
        try:
            return _Gomp(ctypes.CDLL(str(path)))
        except (OSError, AttributeError):
            continue
    logger.warning("torch's OpenMP runtime was not found: the compiled CPU kernels run on one thread")
    return None


def _openmp_libraries() -> list[Path]:
    """The OpenMP runtimes loaded in this process (Linux), else those shipped with torch; torch's own come first."""
    torch_folder, maps = Path(torch.__file__).resolve().parent, Path("/proc/self/maps")
    if maps.exists():
        # The sixth field is the path, which may contain spaces.
        loaded = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "omp" in line}
        paths = [Path(name) for name in loaded if Path(name).name.startswith(("libgomp", "libomp", "libiomp"))]
    else:
        paths = [*(torch_folder / "lib").glob("lib*omp*")]
    own = {torch_folder, torch_folder.with_name("torch.libs")}
    return sorted(paths, key=lambda path: (own.isdisjoint(path.parents), str(path)))
