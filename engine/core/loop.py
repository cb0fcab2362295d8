"""The loop that owns an engine core, and its mailbox.

    command ─▶ inbox ─▶ core.handle ─▶ begin_step ─▶ compute (its own thread) ─▶ finish_step ─▶ outbox ─▶ event
                              └─ commands for the connector ─▶ poll_connector ─▶ events, meanwhile

The loop sleeps while the core is idle and wakes for a command, for finished I/O, for a deadline, and every 250 ms to
report its load, so that its silence indicates a failure. During a step it sends no heartbeat, so that a hung model is
detected by the silence; the load sent before a long step says how long the step is predicted to take.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from engine.core.core import EngineCore
from engine.core.messages import Command, CoreMessage, KVProgress, LeaseCommand, Outputs, Shutdown

HEARTBEAT_S = 0.25


class Mailbox:
    """The core's connection to its `AsyncEngine`: a ZeroMQ PAIR socket."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, timeout_s: float) -> list[Command]:
        """The commands received; waits for one, or for `wake`, up to `timeout_s`."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        commands: list[Command] = []
        while True:
            try:
                commands.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return commands

    def send(self, message: CoreMessage) -> None:
        """Queue a message. Does not block."""
        self._socket.send(self._encoder.encode(message))

    def wake(self) -> None:
        """End a waiting `receive`. Called from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Deliver queued messages, for at most one second, then close."""
        self._socket.close()
        zmq.Context.instance().term()


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

    def report(self, *, heartbeat: bool = False, force: bool = False, answered: bool = True) -> None:
        """Send new events with the load; without events send the load if `force`, or if `heartbeat` and the last report
        between two steps is 250 ms old. What is sent during a step is not `answered`: a hung model is detected by its
        core's silence."""
        events = self._core.take_events()
        now = time.monotonic()
        if events or force or (heartbeat and now - self.last_s >= HEARTBEAT_S):
            self._mailbox.send(Outputs(events, self._core.load, answered))
            if answered:
                self.last_s = now


def _timeout_s(core: EngineCore, last_report_s: float) -> float:
    if not core.idle:
        return 0.0
    timeout_s = max(0.001, last_report_s + HEARTBEAT_S - time.monotonic())
    deadline_s = core.next_deadline_s()
    return timeout_s if deadline_s is None else min(timeout_s, max(0.001, deadline_s))
