"""Commands of the chart that are not Tandem's own, run for real: the bundled Redis, and the download from the hub."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from helm.rendering import Manifest, render
from tandem.local_stack.topology import free_ports
from tests.chart.hub import serving
from tests.chart.rendered import deployment, manifests

PASSWORD = 'of "two" words \\9 #\''
"""With everything that the file of Redis' settings reads otherwise."""
MODEL, INDEX = "Qwen/Qwen3-8B", "model.safetensors.index.json"
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


def download(init: Manifest, folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    """The init container's process, ended, with `folder` in the place of /models."""
    return subprocess.run(
        [word.replace("/models/", f"{folder}/") for word in (*init["command"], *init["args"])],
        env={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "HF_ENDPOINT": address,
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def init_of(component: str, **hub: str) -> Manifest:
    values = {"model": {"source": "hub", "hub": {"id": MODEL, **hub}}}
    init: Manifest = deployment(render(values), component)["spec"]["template"]["spec"]["initContainers"][0]
    return init


@pytest.mark.parametrize("component", ["router", "decode"])
def test_download_brings_what_the_component_needs(component: str, tmp_path: Path) -> None:
    files = {name: name.encode() for name in (*SMALL, "model.safetensors", *NOT_FETCHED)}
    commit = "1" * 40
    with serving(MODEL, commit, files) as (address, fetched):
        ended = download(init_of(component, revision=commit), tmp_path, address)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    wanted = {*SMALL, *([] if component == "router" else ["model.safetensors"])}
    folder = tmp_path / MODEL.replace("/", "--") / commit
    assert set(fetched) == wanted == {path.name for path in folder.iterdir() if path.is_file()}


SLOW_HF = """#!/bin/sh
echo begun
exec sleep 600
"""


def test_a_download_ends_at_sigterm_with_what_it_runs(tmp_path: Path) -> None:
    """Of PID 1, as the shell is in its container, Linux ignores the signal unless the shell traps it."""
    hf = tmp_path / "hf"
    hf.write_text(SLOW_HF)
    hf.chmod(0o755)
    init = init_of("decode", revision="main")
    with subprocess.Popen(
        [*init["command"], *init["args"]],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "begun\n"
        shell.send_signal(signal.SIGTERM)
        assert shell.wait(60) == 128 + signal.SIGTERM
        assert shell.stdout.read() == "", "what it ran has ended, and with it the pipe's last writer"


@pytest.mark.parametrize(
    ("component", "present", "missing", "named"),
    [
        ("router", ["tokenizer.json"], "config.json", "config.json"),
        ("decode", ["config.json"], "model.safetensors", "*.safetensors"),
        ("decode", ["config.json", INDEX, "a-1.safetensors"], "b-2.safetensors", "b-2.safetensors"),
        ("decode", ["config.json", INDEX, "a-1.safetensors"], "model.safetensors", "b-2.safetensors"),
    ],
)
def test_an_incomplete_download_does_not_pass_for_a_model_while_the_hub_is_silent(
    component: str, present: list[str], missing: str, named: str, tmp_path: Path
) -> None:
    """With a branch, `hf` accepts every folder that is not empty. An engine reads no index beside one whole file."""
    init = init_of(component, revision="main")
    folder = tmp_path / MODEL.replace("/", "--") / "main"
    folder.mkdir(parents=True)
    for name in present:
        (folder / name).write_text('{"weight_map": {"x": "a-1.safetensors", "y": "b-2.safetensors"}}')
    [port] = free_ports(1)
    incomplete = download(init, tmp_path, f"http://127.0.0.1:{port}")
    assert incomplete.returncode != 0
    assert f"{folder} has no {named}" in incomplete.stderr
    (folder / missing).write_text("")
    complete = download(init, tmp_path, f"http://127.0.0.1:{port}")
    assert complete.returncode == 0, complete.stderr
