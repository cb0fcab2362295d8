"""Compiles the Triton kernels for GPUs, without one: `python -m tests.engine.compile_kernels 90 CASE …` prints a
JSON line for each kernel, its name and the bytes of shared memory that it needs.

The launches are those of the product's code on tensors in host memory; a stand-in for each kernel compiles it for the
types of its arguments. In a process of its own: a process that has used Triton's interpreter compiles nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_for

from engine.attention import triton_attention
from engine.models import triton_elementwise
from engine.models.elementwise import HeadNorm, HeadShape
from engine.sampling import triton_sampler
from tests.engine.attention.paged_step import paged_step, paged_tensors

_TYPES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64", torch.int32: "*i32", int: "i32", float: "fp32", type(None): "constexpr",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages")


class Compiled:
    """Stands in for a kernel: a launch compiles it."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self._kernel = kernel
        self._target = GPUTarget("cuda", capability, 32)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **constants: Any) -> None:
        options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
        if "WIDENS" in constants:
            constants["WIDENS"] = False
        names = self._kernel.arg_names
        given = dict(zip(names, arguments, strict=False))
        constants |= {name: None for name, value in given.items() if value is None}
        types = {
            name: _TYPES[value.dtype if isinstance(value, torch.Tensor) else type(value)]
            for name, value in given.items()
        }
        source = ASTSource(
            fn=self._kernel,
            signature={name: types.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"},
        )
        made = compile_for(source, target=self._target, options=options)
        print(json.dumps({"kernel": self._kernel.__name__, "shared": made.metadata.shared}), flush=True)


def attention(
    dtype: torch.dtype, head_dim: int, window: int | None, softcap: float | None, sinks: torch.Tensor | None = None
) -> None:
    metadata, _, num_blocks = paged_step([(1, 300), (40, 90)], block_size=16)
    query, key, value, cache = paged_tensors(
        metadata, num_blocks, block_size=16, kv_heads=2, group=4, head_dim=head_dim, dtype=dtype
    )
    triton_attention.TritonAttention(softcap).forward(
        query, key, value, cache, layer=0, metadata=metadata, scale=0.1, sliding_window=window, sinks=sinks
    )


def elementwise(dtype: torch.dtype) -> None:
    operations, shape = triton_elementwise.TritonElementwise(), HeadShape(16, 8, 128)
    x, weight = torch.zeros(4, 1024, dtype=dtype), torch.zeros(1024, dtype=dtype)
    operations.add_rms_norm(x, x.clone(), weight, 1e-6)
    norm = HeadNorm(weight[:128], weight[:128], 1e-6)
    qkv, angles = torch.zeros(4, 32 * 128, dtype=dtype), torch.zeros(4, 64)
    operations.rotate(qkv, angles, angles, shape, norm)
    operations.silu_and_mul(torch.zeros(4, 6144, dtype=dtype))


def draw() -> None:
    logits = torch.zeros(1, 151_936)
    triton_sampler.draw(logits, logits[:, 0], [0], [(1.0, 0.0, 20, 0.9, 0.5)], torch.zeros(1, dtype=torch.int64))


CASES: dict[str, Callable[[], None]] = {
    "attention in bfloat16": lambda: attention(torch.bfloat16, 128, None, None),
    "attention in float32": lambda: attention(torch.float32, 128, None, None),
    "attention with wide heads": lambda: attention(torch.bfloat16, 256, 100, 30.0),
    "attention with wide heads in float32": lambda: attention(torch.float32, 256, 100, 30.0),
    "attention with sinks": lambda: attention(torch.bfloat16, 64, 100, None, torch.zeros(8)),
    "elementwise": lambda: elementwise(torch.bfloat16),
    "draw": draw,
}


def main(capability: int, cases: list[str]) -> None:
    for module in (triton_attention, triton_elementwise, triton_sampler):
        for name, kernel in vars(module).items():
            if hasattr(kernel, "arg_names"):
                setattr(module, name, Compiled(kernel, capability) if name[0] != "_" else kernel)
    for case in cases:
        CASES[case]()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
