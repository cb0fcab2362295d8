"""Kernels come from numba's cache only if it fits their sources."""

from __future__ import annotations

import ast
import ctypes
import errno
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import llvmlite.binding
import numba
import pytest
from numba import njit
from numba.core.caching import IndexDataCacheFile

from engine.attention import compilation
from engine.attention.compilation import kernel
from engine.attention.simd import INT64, pointer

ROOT = Path(__file__).parents[3]
_CALLED = "def value(): return {}"
_KERNEL = "def body(a): pointer(a[0], INT64)[0] = value()"


class Package:
    """A kernel, `kernels.py`, and what it calls, `called.py`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.setattr(compilation, "sources", lambda: sorted(folder.glob("*.py")))

    def install(self, value: int, *, before: str = "", after: str = "") -> None:
        """A release in which the kernel writes this value and has this text before and after it."""
        (self._folder / "called.py").write_text(_CALLED.format(value))
        (self._folder / "kernels.py").write_text(f"{before}{_KERNEL}{after}")

    def start(self) -> int:
        """What the kernel writes in a new process: nothing that an older one found stays."""
        compilation.sources_digest.cache_clear()
        names: dict[str, Any] = {"__name__": __name__, "pointer": pointer, "INT64": INT64}
        for file in (self._folder / "called.py", self._folder / "kernels.py"):
            exec(compile(file.read_text(), str(file), "exec"), names)
            if "body" not in names:
                names["value"] = njit(names["value"])
        compiled = kernel(names["body"])
        self.was_cached = bool(compiled.cache_hits)
        target = ctypes.c_int64()
        arguments = ctypes.c_int64(ctypes.addressof(target))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)(ctypes.addressof(arguments))
        return target.value

    def files(self, pattern: str) -> list[Path]:
        return sorted(self._folder.rglob(pattern))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    yield Package(tmp_path, monkeypatch)
    compilation.sources_digest.cache_clear()


def test_a_kernel_is_compiled_again_after_a_change_of_what_it_calls(package: Package) -> None:
    for value in (1, 2, 1):
        package.install(value)
        assert package.start() == value
        assert not package.was_cached
        assert package.start() == value
        assert package.was_cached


def test_code_of_older_releases_is_not_kept(package: Package) -> None:
    for value in (1, 2, 3):
        package.install(value, before=value * "\n")
        assert package.start() == value
    assert len(package.files("*.nbi")) == len(package.files("*.nbc")) == 1


def test_an_index_that_was_written_without_its_code_leads_to_no_older_code(package: Package) -> None:
    """A process is killed between numba's two writes of a release that changes the kernel's file, too."""
    package.install(1)
    package.start()
    package.install(2, after="\n# changed")

    def is_killed(self: object, name: str, data: object) -> None:
        raise SystemExit

    with patch.object(IndexDataCacheFile, "_save_data", is_killed), pytest.raises(SystemExit):
        package.start()
    assert package.files("*.nbi")
    assert package.start() == 2


@pytest.mark.parametrize("share", [0, 0.5])
@pytest.mark.parametrize("pattern", ["*.nbc", "*.nbi"])
def test_damaged_files_are_removed(
    pattern: str, share: float, package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut leaves the beginning of a file."""
    package.install(1)
    package.start()
    (file,) = package.files(pattern)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    assert package.start() == 1
    assert "removed" in caplog.text
    assert package.start() == 1
    assert package.start() == 1
    assert package.was_cached
    assert len(caplog.records) == 1


