"""The user's side of Tandem: the command line, the Python client, the local stack, the benches.

`from tandem import Client` is lazy, so that the command line starts without importing gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.client.client import AsyncClient, Client
    from tandem.client.completion import Choice, Completion, Piece, Route, TokenLogprob, ToolCall, Usage
    from tandem.client.credentials import Credentials
    from tandem.client.errors import ConnectionLost, StreamError, TandemError

__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "Completion",
    "ConnectionLost",
    "Credentials",
    "Piece",
    "Route",
    "StreamError",
    "TandemError",
    "TokenLogprob",
    "ToolCall",
    "Usage",
]

_MODULES = {
    "AsyncClient": "client",
    "Client": "client",
    "ConnectionLost": "errors",
    "Credentials": "credentials",
    "StreamError": "errors",
    "TandemError": "errors",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"tandem.client.{_MODULES.get(name, 'completion')}"), name)
