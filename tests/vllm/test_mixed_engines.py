"""Pools of different engines are never paired, and a client is sent the names of both; each engine serves alone."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tandem import Client, TandemError
from tandem.client.health import instances_out, load
from tandem.demo import MODEL_DIR as DEMO
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack
from tests.lively import PATIENT_PEERS, PATIENT_POOLS
from tests.process_logs import LOGS
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

PROMPT = "Once upon a time there was a penguin called Penny who had a tandem."
BOTH = (
    r"no prefill instance is available: "
    r"engine of prefill-0 is vllm 0\.32\.\d+, CPUModelRunner, CPU_ATTN, KV float32, of decode-0 tandem"
)


@pytest.fixture(scope="module")
def stack(vllm_python: str) -> Iterator[LocalStack]:
    """vLLM prefills, and the built-in engine decodes."""
    settings = StackSettings(
        model=DEMO,
        model_name="demo",
        disaggregation="always",
        dtype="float32",
        num_blocks=200,
        threads=1,
        pin=False,
        http_port=0,
        start_timeout_s=600.0,
        instance_args=("--block-size", "32", *PATIENT_PEERS),
        # Without the time to wait, a router whose pools never pair would not become ready.
        router_args=(*PATIENT_POOLS, "--admission-instance-wait-s", "0.1"),
    )
    of_vllm = {"TANDEM_ENGINE__KIND": "vllm", "TANDEM_ENGINE__PYTHON": vllm_python}
    with LOGS.expected("EngineDeadError|CancelledError|vllm"), LocalStack(settings, env={"prefill-0": of_vllm}) as it:
        wait_until(lambda: not instances_out(it.admin_address), "an instance is out")
        yield it


def test_a_client_is_sent_the_names_of_both_engines(stack: LocalStack) -> None:
    with Client(stack.address, timeout_s=60) as client, pytest.raises(TandemError) as refused:
        client.generate(PROMPT, max_tokens=8)
    assert refused.value.status == "UNAVAILABLE"
    assert re.search(BOTH, str(refused.value))


def test_a_client_of_the_openai_api_too(stack: LocalStack) -> None:
    body = json.dumps({"model": "demo", "prompt": PROMPT, "max_tokens": 8}).encode()
    asked = urllib.request.Request(
        f"http://{stack.http_address}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=60)
    assert refused.value.code == 503
    assert re.search(BOTH, json.load(refused.value)["error"]["message"])


def test_nothing_was_computed_and_the_router_has_logged_it(stack: LocalStack) -> None:
    for name, address in stack.instances.items():
        assert load(address).num_generated_tokens == 0, name
    log = stack.processes["router"].spec.log_file.read_text()
    assert re.search(r"engine differs between decode decode-0 \(tandem/\d+\) and prefill prefill-0 \(vllm 0\.32", log)
