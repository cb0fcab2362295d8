"""A prefill core in a process of its own, to be killed and frozen: commands in, events out, over its pipes.

`python -m tests.kv_transfer.nixl_holder` reads one line with the engine's configuration, then a command a line, all
msgpack in hex, and writes an event a line.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from engine.config import EngineConfig
from engine.messages import Command, Event, TokensEvent, TransferEvent

_POLL_S = 0.002


class HolderProcess:
    """The process as the test sees it."""

    def __init__(self, config: EngineConfig, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv_transfer.nixl_holder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.events: list[Event] = []
        self._send(msgspec.msgpack.encode(config))
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def handle(self, command: Command) -> None:
        """Tell the core."""
        self._send(msgspec.msgpack.encode(command))

    def wait(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Until its events say so."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the holder does not get there"
            assert self.alive, "the holder has died"
            time.sleep(_POLL_S)

    def transfers(self, transfer_id: str) -> list[TransferEvent]:
        """Events of one transfer."""
        return [event for event in self.events if isinstance(event, TransferEvent) and event.transfer_id == transfer_id]

    def first_token(self, request_id: str) -> list[int]:
        """What the request has emitted here."""
        tokens = [event for event in self.events if isinstance(event, TokensEvent) and event.request_id == request_id]
        return [token for event in tokens for token in event.token_ids]

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, if it still lives."""
        self._process.kill()
        self._process.wait()
        self._thread.join(5.0)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data.hex() + "\n")
        self._process.stdin.flush()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        decoder = msgspec.msgpack.Decoder(Event)
        for line in self._process.stdout:
            if line.startswith("event "):
                self.events.append(decoder.decode(bytes.fromhex(line.removeprefix("event "))))


def main() -> None:
    """Step an engine core until standard input ends."""
    from engine.core import EngineCore

    config = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=EngineConfig)
    inbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
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


if __name__ == "__main__":
    main()
