"""What a person touches: the command line, the Python client, the local stack.

`from tandem import Client` is lazy, so that the command line starts without importing gRPC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.client import AsyncClient, Client
    from tandem.completion import Choice, Completion, Piece, Usage
    from tandem.credentials import Credentials
    from tandem.errors import StreamError, TandemError

__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "Completion",
    "Credentials",
    "Piece",
    "StreamError",
    "TandemError",
    "Usage",
]

_HOMES = {
    "AsyncClient": "client",
    "Client": "client",
    "Credentials": "credentials",
    "StreamError": "errors",
    "TandemError": "errors",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"tandem.{_HOMES.get(name, 'completion')}"), name)
