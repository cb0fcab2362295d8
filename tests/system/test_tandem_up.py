"""`tandem up` from the command line: text within seconds, and nothing left behind, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from tandem import Client, TandemError
from tandem.cli import main
from tandem.client.credentials import PLAINTEXT
from tandem.client.health import NOT_READY
from tandem.client.registry import running_stacks, sweep
from tests.process_logs import LOGS
from tests.system.health_checks import LATE
from tests.waiting import wait_until

END_WITHIN_S = 10.0
"""Generous as well: it takes a second on an idle machine. The drain's grace period, which Ctrl-C skips, is longer."""


class Up:
    """A running `tandem up`, its output line by line, and all its processes."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.lines: list[str] = []
        self.logs: list[Path] = []
        self._folder = folder
        self.env = {**os.environ, "TMPDIR": str(folder / "tmp"), "XDG_RUNTIME_DIR": str(folder / "run")}
        for name in ("tmp", "run"):
            (folder / name).mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tandem.cli", "up", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.env,
            text=True,
        )

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if text in line:
                return
        raise AssertionError(f"no line with {text!r}:\n" + "\n".join(self.lines))

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def tandem(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Another `tandem` command of the same user."""
        command = [sys.executable, "-m", "tandem.cli", *args]
        return subprocess.run(command, capture_output=True, text=True, env=self.env, timeout=60)

    def doctor(self) -> Result:
        """`tandem doctor --quick`, repeated while a member is late, or not ready since another one was. In this
        process, which has imported torch."""
        answers: list[Result] = []

        def is_settled() -> bool:
            answers.append(CliRunner().invoke(main, ("doctor", "--quick"), env=self.env))
            return not any(f"{state} at " in answers[-1].stdout for state in (LATE, NOT_READY))

        wait_until(is_settled, lambda: answers[-1].stdout)
        return answers[-1]

    def end(self, signum: int) -> float:
        """Signals it; returns the seconds until it has ended. Then the logs of its processes are read."""
        self._keep_logs()
        started_s = time.monotonic()
        self.process.send_signal(signum)
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        self.process.wait(30)
        took_s = time.monotonic() - started_s
        for log in self.logs:
            LOGS.read(log)
        LOGS.search("tandem up", "\n".join(self.lines))
        return took_s

    def _keep_logs(self) -> None:
        """Gives each log a second name: the first one goes with the stack."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        for log in self._folder.glob("tmp/*/logs/*.log"):
            os.link(log, folder / log.name)
            self.logs.append(folder / log.name)


@pytest.fixture
def folder(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder / "run"))
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder / "tmp"))
    return short_folder


@pytest.fixture
def up(folder: Path, request: pytest.FixtureRequest) -> Iterator[Up]:
    running = Up(folder, *getattr(request, "param", ()))
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def wait_gone(processes: list[psutil.Process]) -> None:
    wait_until(lambda: not alive(processes), lambda: f"processes are left: {alive(processes)}", 15.0)


# A busy machine may measure that prefilling on the decode instance takes less time, and auto does that then.
@pytest.mark.parametrize("up", [("--disaggregation", "always")], indirect=True)
def test_up_shows_text_answers_generate_and_leaves_nothing(up: Up, folder: Path) -> None:
    # STEP: ready, with text on the screen
    up.wait_for("ready in ")
    shown = [line for line in up.lines if line.startswith("Once upon a time")]
    assert shown
    assert len(shown[0]) > 40, f"no text to be seen: {shown}"
    assert any("handed over" in line for line in up.lines), "\n".join(up.lines)
    up.wait_for("Ctrl-C ends it")
    for address in ("OpenAI API", "live page"):
        assert [line for line in up.lines if line.startswith(f"  {address}") and "http://127.0.0.1:" in line], up.lines
    # STEP: other commands find it
    answer = up.tandem("generate", "Once upon a time", "--max-tokens", "12", "--temperature", "0", "--stats")
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.strip()) > 10
    assert "12 tokens" in answer.stderr
    chat = up.tandem("generate", "--chat", "What is a tandem?", "--max-tokens", "12")
    assert chat.returncode == 0, chat.stderr
    doctor = up.doctor()
    assert doctor.exit_code == 0, doctor.stdout
    assert re.search(r"decode-0 +ready at 127.0.0.1:\d+, (bfloat16|float32), 0 running", doctor.stdout), doctor.stdout
    [stack] = running_stacks()
    with Client() as client:
        assert client.address == stack.address
        assert client.model_info().model == "demo"
    # STEP: its files are private
    private = Path(stack.folder)
    assert private.stat().st_mode & 0o777 == 0o700
    assert (private / "kv_secret").stat().st_mode & 0o777 == 0o600
    # STEP: Ctrl-C ends it
    processes = up.descendants()
    assert len(processes) >= 5, "a router, two servers, two engine cores"
    took_s = up.end(signal.SIGINT)
    print(f"Ctrl-C: {took_s:.2f} s")
    assert took_s < END_WITHIN_S
    assert up.process.returncode == 0
    assert {"router.log", "prefill-0.log", "decode-0.log"} <= {log.name for log in up.logs}
    wait_gone(processes)
    assert list((folder / "tmp").iterdir()) == []
    assert running_stacks() == []
    assert not list((folder / "run").rglob("*.json"))


def test_ctrl_c_while_it_starts_leaves_nothing(up: Up, folder: Path) -> None:
    up.wait_for("starting the router")
    wait_until(lambda: len(up.descendants()) >= 3, "the processes do not start")
    processes = up.descendants()
    assert up.end(signal.SIGINT) < END_WITHIN_S
    wait_gone(processes)
    assert list((folder / "tmp").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("up", [("--api-key", "key-of-the-test", "--served-model-name", "penny")], indirect=True)
def test_processes_end_with_up_and_a_dead_instance_is_restarted(up: Up, folder: Path) -> None:
    up.wait_for("Ctrl-C ends it")
    [stack] = running_stacks()
    assert any("handed over" in line for line in up.lines), "\n".join(up.lines)
    for address in ("OpenAI API", "live page"):
        assert [line for line in up.lines if line.startswith(f"  {address}") and "http://127.0.0.1:" in line], up.lines
    with Client(stack.address, credentials=PLAINTEXT) as client, pytest.raises(TandemError, match="UNAUTHENTICATED"):
        client.model_info()
    # STEP: an instance is killed; the event names it, and it is restarted
    [server] = [process for process in up.descendants() if "decode_service" in " ".join(process.cmdline())][:1]
    server.kill()
    up.wait_for("decode-0 was killed by SIGKILL")
    up.wait_for("decode-0 was restarted")
    with Client(stack.address, timeout_s=10) as client:
        assert client.model_info().model == "penny"

        def answers() -> bool:
            try:
                return bool(client.generate("Once upon a time", max_tokens=4).token_ids)
            except TandemError:
                return False

        wait_until(answers, "the stack did not recover")
    # STEP: up itself is killed; its children end with it
    processes = up.descendants()
    assert len(processes) >= 5
    up.end(signal.SIGKILL)
    wait_gone(processes)
    # STEP: the next start removes the files that are left
    assert list((folder / "tmp").iterdir())
    assert sweep() == 1
    assert [path.name for path in (folder / "tmp").iterdir() if path.name.startswith("tandem-")] == []
