"""Routes that answer GET and HEAD, and paths with a slash at their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send


def add_get(app: FastAPI, path: str, endpoint: Callable[..., Any], *, in_schema: bool = True) -> None:
    """Routes GET and HEAD of `path` to `endpoint`. The server leaves out the body that answers HEAD."""
    # One route for both, so that a 405 lists both. In the schema it would be two operations of one name.
    app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(endpoint)
    if in_schema:
        app.get(path)(endpoint)  # never reached


class WithoutLastSlash:
    """Treats a path with slashes at its end as the one without. Starlette would redirect, with the scheme and the
    host of this port, which behind a proxy are not the client's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)
