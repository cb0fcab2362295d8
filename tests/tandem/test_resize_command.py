"""`tandem pools resize` and `--watch` against a router with fake instances and a real owner's roster."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner, Result

from router.model import ServedModel
from tandem.cli import main
from tandem.commands.pools.listing import age
from tests.fakes.model_folder import write_model_folder
from tests.router.pools.owned import Owned, owned
from tests.router.rig import running


class Background:
    """One decode instance and four spares, on a loop of its own: the command line blocks its thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = write_model_folder(folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router and fakes")

    def __enter__(self) -> Background:
        self._thread.start()
        run = partial(running, ServedModel.from_folder(self._folder, "fake"), self._folder)
        self._owned = owned(run, num_decode=1, num_spares=4)
        self.stack: Owned = self.call(self._owned.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._owned.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    @property
    def admin_address(self) -> str:
        return self.stack.rig.app.admin_address or ""

    def pools(self, *args: str) -> Result:
        """`tandem pools …`, to its end."""
        return CliRunner().invoke(main, ["pools", "--admin", self.admin_address, *args])

    def begin(self, *args: str) -> subprocess.Popen[str]:
        """The same as a process that a test can interrupt."""
        command = [sys.executable, "-m", "tandem.cli", "pools", "--admin", self.admin_address, *args]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def sizes(self) -> dict[str, int]:
        seating = self.stack.roster.seating
        return {role: len(seating.pool(role)) for role in ("prefill", "decode")}  # type: ignore[arg-type]

    def freeze_newcomers(self) -> None:
        """Who comes is never ready."""
        for fake in self.stack.spares:
            self._loop.call_soon_threadsafe(fake.freeze)

    def thaw_newcomers(self) -> None:
        for fake in self.stack.spares:
            self._loop.call_soon_threadsafe(fake.thaw)


@pytest.fixture
def background(tmp_path: Path) -> Iterator[Background]:
    with Background(tmp_path) as background:
        yield background


def until_line(stream: IO[str] | None, text: str) -> str:
    assert stream is not None
    for line in stream:
        if text in line:
            return line
    raise AssertionError(f"never said {text!r}")


def test_it_returns_when_the_pool_has_its_size_and_tells_who_came_and_went(background: Background) -> None:
    grown = background.pools("resize", "decode=3")
    assert grown.exit_code == 0, grown.output
    lines = grown.output.splitlines()
    assert lines[0] == "decode: 1 → 3"
    assert {line.strip() for line in lines} >= {"decode-1 is ready", "decode-2 is ready"}
    assert sum(" starts" in line for line in lines) <= 2
    assert background.sizes() == {"prefill": 1, "decode": 3}
    shrunk = background.pools("resize", "decode=1", "prefill=0")
    assert shrunk.exit_code == 0, shrunk.output
    lines = shrunk.output.splitlines()
    assert lines[:2] == ["decode: 3 → 1", "prefill: 1 → 0"]
    assert sum("is gone" in line for line in lines) == 3
    assert background.sizes() == {"prefill": 0, "decode": 1}


def test_a_program_gets_json_alone_on_standard_output(background: Background) -> None:
    result = background.pools("resize", "decode=2", "--json")
    assert result.exit_code == 0, result.output
    change = {"pool": "decode", "previous_size": 1, "size": 2}
    assert json.loads(result.stdout) == {"changes": [change], "complete": True}
    assert "decode-1 is ready" in result.stderr
    result = background.pools("resize", "decode=1", "--no-wait", "--json")
    assert json.loads(result.stdout)["complete"] is False


def test_the_table_tells_who_changed_what_and_why(background: Background) -> None:
    background.pools("resize", "decode=3")
    last = background.pools().output.splitlines()[-1]
    assert last.startswith("decode: 3 of 3 ready; 1 → 3 by the operator, ")
    assert last.endswith(" ago: asked for by an operator")
    told = json.loads(background.pools("--json").output)["pools"][1]
    assert (told["size"], told["num_ready"], told["last_change"]["cause"]) == (3, 3, "operator")


def test_a_size_that_the_router_refuses_is_told_in_its_words(background: Background) -> None:
    result = background.pools("resize", "decode=0")
    assert result.exit_code != 0
    assert "allowed: 1..64" in result.output
    assert background.sizes()["decode"] == 1


def test_no_wait_returns_though_nobody_is_ready(background: Background) -> None:
    background.freeze_newcomers()
    assert background.pools("resize", "decode=2", "--no-wait").exit_code == 0
    assert background.sizes()["decode"] == 2
    background.thaw_newcomers()


def test_who_has_waited_long_enough_is_told_that_it_goes_on(background: Background) -> None:
    background.freeze_newcomers()
    result = background.pools("resize", "decode=2", "--timeout", "0.6")
    assert result.exit_code == 1
    assert "not there after 0.6 s; it goes on" in result.output
    assert background.sizes()["decode"] == 2
    background.thaw_newcomers()


def test_who_waits_hears_that_somebody_else_wants_another_size(background: Background) -> None:
    background.freeze_newcomers()
    other = threading.Timer(0.5, background.stack.roster.resize, ("decode", 1))
    other.start()
    result = background.pools("resize", "decode=2")
    other.join()
    assert result.exit_code == 1
    assert "the decode pool is to have 1 instances by now, not 2" in result.output
    background.thaw_newcomers()


def test_ctrl_c_ends_the_waiting_and_not_the_resize(background: Background) -> None:
    background.freeze_newcomers()
    with background.begin("resize", "decode=2") as command:
        until_line(command.stdout, "decode: 1 → 2")
        until_line(command.stdout, " starts")
        command.send_signal(signal.SIGINT)
        _, complaint = command.communicate(timeout=30)
    assert command.returncode == 130
    assert complaint.strip() == "no longer waiting; the resize goes on, `tandem pools` shows how far"
    assert background.sizes()["decode"] == 2
    background.thaw_newcomers()
    background.call(background.stack.until_ready(decode=2))


def test_a_watch_shows_the_table_again_and_again_until_ctrl_c(background: Background) -> None:
    with background.begin("--watch", "--interval", "0.1") as command:
        until_line(command.stdout, "decode: 1 of 1 ready")
        background.stack.roster.resize("decode", 2)
        until_line(command.stdout, "decode: 2 of 2 ready")
        command.send_signal(signal.SIGINT)
        _, complaint = command.communicate(timeout=30)
    assert (command.returncode, complaint) == (0, "")


def test_a_watch_for_programs_is_a_line_each_time_and_ends_with_the_router(background: Background) -> None:
    with background.begin("--watch", "--interval", "0.1", "--json") as command:
        assert command.stdout is not None
        for _ in range(3):
            told = json.loads(command.stdout.readline())
            assert [pool["num_ready"] for pool in told["pools"]] == [1, 1]
            assert [one["instance"] for one in told["instances"]] == ["prefill-0", "decode-0"]
        background.call(background.stack.rig.app.drain())
        _, complaint = command.communicate(timeout=30)
    assert (command.returncode, complaint.strip()) == (0, "the router ends")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.0, "59 s"), (60.0, "1 min"), (7200.0, "2 h")])
def test_ages_are_told_in_the_largest_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text
