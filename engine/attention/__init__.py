"""Paged attention: the backend interface, a slow reference, and fast backends by device."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from engine.errors import UnsupportedModel, shown

if TYPE_CHECKING:
    import torch

    from engine.attention.backend import AttentionBackend
    from engine.kv_layout import PageOrder


def _import_numba() -> None:
    """numba looks for a BLAS in scipy.linalg, where that is installed: half a second of CPU at each start. No kernel
    here calls one, so to numba it is absent."""
    modules: dict[str, Any] = sys.modules
    if modules.setdefault("scipy.linalg", None) is None:
        try:
            importlib.import_module("numba.np.arraymath")
        finally:
            del modules["scipy.linalg"]


_import_numba()

BACKENDS = ("cpu", "flash", "triton", "reference")
_AUTO = {"cpu": ("cpu", "reference"), "cuda": ("flash", "triton", "reference")}
"""By type of device, the fastest first."""


def select_backend(
    name: str,
    *,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    softcap: float | None = None,
) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest that supports these sizes on this device.

    With `softcap` c, a score s becomes c * tanh(s / c) before the softmax (Gemma 2).
    Raises UnsupportedModel for an unknown name or unsupported sizes.
    """
    if name not in (*BACKENDS, "auto"):
        raise UnsupportedModel(f"attention backend {shown(name)} is not known; known: auto, {', '.join(BACKENDS)}")
    for candidate in _AUTO.get(device.type, ("reference",)) if name == "auto" else (name,):
        if candidate == "flash" and not _has_flash_attn():
            if name == "auto":
                continue
            raise UnsupportedModel("attention backend flash requires the package flash-attn, which is not installed")
        backend = _backend(candidate, softcap)
        if backend.supports(block_size=block_size, head_dim=head_dim, dtype=dtype, device=device):
            return backend
    raise UnsupportedModel(
        f"attention backend {name} does not support block_size {block_size}, head_dim {head_dim}, {dtype} on {device}"
    )


def page_order(name: str) -> PageOrder:
    """The order of elements in the pages of the backend called `name`."""
    return "vectors" if name == "cpu" else "tokens"


def _has_flash_attn() -> bool:
    try:
        importlib.import_module("flash_attn")
    except ImportError:
        return False
    return True


def _backend(name: str, softcap: float | None) -> AttentionBackend:
    """Imported late: compiled backends cost start-up time."""
    if name == "cpu":
        from engine.attention.cpu import CpuAttention

        return CpuAttention(softcap)
    if name == "flash":
        from engine.attention.flash import FlashAttention

        return FlashAttention(softcap)
    if name == "triton":
        from engine.attention.triton_attention import TritonAttention

        return TritonAttention(softcap)
    from engine.attention.reference import ReferenceAttention

    return ReferenceAttention(softcap)
