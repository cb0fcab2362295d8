"""`tandem pools resize` and `--watch` against a router with fake instances and a real owner's desired."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

import grpc
import pytest
from click.testing import CliRunner, Result

from protos.tandem.v1 import pools_pb2, pools_pb2_grpc
from router.request.validation import ServedModel
from tandem.cli import main
from tandem.commands.pools import format_age
from tests.fakes.model_folder import write_model_folder
from tests.router.pools.owned import Owned, owned
from tests.router.rig import running
from tests.waiting import wait_until


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
        snapshot = self.stack.desired.snapshot
        return {role: len(snapshot.pool(role)) for role in ("prefill", "decode")}

    def freeze_new_instances(self) -> None:
        """New instances are never ready."""
        for fake in self.stack.spares:
            self._loop.call_soon_threadsafe(fake.freeze)

    def thaw_new_instances(self) -> None:
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
    raise AssertionError(f"never printed {text!r}")


def test_it_returns_when_the_pool_has_its_size_and_reports_every_change(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.pools.pool._LINGER_S", 0.05)
    grown = background.pools("resize", "decode=3", "--timeout", "9999999999")
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


def test_the_table_shows_the_last_change_and_its_reason(background: Background) -> None:
    background.pools("resize", "decode=3")
    last = background.pools().output.splitlines()[-1]
    assert re.fullmatch(r"decode: 3 of 3 ready; 1 → 3 by the operator, \d+ s ago", last)

    def found() -> tuple[int | None, int, str]:
        answer = json.loads(background.pools("--json").output)["pools"][1]
        return answer["size"], answer["num_ready"], answer["last_change"]["cause"]

    wait_until(
        lambda: found() == (3, 3, "operator"), lambda: str(found())
    )  # a stack that is silent for a while has an unknown size


def test_a_size_that_the_router_rejects_is_reported_with_its_message(background: Background) -> None:
    result = background.pools("resize", "decode=0")
    assert result.exit_code != 0
    assert result.output == "Error: sizes: decode must be between 1 and 64, is 0\n"
    assert background.sizes()["decode"] == 1


def test_a_drain_says_that_the_pool_keeps_its_size_and_names_resize(background: Background) -> None:
    output = background.pools("drain", "prefill-0").output
    assert "prefill-0 is draining" in output
    assert "The prefill pool keeps its size, 1, so the instance is started again" in output
    assert "tandem pools resize prefill=SIZE" in output


def test_no_wait_returns_before_instances_are_ready(background: Background) -> None:
    background.freeze_new_instances()
    assert background.pools("resize", "decode=2", "--no-wait").exit_code == 0
    assert background.sizes()["decode"] == 2
    background.thaw_new_instances()


def test_a_timeout_reports_that_the_resize_continues(background: Background) -> None:
    background.freeze_new_instances()
    result = background.pools("resize", "decode=2", "--timeout", "0.6")
    assert result.exit_code == 1
    assert "not complete after 0.6 s; the resize continues" in result.output
    assert background.sizes()["decode"] == 2
    background.thaw_new_instances()


def test_a_timeout_is_kept_when_the_router_is_silent() -> None:
    ended = threading.Event()

    class Silent(pools_pb2_grpc.PoolsServiceServicer):
        def ListPools(self, request: Any, context: Any) -> Any:
            return pools_pb2.ListPoolsResponse()

        def ResizePools(self, request: Any, context: Any) -> Any:
            return pools_pb2.ResizePoolsResponse(changes=[pools_pb2.PoolChange(previous_size=1, size=2)])

        def WatchPools(self, request: Any, context: Any) -> Any:
            ended.wait(10)
            yield from ()

    server: Any = grpc.server(ThreadPoolExecutor(2))  # the stubs are typed for asyncio alone
    pools_pb2_grpc.add_PoolsServiceServicer_to_server(Silent(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        command = ["pools", "resize", "decode=2", "--timeout", "0.6", "--admin", address]
        assert "not complete after 0.6 s" in CliRunner().invoke(main, command).output
    finally:
        ended.set()
        server.stop(None).wait()


def test_waiting_ends_when_another_resize_changes_the_size(background: Background) -> None:
    background.freeze_new_instances()
    with background.begin("resize", "decode=2") as command:
        until_line(command.stdout, "decode: 1 → 2")
        until_line(command.stdout, " starts")
        background.stack.desired.resize("decode", 1)
        _, errors = command.communicate(timeout=30)
    assert command.returncode == 1
    assert "the desired size of the decode pool is now 1, not 2" in errors
    background.thaw_new_instances()


def test_ctrl_c_ends_the_waiting_and_not_the_resize(background: Background) -> None:
    background.freeze_new_instances()
    with background.begin("resize", "decode=2") as command:
        until_line(command.stdout, "decode: 1 → 2")
        until_line(command.stdout, " starts")
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=30)
    assert command.returncode == 130
    assert errors.strip() == "stopped waiting; the resize continues, `tandem pools` shows its progress"
    assert background.sizes()["decode"] == 2
    background.thaw_new_instances()
    background.call(background.stack.until_ready(decode=2))


def test_a_watch_shows_the_table_again_and_again_until_ctrl_c(background: Background) -> None:
    with background.begin("--watch", "--interval", "0.1") as command:
        until_line(command.stdout, "decode: 1 of 1 ready")
        background.stack.desired.resize("decode", 2)
        until_line(command.stdout, "decode: 2 of 2 ready")
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=30)
    assert (command.returncode, errors) == (0, "")


def test_a_watch_for_programs_is_a_line_each_time_and_ends_with_the_router(background: Background) -> None:
    with background.begin("--watch", "--interval", "0.1", "--json") as command:
        assert command.stdout is not None
        for _ in range(3):
            answer = json.loads(command.stdout.readline())
            assert [pool["num_ready"] for pool in answer["pools"]] == [1, 1]
            assert [one["instance"] for one in answer["instances"]] == ["prefill-0", "decode-0"]
        background.call(background.stack.rig.app.drain())
        _, errors = command.communicate(timeout=30)
    assert (command.returncode, errors.strip()) == (0, "the router stopped")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.0, "59 s"), (60.0, "1 min"), (7200.0, "2 h")])
def test_ages_are_shown_in_the_largest_unit(seconds: float, text: str) -> None:
    assert format_age(seconds) == text
