"""How a stack starts, watches over and ends its members, with members that are small scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem import restarts
from tandem.local_stack import LocalStack
from tandem.supervision import StackFailed
from tests.tandem.scripted_stack import BECOMES_READY, DIES, HAS_A_CHILD, IGNORES_SIGTERM, scripted, settings


@pytest.fixture(autouse=True)
def temporary(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stack folders lie here; afterwards none may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    yield short_folder
    assert list(short_folder.glob("tandem-*")) == []


def gone(pids: list[int], within_s: float = 2.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def test_members_start_together_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"router": BECOMES_READY, "prefill-0": HAS_A_CHILD, "decode-0": IGNORES_SIGTERM})
    stack = LocalStack(settings(num_prefill=1))
    lines: list[str] = []
    stack.start(lines.append)
    try:
        assert sorted(line.split()[0] for line in lines) == ["decode-0", "prefill-0", "router"]
        pids = [member.pid for member in stack.members.values()]
        pids += [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
        assert len(pids) == 4
        assert oct((stack.folder / "kv_secret").stat().st_mode & 0o777) == "0o600"
    finally:
        started_s = time.monotonic()
        stack.stop()
    assert time.monotonic() - started_s < 2, "one of them ignores SIGTERM, and Ctrl-C must still be quick"
    assert gone(pids, within_s=5.0)
    stack.stop()


def test_a_member_that_cannot_start_is_named_with_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": DIES})
    stack = LocalStack(settings())
    with pytest.raises(StackFailed, match=r"(?s)decode-0 ended with status 3 before it was ready.*disk on fire"):
        stack.start()
    assert not any(member.running for member in stack.members.values())


def test_a_member_that_never_becomes_ready_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": "import time; time.sleep(60)"})
    stack = LocalStack(settings(start_timeout_s=4))
    with pytest.raises(StackFailed, match=r"not ready within 4 s: decode-0"):
        stack.start()


def test_a_dead_member_is_reported_and_started_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.1)
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": BECOMES_READY})
    with LocalStack(settings()) as stack:
        assert stack.supervise() == []
        first_pid = stack.members["decode-0"].pid
        stack.kill("decode-0")
        [event] = stack.supervise()
        assert "decode-0 was ended by SIGKILL; starting it again in 0.1 s" in event.what
        assert event.lines == ("log of decode-0",)
        assert stack.supervise() == [], "not yet"
        time.sleep(0.11)
        assert [event.what for event in stack.supervise()] == ["decode-0 was started again"]
        stack.wait_ready("decode-0")
        assert stack.members["decode-0"].pid != first_pid


def test_a_member_that_keeps_dying_ends_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": BECOMES_READY})
    with LocalStack(settings()) as stack:
        for _ in range(5):
            stack.kill("decode-0")
            stack.supervise()
            stack.supervise()
        stack.kill("decode-0")
        with pytest.raises(StackFailed, match=r"6 times within 60 s; giving up"):
            stack.supervise()


def test_members_die_with_an_owner_that_is_killed(temporary: Path) -> None:
    code = (
        "import sys, tempfile, time, pytest; tempfile.tempdir = sys.argv[1]\n"
        "from tests.tandem.scripted_stack import *\n"
        "scripted(pytest.MonkeyPatch(), {'router': BECOMES_READY, 'decode-0': BECOMES_READY})\n"
        "stack = LocalStack(settings()); stack.start()\n"
        "print(*(member.pid for member in stack.members.values()), flush=True); time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(temporary)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert gone(pids)
    left = list(temporary.glob(f"tandem-{os.getuid()}-*"))
    assert len(left) == 1, "a killed owner cannot clear up"
    scripted_stack_sweeps(left[0])


def scripted_stack_sweeps(folder: Path) -> None:
    """The next start does."""
    from tandem.running import sweep

    assert sweep() == 1
    assert not folder.exists()


def test_environment_reaches_the_member_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tells = BECOMES_READY.replace(
        'print(f"log of {sys.argv[1]}"', 'print(os.environ.get("TANDEM_X"), os.environ.get("TANDEM_Y")'
    )
    scripted(monkeypatch, {"router": tells, "decode-0": tells})
    env = {"decode-0": {"TANDEM_X": "1"}, "*": {"TANDEM_Y": "2"}}
    with LocalStack(settings(), env=env) as stack:
        assert stack.members["router"].last_lines() == ["None 2"]
        assert stack.members["decode-0"].last_lines() == ["1 2"]
