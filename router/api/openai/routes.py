"""Routes that answer GET and HEAD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI


def add_get(app: FastAPI, path: str, endpoint: Callable[..., Any], *, in_schema: bool = True) -> None:
    """Routes GET and HEAD of `path` to `endpoint`. The server leaves out the body that answers HEAD."""
    # One route for both, so that a 405 lists both. In the schema it would be two operations of one name.
    app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(endpoint)
    if in_schema:
        app.get(path)(endpoint)  # never reached
