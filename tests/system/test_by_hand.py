"""The commands of docs/by_hand.md, on one machine whose two loopback addresses stand for the page's two machines."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving.lifecycle import ParentBond
from tandem import Client
from tandem.client.health import instances_out
from tandem.demo import MODEL_DIR
from tandem.local_stack.process import ManagedProcess, ProcessSpec, stop_all
from tandem.local_stack.topology import free_ports
from tests.waiting import wait_until

PAGE = (Path(__file__).parents[2] / "docs/by_hand.md").read_text()
COMMANDS = [
    " ".join(command.split("\\\n"))
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
]
HOSTS = {"10.0.0.1": "127.0.0.1", "10.0.0.2": "127.0.0.2"}


@pytest.fixture
def commands(tmp_path: Path) -> list[str]:
    """The page's commands with addresses of this machine, and with ports and a model that it has."""
    (tmp_path / "model").symlink_to(MODEL_DIR)
    (tmp_path / "python").symlink_to(sys.executable)
    ports = sorted(set(re.findall(r"\d\.\d:(\d{4,5})\b", " ".join(COMMANDS))))
    given = {**HOSTS, **{f":{port}": f":{free}" for port, free in zip(ports, free_ports(len(ports)), strict=True)}}
    replaced = re.compile("|".join(map(re.escape, given)))
    return [replaced.sub(lambda found: given[found[0]], command) for command in COMMANDS]


@contextmanager
def running(commands: list[str], folder: Path) -> Iterator[dict[str, ManagedProcess]]:
    """Each command as a process that ends with the block."""
    bond, processes = ParentBond(), {}
    try:
        for command in commands:
            *variables, _, _, name = shlex.split(command)[: shlex.split(command).index("-m") + 2]
            argv = shlex.split(command)[len(variables) + 1 :]
            ready, log = folder / f"{name}.ready", folder / f"{name}.log"
            # Smaller than by default, and over TCP, as between machines.
            small = () if name == "router" else ("--num-blocks", "512", "--num-threads", "1")
            env = {"UCX_TLS": "tcp", **dict(one.split("=") for one in variables)}
            spec = ProcessSpec(
                name, (sys.executable, *argv, "--ready-file", str(ready), *small), "", ready, log, folder / name, env
            )
            processes[name] = ManagedProcess(spec)
            processes[name].start(bond)
        yield processes
    finally:
        stop_all(list(processes.values()), grace_s=1.0)
        bond.close()


def shell(command: str, folder: Path) -> str:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_PROXY": "*"}
    done = subprocess.run(["bash", "-euc", command], cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_pages_commands_start_a_stack_that_hands_kv_over(
    commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    secret, *services, pools, generate, curl = commands
    shell(secret, tmp_path)
    with running(services, tmp_path) as processes:
        assert list(processes) == ["prefill_service", "decode_service", "router"]
        logs = {name: process.last_lines for name, process in processes.items()}

        def is_up() -> bool:
            assert all(process.running for process in processes.values()), {name: log() for name, log in logs.items()}
            return all(process.ready for process in processes.values())

        wait_until(is_up, lambda: str({name: log() for name, log in logs.items()}))
        option = dict(zip(shlex.split(services[-1]), shlex.split(services[-1])[1:], strict=False))
        wait_until(
            lambda: not instances_out(option["--admin-listen"]), lambda: str(instances_out(option["--admin-listen"]))
        )
        table = shell(pools, tmp_path)
        assert table.count("ready") >= 4, table  # both instances, both pools
        assert shell(generate, tmp_path).strip()
        assert '"text"' in shell(curl, tmp_path)
        with Client(option["--listen"]) as client:
            answer = client.generate("Penny and Dex rode a tandem to the sea. " * 12, max_tokens=4)
            assert client.model_info().model == "my-model"
        assert answer.usage.external_tokens > 0, logs["router"]()
        assert answer.usage.recomputed_tokens == 0, logs["decode_service"]()
