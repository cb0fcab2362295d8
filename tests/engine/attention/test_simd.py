"""Vectors of sixteen floats compute what torch computes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from numba import cfunc

from engine.attention import compilation, simd
from engine.attention.compilation import SIGNATURE, has_pairs, kernel
from engine.attention.simd import (
    FLOAT32,
    KINDS,
    exp,
    largest,
    load,
    pointer,
    rounded_to,
    splat,
    store,
    total,
)
from tests.waiting import wait_until


def _exponentials(a):  # type: ignore[no-untyped-def]
    source, target = pointer(a[1], FLOAT32), pointer(a[2], FLOAT32)
    for i in range(0, a[0], 16):
        store(target, i, exp(load(source, i)))


def _conversions(kind):  # type: ignore[no-untyped-def]
    def convert(a):  # type: ignore[no-untyped-def]
        source, rounded = pointer(a[1], FLOAT32), pointer(a[3], FLOAT32)
        stored, loaded = pointer(a[2], kind), pointer(a[4], FLOAT32)
        for i in range(0, a[0], 16):
            store(stored, i, load(source, i))
            store(loaded, i, load(stored, i))
            store(rounded, i, rounded_to(load(source, i), kind))

    return convert


def _arithmetic(a):  # type: ignore[no-untyped-def]
    source, target = pointer(a[1], FLOAT32), pointer(a[2], FLOAT32)
    x, y = load(source, 0), load(source, 16)
    store(target, 0, (x + y) * x / y - splat(source[3]))
    target[16] = total(x)
    target[17] = largest(x)


def _call(body: Any, *arguments: int) -> None:
    _run(cfunc(SIGNATURE)(body), *arguments)


def _run(compiled: Any, *arguments: int) -> None:
    packed = (ctypes.c_int64 * len(arguments))(*arguments)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)(ctypes.addressof(packed))


def test_exp_is_within_a_few_units_in_the_last_place() -> None:
    x = torch.linspace(-86.9, 87.9, 16_000)
    result = torch.empty_like(x)
    _call(_exponentials, len(x), x.data_ptr(), result.data_ptr())
    torch.testing.assert_close(result.double(), x.double().exp(), rtol=3e-7, atol=0)


@pytest.mark.parametrize("by_hardware", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_numbers_round_as_torchs_do(
    dtype: torch.dtype, by_hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`by_hardware`: where this processor rounds to bfloat16, which makes the smallest numbers 0."""
    by_hardware = by_hardware and has_pairs()
    monkeypatch.setattr(simd, "has_pairs", lambda: by_hardware)
    bits = torch.randint(-(2**31), 2**31 - 1, (16_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = bits.view(torch.float32)
    x[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38])
    x[4:8000] %= 70_000  # float16 ends at 65 504
    stored, rounded, loaded = torch.empty(len(x), dtype=dtype), torch.empty(len(x)), torch.empty(len(x))
    pointers = [one.data_ptr() for one in (x, stored, rounded, loaded)]
    _call(_conversions(KINDS[str(dtype).removeprefix("torch.")]), len(x), *pointers)
    expected = x.to(dtype)
    if by_hardware and dtype == torch.bfloat16:
        expected[x.abs() < torch.finfo(dtype).tiny] = 0
    torch.testing.assert_close(stored, expected, rtol=0, atol=0, equal_nan=True)
    for one in (rounded, loaded):
        torch.testing.assert_close(one, stored.float(), rtol=0, atol=0, equal_nan=True)


def test_a_kernel_that_numba_has_no_place_to_cache_is_compiled_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    names: dict[str, Any] = {"pointer": pointer, "FLOAT32": FLOAT32}
    exec("def body(a):\n    pointer(a[0], FLOAT32)[0] = 7", names)  # source without a file
    target = torch.zeros(1)
    _run(kernel(names["body"]), target.data_ptr())
    assert target.item() == 7
    assert "NUMBA_CACHE_DIR" in caplog.text


def test_compiling_is_announced_and_loading_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file is new in numba's cache, and a second time it is in it."""
    file = tmp_path / "kernels.py"
    file.write_text("def body(a):\n    pointer(a[0], FLOAT32)[0] = 7")
    names: dict[str, Any] = {"pointer": pointer, "FLOAT32": FLOAT32}
    exec(compile(file.read_text(), str(file), "exec"), names)
    compilation._announce_compilation.cache_clear()
    caplog.set_level("INFO", "engine")
    kernel(names["body"])
    announced, done = (record.getMessage() for record in caplog.records)
    assert announced == "start-up: compiling the CPU kernels, once for this installation: 10 to 25 s"
    assert re.fullmatch(r"start-up: compiled body in \d+\.\d s", done)
    kernel(names["body"])
    assert len(caplog.records) == 2


def _waits_for_a_lock_of(file: str) -> bool:
    return any(
        "->" in line and f":{os.stat(file).st_ino} " in line for line in Path("/proc/locks").read_text().splitlines()
    )


def test_a_process_that_starts_meanwhile_waits_for_the_compiled_kernel() -> None:
    def body(a: Any) -> None:
        pointer(a[0], FLOAT32)[0] = 7

    compiled: list[Any] = []
    other = threading.Thread(target=lambda: compiled.append(kernel(body)))
    with open(__file__, "rb") as source:
        fcntl.flock(source, fcntl.LOCK_EX)
        other.start()
        wait_until(lambda: _waits_for_a_lock_of(__file__))
        assert not compiled
    other.join(60)
    assert compiled


def test_operators_and_reductions() -> None:
    source = torch.randn(32, generator=torch.Generator().manual_seed(0))
    target = torch.empty(18)
    _call(_arithmetic, 0, source.data_ptr(), target.data_ptr())
    x, y = source.chunk(2)
    torch.testing.assert_close(target[:16], (x + y) * x / y - source[3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target[16:], torch.stack((x.sum(), x.max())), rtol=1e-5, atol=1e-5)
