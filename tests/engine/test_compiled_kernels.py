"""The Triton kernels compile for GPUs, with the launches that the product makes, and fit into their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

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
    compiled = results_of("tests.engine.compile_kernels", str(capability), *cases)
    assert [one["kernel"] for one in compiled] == [name for case in cases for name in KERNELS[case.split()[0]]]
    assert max(one["shared"] for one in compiled) <= SHARED_BYTES, compiled


def test_no_step_needs_a_variant_of_an_attention_kernel_that_the_warm_up_has_not_compiled() -> None:
    """With graphs and without."""
    assert results_of("tests.engine.triton_variants") == 2 * [{name: [1, 0] for name in KERNELS["attention"]}]


def results_of(module: str, *arguments: str) -> list[Any]:
    """The lines of JSON that a process without the interpreter prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
