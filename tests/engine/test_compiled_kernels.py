"""The Triton kernels compile for GPUs, with the launches that the product makes, and fit into their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SHARED_BYTES = 99 << 10
"""Of a program, on every GPU since Ampere."""
KERNELS = {
    "attention": ["write_kv", "attend", "attend_in_splits", "add_splits"],
    "elementwise": ["add_norm", "rotate_heads", "silu_mul"],
    "draw": ["draw_row"],
}


USUAL = ["attention in bfloat16", "elementwise", "draw"]
OTHERS = ["attention in float32", "attention with wide heads", "attention with wide heads in float32"]


@pytest.mark.parametrize(
    ("capability", "cases"),
    [
        (90, USUAL),
        pytest.param(90, OTHERS, marks=pytest.mark.slow),
        pytest.param(89, USUAL + OTHERS, marks=pytest.mark.slow),
        pytest.param(80, USUAL + OTHERS, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_a_gpu_and_fit(capability: int, cases: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.compile_kernels", str(capability), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["kernel"] for one in compiled] == [name for case in cases for name in KERNELS[case.split()[0]]]
    assert max(one["shared"] for one in compiled) <= SHARED_BYTES, compiled
