"""Pools of a local stack that are resized, with small scripts as processes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.client.registry import running_stacks, state_dir
from tandem.local_stack import supervisor, topology
from tandem.local_stack.desired_state import InvalidSize
from tandem.local_stack.stack import LocalStack
from tandem.local_stack.supervisor import StackFailed
from tests.tandem.local_stack.scripted_stack import (
    BECOMES_READY,
    DIES,
    DRAINS,
    IGNORES_SIGTERM,
    let_go,
    scripted,
    settings,
    until,
)


@pytest.fixture(autouse=True)
def temporary(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stack folders lie here; afterwards none may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    yield short_folder
    assert list(short_folder.glob("tandem-*")) == []


def test_a_pool_grows_and_shrinks_and_removed_instances_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {}, others=DRAINS)
    with LocalStack(settings()) as stack:
        # STEP: it grows
        assert stack.resize("decode", 3) == 1
        assert list(stack.instances) == ["decode-0", "decode-1", "decode-2"]
        assert len(set(stack.instances.values())) == 3
        texts = until(
            stack, lambda: all(process.ready for process in stack.processes.values()) and len(stack.processes) == 4
        )
        assert [line for line in texts if "decode-1 started at" in line]
        # STEP: it shrinks; the named one goes, and is gone only when its process is
        victim = stack.processes["decode-1"]
        assert stack.resize("decode", 2, [stack.instances["decode-1"]]) == 3
        assert list(stack.instances) == ["decode-0", "decode-2"], "as reported to the router"
        until(stack, lambda: victim.last_lines() == ["draining"])
        assert "decode-1" in stack.processes
        assert victim.running
        let_go(stack, "decode-1")
        assert until(stack, lambda: "decode-1" not in stack.processes) == ["decode-1 is gone"]
        assert victim.exit_status == 0
        assert not victim.spec.log_file.exists()
        assert not victim.spec.ready_file.exists()
        assert not victim.spec.run_folder.exists()
        assert stack.supervise() == [], "it is not started again"
        # STEP: its name is free
        stack.resize("decode", 3)
        assert list(stack.instances) == ["decode-0", "decode-2", "decode-1"]


def test_a_pool_shrinks_though_a_file_of_settings_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "instance.yaml"
    file.write_text("server:\n  drain_grace_s: 1\n")
    scripted(monkeypatch, {})
    with LocalStack(settings(num_decode=2, instance_args=(f"--config={file}",))) as stack:
        file.unlink()
        stack.resize("decode", 1)
        until(stack, lambda: len(stack.processes) == 2)


def test_a_killed_process_leaves_no_file_to_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {})
    with LocalStack(settings()) as stack:
        decode = stack.processes["decode-0"]
        (decode.spec.run_folder / "core").mkdir()
        (decode.spec.run_folder / "core" / "socket").touch()
        decode.kill()
        until(stack, lambda: not decode.ready)
        until(stack, lambda: decode.ready)
        assert list(decode.spec.run_folder.iterdir()) == []


def test_growth_during_a_drain_starts_a_new_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {}, others=DRAINS)
    with LocalStack(settings(num_decode=2)) as stack:
        leaving = stack.processes["decode-1"]
        address = stack.instances["decode-1"]
        stack.resize("decode", 1)
        until(stack, lambda: leaving.last_lines() == ["draining"])
        stack.resize("decode", 2)
        assert list(stack.instances) == ["decode-0", "decode-2"], "its name is not free yet"
        assert address not in stack.instances.values()
        until(stack, lambda: "decode-2" in stack.processes and stack.processes["decode-2"].ready)
        assert leaving.running, "and it drains on"
        let_go(stack, "decode-1")
        until(stack, lambda: "decode-1" not in stack.processes)


def test_the_last_of_two_resizes_in_a_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {})
    with LocalStack(settings()) as stack:
        stack.resize("decode", 3)
        assert stack.resize("decode", 1) == 3
        assert stack.supervise() == [], "no process was started for it"
        assert list(stack.processes) == ["router", "decode-0"]
        stack.resize("decode", 2)
        assert list(stack.instances) == ["decode-0", "decode-1"], "the names of those that never were are free"


def test_an_instance_that_dies_during_its_drain_is_reported_and_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {}, others=DRAINS)
    with LocalStack(settings(num_decode=2)) as stack:
        leaving = stack.processes["decode-1"]
        stack.resize("decode", 1)
        until(stack, lambda: leaving.last_lines() == ["draining"])
        os.kill(leaving.pid, signal.SIGKILL)
        texts = until(stack, lambda: "decode-1" not in stack.processes)
        assert texts == ["decode-1 is gone before the end of its drain: it was killed by SIGKILL"]
        assert stack.supervise() == []


def test_a_dead_instance_is_not_restarted_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {})
    with LocalStack(settings(num_decode=2)) as stack:
        stack.processes["decode-1"].kill()
        stack.supervise()
        stack.resize("decode", 1)
        until(stack, lambda: "decode-1" not in stack.processes)
        time.sleep(1.2 * supervisor.FIRST_BACKOFF_S)
        assert stack.supervise() == []
        # STEP: the next one of its name begins anew
        stack.resize("decode", 2)
        until(stack, lambda: "decode-1" in stack.processes and stack.processes["decode-1"].ready)
        stack.processes["decode-1"].kill()
        texts = until(stack, lambda: stack.processes["decode-1"].running)
        assert "decode-1 was killed by SIGKILL; restarting in 0.5 s" in texts


def test_a_process_that_a_real_time_signal_kills_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a signal has no name of its own."""
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.0)
    scripted(monkeypatch, {})
    with LocalStack(settings()) as stack:
        process, killed_by = stack.processes["decode-0"], signal.SIGRTMIN + 1
        first_pid = process.pid
        process.send_signal(killed_by)
        texts = until(stack, lambda: process.exit_status is None and process.ready and process.pid != first_pid)
        assert texts == [f"decode-0 was killed by signal {killed_by}; restarting in 0 s", "decode-0 was restarted"]


