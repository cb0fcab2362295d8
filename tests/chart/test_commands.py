"""Commands of the chart that are not Tandem's own, run for real: the bundled Redis, and the download from the hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tandem.local_stack.topology import free_ports
from tests.chart.hub import serving
from tests.chart.rendered import deployment, manifests

PASSWORD = 'of "two" words \\9 #\''
"""With everything that the file of Redis' settings reads otherwise."""
SMALL = (
    *("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "tokenizer.model"),
    *("merges.txt", "vocab.txt"),
)
NOT_FETCHED = ("consolidated.safetensors", "onnx/config.json", "pytorch_model.bin", "README.md")


@pytest.fixture
def bundled(tmp_path: Path) -> Iterator[int]:
    """The Redis of ci/redis-values.yaml, started by its own script; its port."""
    if shutil.which("redis-server") is None:
        pytest.fail("no redis-server; on Debian and Ubuntu: apt-get install redis-server")
    (container,) = deployment(manifests("redis"), "redis")["spec"]["template"]["spec"]["containers"]
    (tmp_path / "password").write_text(PASSWORD)
    [port] = free_ports(1)
    script = container["args"][0].replace("/tmp", str(tmp_path)).replace("/etc/redis/", f"{tmp_path}/")
    process = subprocess.Popen(
        [*container["command"], script.replace("--port 6379", f"--port {port}")],
        env={"PATH": os.environ["PATH"], "POD_IP": "127.0.0.1"},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(20)


def test_bundled_redis_asks_for_the_password_and_is_bounded(bundled: int) -> None:
    client = redis.Redis(port=bundled, password=PASSWORD)
    deadline_s = time.monotonic() + 20
    while True:
        try:
            client.ping()
            break
        except redis.ConnectionError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    configured = client.config_get("maxmemory*", "save", "appendonly", "requirepass")
    assert configured["maxmemory"] == str(4 << 30)
    assert configured["maxmemory-policy"] == "volatile-lru"
    assert (configured["save"], configured["appendonly"], configured["requirepass"]) == ("", "no", PASSWORD)
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=bundled).ping()


@pytest.mark.parametrize("component", ["router", "decode"])
def test_download_brings_what_the_component_needs(component: str, tmp_path: Path) -> None:
    init = deployment(manifests("hub"), component)["spec"]["template"]["spec"]["initContainers"][0]
    options = dict(arg.removeprefix("--").split("=") for arg in init["args"] if "clude" not in arg)
    files = {name: name.encode() for name in (*SMALL, "model.safetensors", *NOT_FETCHED)}
    args = [arg.replace("--local-dir=", f"--local-dir={tmp_path}") for arg in init["args"]]
    program = Path(sys.executable).parent / init["command"][0]
    with serving("Qwen/Qwen3-8B", options["revision"], files) as (address, fetched):
        ended = subprocess.run(
            [str(program), *init["command"][1:], *args],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_ENDPOINT": address},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    wanted = {*SMALL, *([] if component == "router" else ["model.safetensors"])}
    folder = Path(f"{tmp_path}{options['local-dir']}")
    assert set(fetched) == wanted == {path.name for path in folder.iterdir() if path.is_file()}