@pytest.mark.parametrize("writer", [(IndexDataCacheFile, "_save_data"), (Path, "write_text")], ids=["code", "stamp"])
def test_a_kernel_needs_no_space_on_the_disk(
    writer: tuple[type, str], package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing stays of what was begun, so that the next start finds no older code."""
    package.install(1)
    package.start()
    package.install(2)
    with patch.object(*writer, side_effect=OSError(errno.ENOSPC, "No space left on device")) as written:
        assert package.start() == 2
    assert written.called
    assert "No space left on device" in caplog.text
    assert not package.files("*.nb*")
    for _ in range(2):
        assert package.start() == 2
    assert package.was_cached


def test_files_that_cannot_be_removed_are_not_used(package: Package) -> None:
    package.install(1)
    package.start()
    package.install(2)
    with patch.object(Path, "unlink", side_effect=PermissionError) as removed:
        assert package.start() == 2
    assert removed.called


def test_a_numba_that_names_no_folder_compiles_without_one(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    package.install(1)
    with patch.object(numba, "njit", return_value=lambda body: body):
        assert package.start() == 1
    assert "has no attribute 'stats'" in caplog.text
    assert not package.files("*.nb*")


def test_a_kernel_that_no_other_process_would_find_in_the_cache_is_rejected() -> None:
    value = njit(lambda: 1)

    def body(a: Any) -> None:
        pointer(a[0], INT64)[0] = value()

    with pytest.raises(TypeError, match="functions that a kernel calls must be names of its module"):
        kernel(body)


def test_the_stamp_covers_what_kernels_are_made_of() -> None:
    """Each file with a kernel, and each file of the engine from which one takes a name."""
    sources = set(compilation.sources())
    assert {file for file in (ROOT / "engine").rglob("*.py") if "    @kernel\n" in file.read_text()} < sources
    for file in sources - {ROOT / "engine/attention/compilation.py"}:  # what this one imports makes no code
        assert set(_imported(file)) <= sources, file


def _imported(file: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("engine."):
            yield ROOT / f"{str(node.module).replace('.', '/')}.py"


@pytest.mark.parametrize(
    "variable",
    [
        pytest.param("NUMBA_CPU_NAME=generic", marks=pytest.mark.slow),
        pytest.param("NUMBA_CPU_FEATURES=+avx2,+fma", marks=pytest.mark.slow),
        pytest.param("NUMBA_ENABLE_AVX=0", marks=pytest.mark.slow),
    ],
)
def test_kernels_use_what_numba_compiles_for(variable: str, tmp_path: Path) -> None:
    """A processor's instructions that numba's settings leave out would end the process."""
    name, _, value = variable.partition("=")
    environment = os.environ | {name: value, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _MULTIPLY], env=environment, cwd=ROOT, check=True)


def test_a_processor_without_fma_multiplies_and_calls_no_function_for_each_product(tmp_path: Path) -> None:
    """`generic` is one without; LLVM's llvm.fma would call fmaf sixteen times."""
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _MULTIPLY + _FUSE], env=environment, cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("machine", "features", "has_one"),
    [
        ("x86_64", {"sse4.2", "avx"}, False),
        ("x86_64", {"avx2", "fma"}, True),
        ("x86_64", {"avx", "fma4"}, True),
        ("x86_64", {"avx512f"}, True),
        ("aarch64", {"neon"}, True),
    ],
)
def test_products_are_fused_where_there_is_an_instruction(
    machine: str, features: set[str], has_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "_features", lambda: frozenset(features))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert compilation.has_fused_products.__wrapped__() == has_one


@pytest.mark.parametrize(
    ("processor", "are_faster"), [("znver4", True), ("znver5", True), ("emeraldrapids", False), ("x86-64", False)]
)
def test_pairs_are_multiplied_where_that_is_faster(
    processor: str, are_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "has_pairs", lambda: True)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_name", lambda: processor)
    assert compilation.multiplies_pairs.__wrapped__() == are_faster


_MULTIPLY = """
import torch
from engine.attention import compilation
from engine.models.linear import PanelLinear

assert not compilation.has_wide_registers() and not compilation.has_pairs() and not compilation.has_tiles()
matrix, rows = torch.randn(64, 32).bfloat16(), torch.randn(5, 32).bfloat16()
torch.testing.assert_close(PanelLinear(matrix, None)(rows), torch.nn.functional.linear(rows, matrix))
"""

_FUSE = """
import ctypes
import torch
from numba import cfunc
from engine.attention.compilation import SIGNATURE
from engine.attention.simd import FLOAT32, fused, load, pointer, store

def body(a):
    numbers = pointer(a[0], FLOAT32)
    store(numbers, 0, fused(load(numbers, 0), load(numbers, 16), load(numbers, 32)))

compiled = cfunc(SIGNATURE)(body)
numbers = torch.rand(3, 16)
expected = numbers[0] * numbers[1] + numbers[2]
compiled.ctypes(ctypes.pointer(ctypes.c_int64(numbers.data_ptr())))
torch.testing.assert_close(numbers[0], expected)
assert "fmaf" not in compiled._library.get_asm_str()
"""