def fail_starts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Makes the next starts of processes fail, as at a limit on processes."""
    errors, start = [OSError(errno.EAGAIN, "no process")] * count, subprocess.Popen

    def start_or_fail(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if errors:
            raise errors.pop()
        return start(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", start_or_fail)


def test_a_start_that_fails_is_repeated_and_the_others_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {})
    with LocalStack(settings()) as stack:
        router_pid = stack.processes["router"].pid
        # STEP: a new instance
        fail_starts(monkeypatch, 1)
        stack.resize("decode", 2)
        texts = until(stack, lambda: "decode-1" in stack.processes and stack.processes["decode-1"].ready)
        assert [text for text in texts if not text.startswith("decode-1 is ready")] == [
            "decode-1 could not be started ([Errno 11] no process); restarting in 0.5 s",
            "decode-1 was restarted",
        ]
        # STEP: one that was killed
        fail_starts(monkeypatch, 1)
        stack.processes["decode-0"].kill()
        texts = until(stack, lambda: stack.processes["decode-0"].ready)
        assert [text for text in texts if text.startswith("decode-0")] == [
            "decode-0 was killed by SIGKILL; restarting in 0.5 s",
            "decode-0 could not be started ([Errno 11] no process); restarting in 1 s",
            "decode-0 was restarted",
        ]
        assert stack.processes["router"].pid == router_pid
        # STEP: one that is removed before its start succeeds
        fail_starts(monkeypatch, 1)
        stack.resize("decode", 3)
        stack.supervise()
        stack.resize("decode", 2)
        assert until(stack, lambda: "decode-2" not in stack.processes)[-1] == "decode-2 is gone"


def test_a_new_instance_that_no_start_begins_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.0)
    scripted(monkeypatch, {})
    with LocalStack(settings()) as stack:
        fail_starts(monkeypatch, supervisor.MAX_EXITS + 1)
        stack.resize("decode", 2)
        texts = until(stack, lambda: "decode-1" in stack.processes)
        texts += until(stack, lambda: "decode-1" not in stack.processes)
        assert sum("restarting in" in text for text in texts) == supervisor.MAX_EXITS
        assert texts[-2].endswith("before it was ready; its pool continues without it")
        assert texts[-1] == "decode-1 is gone"


def test_a_stack_whose_first_start_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {})
    fail_starts(monkeypatch, 1)
    with pytest.raises(StackFailed, match=r"router could not be started \(\[Errno 11\] no process\)"):
        LocalStack(settings()).start()


def test_a_new_instance_gets_the_cores_of_a_removed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "usable_cores", lambda: [0, 1])
    scripted(monkeypatch, {})
    with LocalStack(settings(num_decode=2)) as stack:
        assert "[1]" in stack.processes["decode-1"].spec.argv
        stack.resize("decode", 1)
        until(stack, lambda: "decode-1" not in stack.processes)
        stack.resize("prefill", 2)
        until(stack, lambda: len(stack.processes) == 4)
        assert "[1]" in stack.processes["prefill-0"].spec.argv
        assert "--cpu-cores" not in stack.processes["prefill-1"].spec.argv


def test_a_frozen_instance_is_killed_after_the_drain_that_its_flags_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LEAVE_TIMEOUT_S", 0.1)
    scripted(monkeypatch, {}, others=IGNORES_SIGTERM)
    flags = ("--server-drain-accept-s=0.05", "--server-drain-grace-s=0.15")
    with LocalStack(settings(num_decode=2, instance_args=flags)) as stack:
        stack.resize("decode", 1)
        texts = until(stack, lambda: "decode-1" not in stack.processes)
        assert texts[-1] == "decode-1 did not exit within 0.3 s and was killed"


def test_a_new_instance_that_cannot_start_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": BECOMES_READY}, others=DIES.replace("3", "2"))
    with LocalStack(settings()) as stack:
        stack.resize("decode", 2)
        texts = until(stack, lambda: "decode-1" in stack.processes)
        texts += until(stack, lambda: "decode-1" not in stack.processes)
        assert "decode-1 exited with status 2 before it was ready; its pool continues without it" in texts
        assert texts[-1] == "decode-1 is gone", "it did not drain"
        assert list(stack.instances) == ["decode-0"]


@pytest.mark.parametrize("window_s", [supervisor.WINDOW_S, 0.0])
def test_a_new_instance_that_keeps_exiting_is_dropped_however_long_its_starts_take(
    monkeypatch: pytest.MonkeyPatch, window_s: float
) -> None:
    """With a window of 0 each exit is as far from the others as those of a large model."""
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr(supervisor, "WINDOW_S", window_s)
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": BECOMES_READY}, others=DIES)
    with LocalStack(settings()) as stack:
        stack.resize("decode", 2)
        texts = until(stack, lambda: "decode-1" in stack.processes)
        texts += until(stack, lambda: "decode-1" not in stack.processes)
        assert sum("restarting in" in line for line in texts) == 5
        assert list(stack.instances) == ["decode-0"]


def test_more_than_the_memory_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {})
    with LocalStack(settings(num_blocks=None, kv_cache_bytes=1 << 30)) as stack:
        monkeypatch.setattr(topology, "available_bytes", lambda: 3 << 30)
        with pytest.raises(InvalidSize, match=r"4 more decode instances need 4\.0 GiB .* 3\.0 GiB are free"):
            stack.resize("decode", 5)
        stack.resize("decode", 4)


def test_the_announced_stack_follows_its_pools(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary))
    scripted(monkeypatch, {})
    with LocalStack(settings()) as stack:
        stack.announce()
        stack.resize("decode", 2)
        stack.supervise()
        [found] = running_stacks()
        assert found.instances == stack.instances
        assert len(found.instances) == 2
        # STEP: while its state file cannot be written, the stack runs on
        shutil.rmtree(state_dir())
        state_dir().touch()
        stack.resize("decode", 3)
        stack.supervise()
        state_dir().unlink()
        stack.supervise()
        [found] = running_stacks()
        assert len(found.instances) == 3
    assert running_stacks() == []
