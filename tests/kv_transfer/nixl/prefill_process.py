"""A prefill core in a process of its own, to be killed and frozen: commands in, events out, over its pipes.

Importing the engine takes seconds, so a `ProcessTemplate` does it once and forks the processes that tests ask for:

    `python -m tests.kv_transfer.nixl.prefill_process FD` ─"engine"|"canary …", two pipes─▶ fork ─▶ its process id

A process reads one line with the engine's configuration ("engine" alone), then a command a line, all msgpack in hex,
and writes an event a line.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from engine.config import EngineConfig
from engine.core.messages import Command, Event, TokensEvent, TransferEvent
from tests.engine_under_test import DEVICE
from tests.waiting import freeze

_POLL_S = 0.002


class ProcessTemplate:
    """A process that has imported the engine and forks in milliseconds."""

    def __init__(self) -> None:
        self._control, far = socket.socketpair()
        with far:
            command = [sys.executable, "-m", "tests.kv_transfer.nixl.prefill_process", str(far.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[far.fileno()])

    def fork(self, command: str, stdin: int, stdout: int) -> int:
        """A process that runs `command` on these descriptors; returns its id."""
        socket.send_fds(self._control, [command.encode()], [stdin, stdout])
        answer = self._control.recv(8)
        assert len(answer) == 8, "the template has died"
        return int.from_bytes(answer, "little")

    def close(self) -> None:
        self._control.close()
        self._process.wait(10.0)


class PrefillProcess:
    """The process as the test sees it."""

    def __init__(self, template: ProcessTemplate, command: str = "engine", config: EngineConfig | None = None) -> None:
        stdin, self._commands = os.pipe()
        self._event_pipe, stdout = os.pipe()
        self.pid = template.fork(command, stdin, stdout)
        self._pidfd = os.pidfd_open(self.pid)
        os.close(stdin)
        os.close(stdout)
        self.events: list[Event] = []
        if config is not None:
            self._send(msgspec.msgpack.encode(config))
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not select.select([self._pidfd], [], [], 0)[0]

    def handle(self, command: Command) -> None:
        """Send a command to the core."""
        self._send(msgspec.msgpack.encode(command))

    def wait(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait for its events."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the producer does not get there"
            assert self.alive, "the producer has died"
            time.sleep(_POLL_S)

    def transfers(self, transfer_id: str) -> list[TransferEvent]:
        """Events of one transfer."""
        return [event for event in self.events if isinstance(event, TransferEvent) and event.transfer_id == transfer_id]

    def first_token(self, request_id: str) -> list[int]:
        """What the request has emitted here."""
        tokens = [event for event in self.events if isinstance(event, TokensEvent) and event.request_id == request_id]
        return [token for event in tokens for token in event.token_ids]

    def signal(self, number: int) -> None:
        """Returns after SIGSTOP when it has stopped."""
        if number == signal.SIGSTOP:
            freeze(self.pid)
        else:
            signal.pidfd_send_signal(self._pidfd, number)

    def end(self) -> None:
        """Kill it, if it is alive. Idempotent."""
        if self._pidfd < 0:
            return
        if self.alive:
            self.signal(signal.SIGKILL)
            assert select.select([self._pidfd], [], [], 10.0)[0], "it does not die"
        self._thread.join(5.0)
        for descriptor in (self._commands, self._event_pipe, self._pidfd):
            os.close(descriptor)
        self._pidfd = -1

    def _send(self, data: bytes) -> None:
        line = memoryview(f"{data.hex()}\n".encode())
        while line:
            line = line[os.write(self._commands, line) :]

    def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(Event)
        with open(self._event_pipe, closefd=False) as lines:
            for line in lines:
                if line.startswith("event "):
                    self.events.append(decoder.decode(bytes.fromhex(line.removeprefix("event "))))


def run_engine() -> None:
    """Step an engine core until standard input ends."""
    from engine.core.core import EngineCore

    config = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=EngineConfig)
    config = msgspec.structs.replace(config, device=DEVICE)
    inbox: queue.Queue[str | None] = queue.Queue()
    core = EngineCore(config, wake=lambda: inbox.put(""))
    decoder = msgspec.msgpack.Decoder(Command)

    def listen() -> None:
        for line in sys.stdin:
            inbox.put(line.strip())
        inbox.put(None)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            line = inbox.get(timeout=0.05 if core.idle else 0.0001)
        except queue.Empty:
            line = ""
        if line is None:
            core.shutdown()
            return
        if line:
            core.handle(decoder.decode(bytes.fromhex(line)))
        for event in core.step():
            print("event", msgspec.msgpack.encode(event).hex(), flush=True)


def _run(command: str) -> None:
    from tests.kv_transfer.nixl import canary

    name, *arguments = command.split("\n")
    if name == "engine":
        run_engine()
    else:
        canary.run_producer(*arguments)


def _serve_forks(control: socket.socket) -> None:
    """The template: until the test's end of `control` is closed."""
    import engine.core.core
    import engine.models  # noqa: F401
    import tests.kv_transfer.nixl.canary  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    while True:
        command, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not command:
            os._exit(0)  # torch takes a second to end in order
        if not (pid := os.fork()):
            control.close()
            for standard, descriptor in enumerate(descriptors):
                os.dup2(descriptor, standard)
                os.close(descriptor)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _run(command.decode())
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(pid.to_bytes(8, "little"))


if __name__ == "__main__":
    _serve_forks(socket.socket(fileno=int(sys.argv[1])))
