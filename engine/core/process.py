"""`python -m engine.core.process ADDRESS`: an engine core in a separate process.

The configuration is one msgpack message on standard input, which stays open while the parent lives: its end tells the
core that the parent is dead, whatever killed it, and the core exits. The parent notices the core's death by waiting for
the process. Exit status 2: settings, model or installation are wrong, and the same start fails again.

One loop owns the core, and serves its mailbox:

    command ─▶ inbox ─▶ core.handle ─▶ begin_step ─▶ compute (its own thread) ─▶ finish_step ─▶ outbox ─▶ event
                              └─ commands for the connector ─▶ poll_connector ─▶ events, meanwhile

The loop sleeps while the core is idle and wakes for a command, for finished I/O, for a deadline, and every 250 ms to
report its load, so that its silence indicates a failure. During a step it sends no heartbeat, so that a hung model is
detected by the silence; the load sent before a long step says how long the step is predicted to take.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from engine.config import EngineConfig
from engine.core.messages import AddRequest, Command, KVProgress, LeaseCommand, Outputs, Shutdown
from engine.errors import EngineError, start_problem, start_status, to_install
from engine.machine import place_process, set_up_process, start_up_heap

if TYPE_CHECKING:
    from engine.core.core import EngineCore

HEARTBEAT_S = 0.25


def main() -> None:
    """Run until `Shutdown` or the parent's death."""
    config, address = begin()
    _run(config, address)


def begin() -> tuple[EngineConfig, str]:
    """What every engine's process does first: return its configuration and the address of its parent's socket. From
    now on it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent shuts the core down
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    address = sys.argv[1]
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=EngineConfig)
    threading.Thread(target=_exit_with_parent, args=(address,), daemon=True, name="parent-watch").start()
    set_up_process(config)
    return config, address


def _run(config: EngineConfig, address: str) -> None:
    with start_up_heap():
        try:
            place_process(config, config.parallelism.core_rank)  # before the rest imports torch, for its thread pools
            from engine.core.core import EngineCore
            from engine.ranks import RankLost

            mailbox = Mailbox(address)
            core = EngineCore(config, mailbox.wake)
        except (EngineError, ImportError, OSError) as error:  # a bug keeps its traceback, and has status 1
            sys.stderr.write(f"engine core: {start_problem(error, to_install())}\n")
            sys.exit(start_status(error))
    status = 1
    try:
        run_core(core, mailbox)
        status = 0
    except RankLost as error:
        sys.stderr.write(f"engine core: {error}\n")
    except BaseException:  # not to the interpreter: its end would wait for queued grammars
        traceback.print_exc()
    mailbox.close()
    zmq.Context.instance().term()  # queued messages are delivered, for at most one second
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all I/O has ended; finalising torch takes most of a second, on a busy machine many


def _exit_with_parent(address: str) -> None:
    while os.read(0, 4096):
        pass
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(0)


class Mailbox:
    """A ZeroMQ PAIR socket, as the core's connection to its `AsyncEngine`, and what ends a wait for its messages. Used
    by one thread."""

    def __init__(self, address: str, commands: Any = Command, linger_ms: int = 1000) -> None:
        """`commands`: the type of what is received."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, linger_ms)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(commands)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, timeout_s: float) -> list[Any]:
        """The commands received; waits for one, or for `wake`, up to `timeout_s`."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        commands: list[Any] = []
        while True:
            try:
                commands.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return commands

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. Does not block."""
        self._socket.send(self._encoder.encode(message))

    def wake(self) -> None:
        """End a waiting `receive`. Called from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        self._socket.close()


def run_core(core: EngineCore, mailbox: Mailbox) -> None:
    """Serve until `Shutdown`. The model computes in another thread; meanwhile commands and events of the connector are
    handled, all others wait for the end of the step."""
    mailbox.send(core.info)
    reporter = _Reporter(core, mailbox)
    deferred: list[Command] = []
    with ThreadPoolExecutor(1, thread_name_prefix="model") as model_thread:
        while True:
            commands = [*deferred, *mailbox.receive(0.0 if deferred else _timeout_s(core, reporter.last_s))]
            deferred = []
            for command in commands:
                if isinstance(command, Shutdown):
                    core.shutdown()
                    return
                core.handle(command)
                reporter.num_added += isinstance(command, AddRequest)
            if not core.begin_step():
                reporter.report(heartbeat=True)
                continue
            reporter.report(force=core.step_time.predicted_s > HEARTBEAT_S)
            computed = model_thread.submit(core.compute)
            computed.add_done_callback(lambda _: mailbox.wake())
            while not computed.done():
                for command in mailbox.receive(HEARTBEAT_S):
                    if isinstance(command, KVProgress | LeaseCommand):
                        core.handle(command)
                    else:
                        deferred.append(command)
                core.poll_connector()
                reporter.report(answered=False)
            computed.result()
            core.finish_step()
            reporter.report(heartbeat=True)


class _Reporter:
    def __init__(self, core: EngineCore, mailbox: Mailbox) -> None:
        self._core = core
        self._mailbox = mailbox
        self.last_s = 0.0
        """Of the last report between two steps, by which the parent sees that the core lives."""
        self.num_added = 0
        """Requests. Before each all events of those before it are sent."""

    def report(self, *, heartbeat: bool = False, force: bool = False, answered: bool = True) -> None:
        """Send new events with the load; without events send the load if `force`, or if `heartbeat` and the last report
        between two steps is 250 ms old. What is sent during a step is not `answered`: a hung model is detected by its
        core's silence."""
        events = self._core.take_events()
        now = time.monotonic()
        if events or force or (heartbeat and now - self.last_s >= HEARTBEAT_S):
            self._mailbox.send(Outputs(events, self._core.load, answered, self.num_added))
            if answered:
                self.last_s = now


def _timeout_s(core: EngineCore, last_report_s: float) -> float:
    if not core.idle:
        return 0.0
    timeout_s = max(0.001, last_report_s + HEARTBEAT_S - time.monotonic())
    deadline_s = core.next_deadline_s()
    return timeout_s if deadline_s is None else min(timeout_s, max(0.001, deadline_s))


if __name__ == "__main__":
    main()
