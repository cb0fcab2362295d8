"""`tandem up --autoscale` and `tandem pools resize` from the command line."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.client.registry import running_stacks
from tests.system.test_tandem_up import Up, wait_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def up(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder / "run"))
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder / "tmp"))
    scaling = ("--autoscale", "decode=1..3", "--router-arg=--autoscaler-decode-scale-in-window-s=600")
    running = Up(short_folder, "--no-try", *scaling)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()


def test_an_operator_resizes_a_stack_with_an_autoscaler(up: Up, short_folder: Path) -> None:
    up.wait_for("Ctrl-C ends it")
    # STEP: it prints the autoscaler's state
    table = up.tandem("pools")
    assert table.returncode == 0, table.stderr
    assert "autoscaler 1..3: " in table.stdout
    assert "autoscaler 1..1: " in table.stdout, "prefill keeps its size"
    # STEP: one more, by hand
    resized = up.tandem("pools", "resize", "decode=2")
    assert resized.returncode == 0, resized.stderr
    assert resized.stdout.splitlines()[0] == "decode: 1 → 2"
    assert "  decode-1 is ready" in resized.stdout.splitlines()
    up.wait_for("decode-1 is ready after")
    [stack] = running_stacks()
    assert set(stack.instances) == {"prefill-0", "decode-0", "decode-1"}
    doctor = up.tandem("doctor", "--quick")
    assert "decode-1" in doctor.stdout
    # STEP: and one less
    resized = up.tandem("pools", "resize", "decode=1", "--json")
    assert resized.returncode == 0, resized.stderr
    assert json.loads(resized.stdout)["changes"] == [{"pool": "decode", "previous_size": 2, "size": 1}]
    up.wait_for(" is gone")
    assert len(running_stacks()[0].instances) == 2
    # STEP: Ctrl-C leaves nothing
    processes = up.descendants()
    assert len(processes) >= 5
    up.end(signal.SIGINT)
    assert up.process.returncode == 0
    wait_gone(processes)
    assert list((short_folder / "tmp").iterdir()) == []
