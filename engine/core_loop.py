"""The loop that owns an engine core, and the two ways to reach it: a process of its own (ZeroMQ) or a thread (queues).

    command ─▶ inbox ─▶ core.handle ─▶ core.step ─▶ outbox ─▶ event

The loop sleeps while the core is idle and wakes for a command, for I/O that has ended, for a deadline, and every 250
ms to report its load, so that its silence means trouble.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from engine.core import EngineCore
from engine.messages import Command, CoreMessage, Outputs, Shutdown

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
    """Serve until `Shutdown` comes."""
    mailbox.send(core.info)
    last_report = 0.0
    while True:
        for command in mailbox.receive(_patience_s(core, last_report)):
            if isinstance(command, Shutdown):
                core.shutdown()
                return
            core.handle(command)
        events = core.step()
        now = time.monotonic()
        if events or now - last_report >= HEARTBEAT_S:
            mailbox.send(Outputs(events, core.load))
            last_report = now


def _patience_s(core: EngineCore, last_report: float) -> float:
    if not core.idle:
        return 0.0
    patience = max(0.001, last_report + HEARTBEAT_S - time.monotonic())
    deadline = core.next_deadline_s()
    return patience if deadline is None else min(patience, max(0.001, deadline))
