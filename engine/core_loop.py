"""The loop that owns an engine core, and the two ways to reach it: a process of its own (ZeroMQ) or a thread (queues).

    command ─▶ inbox ─▶ core.handle ─▶ begin_step ─▶ compute (its own thread) ─▶ finish_step ─▶ outbox ─▶ event
                              └─ words for the connector ─▶ keep_kv_moving ─▶ events, meanwhile

The loop sleeps while the core is idle and wakes for a command, for I/O that has ended, for a deadline, and every 250
ms to report its load, so that its silence means trouble.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec
import zmq

from engine.core import EngineCore
from engine.messages import Command, CoreMessage, KVProgress, LeaseCommand, Outputs, Shutdown

HEARTBEAT_S = 0.25


class Mailbox(Protocol):
    """The core's end of the line to its front."""

    def receive(self, timeout_s: float) -> list[Command]:
        """The commands that are there; waits for one, or for a wake-up, up to `timeout_s`."""
        ...

    def send(self, message: CoreMessage) -> None:
        """Queue a message to the front. Does not block."""
        ...

    def wake(self) -> None:
        """End a waiting `receive`. Called from any thread."""
        ...


class ZmqMailbox:
    """Over a ZeroMQ PAIR socket, for a core in a process of its own."""

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
        self._socket.send(self._encoder.encode(message))

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Deliver what was sent (at most one second), then close."""
        self._socket.close()
        zmq.Context.instance().term()


class ThreadMailbox:
    """Over queues, for a core in a thread of the front's process."""

    def __init__(self, deliver: Callable[[CoreMessage], None]) -> None:
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._deliver = deliver

    def put(self, command: Command) -> None:
        """The front's side."""
        self._queue.put(command)

    def receive(self, timeout_s: float) -> list[Command]:
        received: list[Command | None] = []
        try:
            received.append(self._queue.get(block=timeout_s > 0, timeout=timeout_s if timeout_s > 0 else None))
            while True:
                received.append(self._queue.get_nowait())
        except queue.Empty:
            return [command for command in received if command is not None]

    def send(self, message: CoreMessage) -> None:
        self._deliver(message)

    def wake(self) -> None:
        self._queue.put(None)


def run_core(core: EngineCore, mailbox: Mailbox) -> None:
    """Serve until `Shutdown` comes. The model computes in a thread of its own; the connector's words, in and out, do
    not wait for a step to end, everybody else's do."""
    mailbox.send(core.info)
    reporter = _Reporter(core, mailbox)
    deferred: list[Command] = []
    with ThreadPoolExecutor(1, thread_name_prefix="model") as model_thread:
        while True:
            commands = [*deferred, *mailbox.receive(0.0 if deferred else _patience_s(core, reporter.last_s))]
            deferred = []
            for command in commands:
                if isinstance(command, Shutdown):
                    core.shutdown()
                    return
                core.handle(command)
            if not core.begin_step():
                reporter.report(heartbeat=True)
                continue
            reporter.report(heartbeat=core.predicted_step_s > HEARTBEAT_S)
            computed = model_thread.submit(core.compute)
            computed.add_done_callback(lambda _: mailbox.wake())
            while not computed.done():
                for command in mailbox.receive(HEARTBEAT_S):
                    if isinstance(command, KVProgress | LeaseCommand):
                        core.handle(command)
                    else:
                        deferred.append(command)
                core.keep_kv_moving()
                reporter.report()
            computed.result()
            core.finish_step()
            reporter.report(heartbeat=True)


class _Reporter:
    """Sends events, and the load with them."""

    def __init__(self, core: EngineCore, mailbox: Mailbox) -> None:
        self._core = core
        self._mailbox = mailbox
        self.last_s = 0.0

    def report(self, *, heartbeat: bool = False) -> None:
        """Send what has happened, if anything has; `heartbeat`: the load alone if it is time. Not during a step: a
        wedged model is known by its core's silence."""
        events = self._core.take_events()
        now = time.monotonic()
        if events or (heartbeat and now - self.last_s >= HEARTBEAT_S):
            self._mailbox.send(Outputs(events, self._core.load))
            self.last_s = now


def _patience_s(core: EngineCore, last_report_s: float) -> float:
    if not core.idle:
        return 0.0
    patience = max(0.001, last_report_s + HEARTBEAT_S - time.monotonic())
    deadline = core.next_deadline_s()
    return patience if deadline is None else min(patience, max(0.001, deadline))
