"""Pools of a local stack that are given other sizes, with members that are small scripts."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import crew, restarts, supervision, topology
from tandem.local_stack import LocalStack
from tandem.roster import SizeRefused
from tandem.running import running_stacks
from tests.tandem.scripted_stack import BECOMES_READY, DIES, DRAINS, IGNORES_SIGTERM, let_go, scripted, settings, until


@pytest.fixture(autouse=True)
def temporary(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stack folders lie here; afterwards none may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    yield short_folder
    assert list(short_folder.glob("tandem-*")) == []


def test_a_pool_grows_and_shrinks_and_nothing_of_those_that_went_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {}, newcomers=DRAINS)
    with LocalStack(settings()) as stack:
        # STEP: it grows
        assert stack.resize("decode", 3) == 1
        assert list(stack.instances) == ["decode-0", "decode-1", "decode-2"]
        assert len(set(stack.instances.values())) == 3
        told = until(stack, lambda: all(member.ready for member in stack.members.values()) and len(stack.members) == 4)
        assert [line for line in told if "decode-1 was started" in line]
        # STEP: it shrinks; the named one goes, and is gone only when its process is
        victim = stack.members["decode-1"]
        assert stack.resize("decode", 2, [stack.instances["decode-1"]]) == 3
        assert list(stack.instances) == ["decode-0", "decode-2"], "whom the router is told of"
        until(stack, lambda: victim.last_lines() == ["draining"])
        assert "decode-1" in stack.members
        assert victim.running
        let_go(stack, "decode-1")
        assert until(stack, lambda: "decode-1" not in stack.members) == ["decode-1 is gone"]
        assert victim.exit_status == 0
        assert not victim.spec.log_file.exists()
        assert not victim.spec.ready_file.exists()
        assert not victim.spec.run_folder.exists()
        assert stack.supervise() == [], "it is not started again"
        # STEP: its name is free
        stack.resize("decode", 3)
        assert list(stack.instances) == ["decode-0", "decode-2", "decode-1"]


def test_growth_while_one_still_drains_gets_somebody_new(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {}, newcomers=DRAINS)
    with LocalStack(settings(num_decode=2)) as stack:
        leaving = stack.members["decode-1"]
        address = stack.instances["decode-1"]
        stack.resize("decode", 1)
        until(stack, lambda: leaving.last_lines() == ["draining"])
        stack.resize("decode", 2)
        assert list(stack.instances) == ["decode-0", "decode-2"], "its name is not free yet"
        assert address not in stack.instances.values()
        until(stack, lambda: "decode-2" in stack.members and stack.members["decode-2"].ready)
        assert leaving.running, "and it drains on"
        let_go(stack, "decode-1")
        until(stack, lambda: "decode-1" not in stack.members)


def test_the_last_of_two_resizes_in_a_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {})
    with LocalStack(settings()) as stack:
        stack.resize("decode", 3)
        assert stack.resize("decode", 1) == 3
        assert stack.supervise() == [], "nobody was started for it"
        assert list(stack.members) == ["router", "decode-0"]
        stack.resize("decode", 2)
        assert list(stack.instances) == ["decode-0", "decode-1"], "the names of those that never were are free"


def test_one_that_dies_while_it_drains_is_told_of_and_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {}, newcomers=DRAINS)
    with LocalStack(settings(num_decode=2)) as stack:
        leaving = stack.members["decode-1"]
        stack.resize("decode", 1)
        until(stack, lambda: leaving.last_lines() == ["draining"])
        os.kill(leaving.pid, signal.SIGKILL)
        told = until(stack, lambda: "decode-1" not in stack.members)
        assert told == ["decode-1 is gone, not as it should: it was ended by SIGKILL"]
        assert stack.supervise() == []


def test_a_dead_one_that_is_to_go_is_not_started_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {})
    with LocalStack(settings(num_decode=2)) as stack:
        stack.kill("decode-1")
        stack.supervise()
        stack.resize("decode", 1)
        until(stack, lambda: "decode-1" not in stack.members)
        time.sleep(1.2 * restarts.FIRST_BACKOFF_S)
        assert stack.supervise() == []
        # STEP: the next one of its name begins anew
        stack.resize("decode", 2)
        until(stack, lambda: "decode-1" in stack.members and stack.members["decode-1"].ready)
        stack.kill("decode-1")
        told = until(stack, lambda: stack.members["decode-1"].running)
        assert "decode-1 was ended by SIGKILL; starting it again in 0.5 s" in told


def test_the_next_one_gets_the_cores_of_one_that_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "usable_cores", lambda: [0, 1])
    scripted(monkeypatch, {})
    with LocalStack(settings(num_decode=2)) as stack:
        assert "[1]" in stack.members["decode-1"].spec.argv
        stack.resize("decode", 1)
        until(stack, lambda: "decode-1" not in stack.members)
        stack.resize("prefill", 2)
        until(stack, lambda: len(stack.members) == 4)
        assert "[1]" in stack.members["prefill-0"].spec.argv
        assert "--cpu-cores" not in stack.members["prefill-1"].spec.argv


def test_a_frozen_one_that_was_told_to_go_is_killed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_LEAVE_TIMEOUT_S", 0.3)
    scripted(monkeypatch, {}, newcomers=IGNORES_SIGTERM)
    with LocalStack(settings(num_decode=2)) as stack:
        stack.resize("decode", 1)
        told = until(stack, lambda: "decode-1" not in stack.members)
        assert told[-1] == "decode-1 did not end within 0.3 s and was killed"


def test_a_newcomer_that_cannot_start_leaves_the_stack_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": BECOMES_READY}, newcomers=DIES.replace("3", "2"))
    with LocalStack(settings()) as stack:
        stack.resize("decode", 2)
        until(stack, lambda: "decode-1" in stack.members)
        told = until(stack, lambda: "decode-1" not in stack.members)
        assert "decode-1 ended with status 2 before it was ready; its pool goes on without it" in told
        assert list(stack.instances) == ["decode-0"]


def test_a_newcomer_that_keeps_dying_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": BECOMES_READY}, newcomers=DIES)
    with LocalStack(settings()) as stack:
        stack.resize("decode", 2)
        until(stack, lambda: "decode-1" in stack.members)
        told = until(stack, lambda: "decode-1" not in stack.members)
        assert sum("starting it again" in line for line in told) == 5
        assert list(stack.instances) == ["decode-0"]


@pytest.mark.parametrize(
    ("role", "size", "allowed"), [("decode", 0, r"1\.\.64"), ("decode", 65, r"1\.\.64"), ("prefill", -1, r"0\.\.64")]
)
def test_sizes_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch, role: Any, size: int, allowed: str) -> None:
    scripted(monkeypatch, {})
    with LocalStack(settings()) as stack:
        with pytest.raises(SizeRefused, match=allowed):
            stack.resize(role, size)
        assert list(stack.instances) == ["decode-0"]


def test_more_than_the_memory_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {})
    with LocalStack(settings(num_blocks=None, kv_cache_bytes=1 << 30)) as stack:
        monkeypatch.setattr(crew, "available_bytes", lambda: 3 << 30)
        with pytest.raises(SizeRefused, match=r"4 more decode instances need 4\.0 GiB .* 3\.0 GiB are free"):
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
    assert running_stacks() == []
