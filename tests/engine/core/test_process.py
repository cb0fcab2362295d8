"""An engine core's process: it ends at once, its status says whether to start it again; its loop reports in time."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.config import EngineConfig
from engine.core.core import EngineCore, StepTimeEstimator
from engine.core.messages import (
    AddRequest,
    Command,
    CoreMessage,
    EngineInfo,
    EngineRequest,
    Outputs,
    Shutdown,
    TokensEvent,
    TransferEvent,
)
from engine.core.process import HEARTBEAT_S, Mailbox, run_core
from engine.sampling.params import SamplingParams
from tests.builders import lively_checkpoint

BUG = """
import concurrent.futures, time
from types import SimpleNamespace
import engine.core.core
from engine.core import process

def run_core(core, mailbox):
    pool = concurrent.futures.ThreadPoolExecutor(1)
    for _ in range(2):  # Python would wait for what is queued
        pool.submit(time.sleep, 60)
    raise MemoryError("a bug")

engine.core.core.EngineCore = lambda *args: None
process.Mailbox = lambda address: SimpleNamespace(wake=None, close=lambda: None)
process.run_core = run_core
process.place_process = lambda *args: None
process._run(SimpleNamespace(parallelism=SimpleNamespace(core_rank=0)), "ipc:///none")
"""


STARTS = """
import errno
from types import SimpleNamespace
import engine.core.core
from engine.core import process
from engine.errors import CapacityError, InvalidCheckpoint
from engine.ranks import RankLost

def caused_by(number):
    error = InvalidCheckpoint("cannot read config.json")
    error.__cause__ = OSError(number, "of the disk")
    return error

process.Mailbox = lambda address: SimpleNamespace(wake=None)
process.place_process = lambda *args: None
for error in (
    *(InvalidCheckpoint("damaged"), CapacityError("too large"), FileNotFoundError(errno.ENOENT, "missing")),
    caused_by(errno.EACCES),
    *(OSError(number, "none is left") for number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENOSPC)),
    *(caused_by(errno.EMFILE), RankLost("rank 1 ended with status -9")),
):
    def start(config, wake):
        raise error
    engine.core.core.EngineCore = start
    try:
        process._run(SimpleNamespace(parallelism=SimpleNamespace(core_rank=0)), "ipc:///none")
    except SystemExit as end:
        print(end.code, end=" ")
"""


@pytest.fixture(scope="module")
def ended() -> subprocess.CompletedProcess[str]:
    """Of one process for both: it imports torch."""
    script = [sys.executable, "-c", STARTS + BUG]
    return subprocess.run(script, capture_output=True, text=True, timeout=100, check=False)


def test_a_bug_does_not_wait_for_grammars_that_are_queued(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 1
    assert "MemoryError: a bug" in ended.stderr


def test_only_a_start_that_would_fail_again_has_the_status_of_wrong_settings(
    ended: subprocess.CompletedProcess[str],
) -> None:
    assert ended.stdout.split() == ["2"] * 4 + ["1"] * 6, ended.stderr
    assert "engine core: damaged\n" in ended.stderr


UNINSTALLED = """
import sys
from engine.config import EngineConfig
from engine.core import process

sys.modules["torch"] = None  # as if it were not there
process._run(EngineConfig(model="m"), "ipc:///none")
"""


def test_an_installation_without_a_module_is_one_line_and_the_status_of_wrong_settings() -> None:
    ended = subprocess.run([sys.executable, "-c", UNINSTALLED], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("engine core: torch cannot be imported: ")
    assert line.endswith(": pip install -c constraints.txt -e . in the checkout")


class CoreWithTransfers(EngineCore):
    """During each step, which takes 10 ms, its connector makes progress."""

    is_computing = False

    def begin_step(self) -> bool:
        self.is_computing = super().begin_step()
        return self.is_computing

    def compute(self) -> None:
        super().compute()
        time.sleep(0.01)

    def poll_connector(self) -> None:
        super().poll_connector()
        if self.is_computing:
            self._events.append(TransferEvent("t1", 1))

    def finish_step(self) -> None:
        self.is_computing = False
        super().finish_step()


@contextmanager
def running(
    model: Path, socket: Path, token_s: float, kind: type[EngineCore] = EngineCore, **config: Any
) -> Iterator[tuple[Callable[[Command], None], Callable[[], CoreMessage]]]:
    """`send` and `receive` of a core whose steps are predicted to take `token_s` per token."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as peer:
        peer.set(zmq.LINGER, 0)
        peer.set(zmq.RCVTIMEO, 60_000)
        peer.bind(f"ipc://{socket}")
        mailbox = Mailbox(f"ipc://{socket}")
        core = kind(EngineConfig(model=str(model), dtype="float32", **{"num_blocks": 16, **config}), mailbox.wake)
        core.step_time = StepTimeEstimator(token_s)
        loop = threading.Thread(target=run_core, args=(core, mailbox), daemon=True)
        loop.start()

        def send(command: Command) -> None:
            peer.send(msgspec.msgpack.encode(command))

        try:
            yield send, lambda: msgspec.msgpack.decode(peer.recv(), type=CoreMessage)
        finally:
            send(Shutdown())
            loop.join()
            mailbox.close()


def test_a_long_step_is_announced_before_it_is_computed(tmp_path: Path, short_folder: Path) -> None:
    model = lively_checkpoint(tmp_path / "model", "llama")
    prompt = list(range(64))
    with running(model, short_folder / "core", token_s=HEARTBEAT_S) as (send, receive):
        assert isinstance(receive(), EngineInfo)
        assert isinstance(receive(), Outputs), "it is idle, and has just reported"
        send(AddRequest(EngineRequest(request_id="r", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1))))
        while isinstance(message := receive(), Outputs) and not message.load.step_s:
            assert not message.events
    assert isinstance(message, Outputs)
    assert message.load.step_s == len(prompt) * HEARTBEAT_S
    assert message.events == [], "the step has ended"


def test_a_core_reports_between_short_steps_whatever_moves_during_them(tmp_path: Path, short_folder: Path) -> None:
    model = lively_checkpoint(tmp_path / "model", "llama")
    prompt = list(range(64))
    reports: list[Outputs] = []
    with running(model, short_folder / "core", 0.001, CoreWithTransfers, max_num_batched_tokens=1) as (send, receive):
        assert isinstance(receive(), EngineInfo)
        send(AddRequest(EngineRequest(request_id="r", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1))))
        while not (reports and any(isinstance(event, TokensEvent) for event in reports[-1].events)):
            message = receive()
            assert isinstance(message, Outputs)
            reports.append(message)
    during_the_prompt = [report for report in reports[:-1] if report.load.num_prefilled_tokens > 0]
    assert any(report.answered for report in during_the_prompt), "the core looks hung while it computes a prompt"
