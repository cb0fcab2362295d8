"""A stack that speaks TLS speaks it at its HTTP port too."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest

from tandem.greeting import how_to_call
from tandem.local_stack import LocalStack
from tandem.models import resolve
from tandem.stack_settings import StackSettings


@pytest.fixture
def stack(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStack:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    return LocalStack(StackSettings(model=resolve("demo"), model_name="demo", num_blocks=256, http_port=0, tls=True))


@pytest.mark.slow
def test_the_http_port_of_a_stack_with_tls_speaks_tls(stack: LocalStack) -> None:
    with stack:
        ca_file = stack.credentials.ca_file
        assert ca_file is not None
        assert f"curl --cacert {ca_file} https://{stack.http_address}/v1/" in how_to_call(stack)
        context = ssl.create_default_context(cafile=str(ca_file))
        with httpx.Client(base_url=f"https://{stack.http_address}", verify=context, timeout=60) as client:
            answer = client.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 4})
            assert answer.json()["usage"]["completion_tokens"] == 4
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{stack.http_address}/health", timeout=60)
