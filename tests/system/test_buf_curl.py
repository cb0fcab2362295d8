"""Server reflection: `buf curl`, without our protos, lists a stack's services and generates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tandem import Client
from tests.system.rig import Rig
from tests.system.stacks import on_stack

pytestmark = on_stack("pair shared_storage")
BUF = Path(__file__).parents[2] / "node_modules/.bin/buf"
PROMPT = list(range(20, 60))


def buf_curl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`buf curl` over plaintext gRPC, in a folder without protos."""
    assert BUF.exists(), "buf is not installed: npm ci (make test does it)"
    command = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)


def messages(text: str) -> list[dict[str, Any]]:
    """The JSON objects of `text`, one after the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text):
        message, at = decoder.raw_decode(text, at)
        found.append(message)
        at = len(text) - len(text[at:].lstrip())
    return found


def test_its_services_are_listed(rig: Rig) -> None:
    listed = buf_curl("--list-services", f"http://{rig.address}")
    assert listed.returncode == 0, listed.stderr
    services = set(listed.stdout.split())
    assert {"tandem.v1.GenerationService", "vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"} <= services
    assert "tandem.v1.PoolsService" not in services, "pools are managed at the admin listener alone"


def test_it_generates(rig: Rig) -> None:
    """Reflection describes every field of the answer, and the tokens are those of our own client."""
    with Client(rig.address) as client:
        expected = client.generate(PROMPT, max_tokens=12, temperature=0.0)
    request = {"tokenIds": {"ids": PROMPT}, "sampling": {"maxTokens": 12, "temperature": 0}}
    address = f"http://{rig.address}/tandem.v1.GenerationService/Generate"
    answer = buf_curl("--timeout", "30s", "-d", json.dumps(request), address)
    assert answer.returncode == 0, answer.stderr
    chunks = [message["tokens"] for message in messages(answer.stdout)]
    assert [int(token_id) for chunk in chunks for token_id in chunk["tokenIds"]] == list(expected.token_ids)
    assert "".join(chunk.get("text", "") for chunk in chunks) == expected.text
    assert chunks[-1]["finish"]["reason"] == "FINISH_REASON_LENGTH"


def test_an_error_names_the_field(rig: Rig) -> None:
    request = {"tokenIds": {"ids": PROMPT}, "sampling": {"temperature": 3}}
    failed = buf_curl("-d", json.dumps(request), f"http://{rig.address}/tandem.v1.GenerationService/Generate")
    assert failed.returncode != 0
    error = json.loads(failed.stderr)
    assert error["code"] == "invalid_argument"
    assert "temperature" in error["message"]
