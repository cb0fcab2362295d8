"""The inference engine: requests in, tokens out, without roles and without gRPC.

`LLM` (offline) and `AsyncEngine` (for services) are imported on first use: importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.core.async_engine import AsyncEngine
    from engine.llm import LLM, CompletionOutput, Logprob, RequestOutput
    from engine.sampling.params import SamplingParams

_MODULES = {
    "LLM": "engine.llm",
    "AsyncEngine": "engine.core.async_engine",
    "SamplingParams": "engine.sampling.params",
    "CompletionOutput": "engine.llm",
    "Logprob": "engine.llm",
    "RequestOutput": "engine.llm",
}
__all__ = ["LLM", "AsyncEngine", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """PEP 562: import the module of a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
