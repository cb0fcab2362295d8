"""The engine: requests in, tokens out. No role, no gRPC.

`LLM` (offline) and `AsyncEngine` (what services use) load lazily, so that importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.llm import LLM
    from engine.outputs import CompletionOutput, Logprob, RequestOutput
    from engine.sampling_params import SamplingParams

_HOMES = {
    "LLM": "engine.llm",
    "AsyncEngine": "engine.async_engine",
    "SamplingParams": "engine.sampling_params",
    "CompletionOutput": "engine.outputs",
    "Logprob": "engine.outputs",
    "RequestOutput": "engine.outputs",
}
__all__ = ["LLM", "AsyncEngine", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """PEP 562: import a public name's module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
