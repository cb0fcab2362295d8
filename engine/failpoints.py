"""Failpoints: named places where a test can stop, delay, break or end this process.

A failpoint is one call, `hit("store.write")`, or `await hit_async("decode.after_token")` on an event loop. Unless the
process started with TANDEM_ENABLE_FAILPOINTS=1 it only tests a global, whatever else is set.

    TANDEM_FAILPOINTS="decode.after_token=park@17;store.write=fail@3;attach.read=sleep:0.5;engine.step=exit@100"

    park       write `FAILPOINT <name> <n> pid=<pid>` to the file TANDEM_FAILPOINT_FILE, then wait until
               `<that file>.<name>.go` exists; the test kills, freezes or unplugs something in between
    fail       raise FailpointError
    sleep:<s>  wait that many seconds
    exit       end the process at once with status 41, like a crash: no cleanup, no flush

With `@n` only the n-th hit fires, counted from 1; without it every hit does. A name may have several actions.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXIT_STATUS = 41
_POLL_S = 0.01
_ENTRY = re.compile(
    r"(?P<name>[a-z0-9_]+(\.[a-z0-9_]+)*)="
    r"((?P<kind>park|fail|exit)|sleep:(?P<seconds>[0-9]*\.?[0-9]+))(@(?P<at_hit>[1-9][0-9]*))?"
)


class FailpointError(Exception):
    """Raised by the action `fail`."""


@dataclass(frozen=True, slots=True)
class Action:
    """`at_hit`: the one hit that fires, counted from 1; None: every hit."""

    kind: str
    seconds: float = 0.0
    at_hit: int | None = None


def parse(spec: str) -> dict[str, list[Action]]:
    """The actions by name. Raises ValueError naming the entry that is not `name=action[:seconds][@n]`."""
    actions: dict[str, list[Action]] = defaultdict(list)
    for entry in filter(None, (part.strip() for part in spec.split(";"))):
        matched = _ENTRY.fullmatch(entry)
        if matched is None:
            raise ValueError(f"failpoint {entry!r} is not name=park|fail|sleep:<s>|exit, optionally with @n (n >= 1)")
        kind, seconds, at_hit = matched["kind"] or "sleep", matched["seconds"] or 0.0, matched["at_hit"]
        actions[matched["name"]].append(Action(kind, float(seconds), int(at_hit) if at_hit else None))
    return dict(actions)


class _Failpoints:
    """The hits and actions of this process. Thread-safe; the lock covers the counters alone."""

    def __init__(self, spec: str, file: str | None) -> None:
        self._actions = parse(spec)
        self._file = file
        self._hits: Counter[str] = Counter()
        self._lock = threading.Lock()
        parks = any(action.kind == "park" for actions in self._actions.values() for action in actions)
        if parks and not file:
            raise ValueError("TANDEM_FAILPOINT_FILE must name the file for the handshake line of `park`")

    def hit(self, name: str) -> Iterator[float]:
        """Counts a hit and performs its actions; yields the pauses in seconds that the caller must make."""
        if name not in self._actions:
            return
        with self._lock:
            self._hits[name] += 1
            count = self._hits[name]
        for action in self._actions[name]:
            if action.at_hit not in (None, count):
                continue
            if action.kind == "park":
                go = self._announce(name, count)
                while not go.exists():
                    yield _POLL_S
            elif action.kind == "sleep":
                yield action.seconds
            elif action.kind == "exit":
                os._exit(EXIT_STATUS)
            else:
                raise FailpointError(f"failpoint {name}, hit {count}")

    def _announce(self, name: str, count: int) -> Path:
        """Writes the handshake line of a park; returns the file that ends it."""
        assert self._file is not None
        line = f"FAILPOINT {name} {count} pid={os.getpid()}\n".encode()
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)  # one append, so that lines of several processes do not mix
        finally:
            os.close(descriptor)
        return Path(f"{self._file}.{name}.go")


_active: _Failpoints | None = None


def configure(spec: str | None, *, file: str | None = None) -> None:
    """Sets this process's failpoints and resets the counters; None turns them off. For tests in one process."""
    global _active
    _active = None if spec is None else _Failpoints(spec, file)


def hit(name: str) -> None:
    """A failpoint on a thread, which it may block."""
    if _active is not None:
        for pause_s in _active.hit(name):
            time.sleep(pause_s)


async def hit_async(name: str) -> None:
    """A failpoint on an event loop, which continues meanwhile."""
    if _active is not None:
        for pause_s in _active.hit(name):
            await asyncio.sleep(pause_s)


if os.environ.get("TANDEM_ENABLE_FAILPOINTS") == "1":
    configure(os.environ.get("TANDEM_FAILPOINTS", ""), file=os.environ.get("TANDEM_FAILPOINT_FILE"))
