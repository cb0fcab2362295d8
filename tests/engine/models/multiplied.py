"""How kernels of linear layers multiply numbers, whatever this processor prefers."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from engine.attention.compilation import Products, has_pairs, has_tiles

KINDS: dict[str, tuple[torch.dtype, Products]] = {
    "float32": (torch.float32, "floats"),
    "bfloat16, converted": (torch.bfloat16, "floats"),
    "bfloat16, in pairs": (torch.bfloat16, "pairs"),
    "float16": (torch.float16, "floats"),
}
"""The element type, and how it is multiplied."""
LINEAR_KINDS = {**KINDS, "bfloat16, in tiles": (torch.bfloat16, "tiles")}
"""Of dense weights."""


def multiply_as(kind: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Lets the kernels of `module` multiply so. Skips the test where the processor lacks the instruction."""
    dtype, products = LINEAR_KINDS[kind]
    if products == "pairs" and not has_pairs():
        pytest.skip("the kernel needs AVX512_BF16")
    if products == "tiles" and not has_tiles():
        pytest.skip("the kernel needs AMX")
    monkeypatch.setattr(module, "multiplies_pairs", lambda: products == "pairs")
    monkeypatch.setattr(module, "has_tiles", lambda: products == "tiles", raising=False)
    return dtype
