"""How kernels of linear layers multiply numbers, whatever this processor prefers."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from engine.attention.compilation import has_pairs

KINDS = {
    "float32": (torch.float32, False),
    "bfloat16, converted": (torch.bfloat16, False),
    "bfloat16, in pairs": (torch.bfloat16, True),
    "float16": (torch.float16, False),
}
"""The element type, and whether as pairs."""


def multiply_as(kind: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Lets the kernels of `module` multiply so. Skips the test where the processor lacks the instruction."""
    dtype, in_pairs = KINDS[kind]
    if in_pairs and not has_pairs():
        pytest.skip("the kernel needs AVX512_BF16")
    monkeypatch.setattr(module, "multiplies_pairs", lambda: in_pairs)
    return dtype
