"""What the tests of the HTTP port share: rigs that have one, OpenAI's own client, and a bare one."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.request.validation import ServedModel
from tests.router.rig import TIMEOUT_S, Rig, running

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Clients of loopback make no TLS connection; each would read all certificates of the machine."""

RunHttp = Callable[..., AbstractAsyncContextManager["HttpRig"]]


@dataclass
class HttpRig:
    """A rig with an HTTP port, and clients of it."""

    rig: Rig
    url: str
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """A JSON body as it stands."""
        return await self.http.post(path, json=body)

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)


@pytest.fixture
def run_http(model: ServedModel, model_folder: Path) -> RunHttp:
    """`async with run_http(decode=2) as http`; further arguments as `tests.router.rig.running` takes them."""

    @asynccontextmanager
    async def run(**arguments: Any) -> AsyncIterator[HttpRig]:
        arguments["http"] = {"listen": "127.0.0.1:0", **arguments.get("http", {})}
        async with running(model, model_folder, **arguments) as rig:
            url = f"http://{rig.app.http_address}"
            options: dict[str, Any] = {"http_client": openai.DefaultAsyncHttpxClient(verify=NO_TLS), "max_retries": 0}
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, **options) as client,
                httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=NO_TLS) as bare,
            ):
                yield HttpRig(rig, url, client, bare)

    return run
