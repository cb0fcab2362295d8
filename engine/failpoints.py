"""Failpoints: named places where a test may stop, delay, break or end this process.

A failpoint is one call, `hit("store.write")`, or `await hit_async("decode.after_token")` on an event loop. Unless the
process started with TANDEM_ENABLE_FAILPOINTS=1 it returns after one test of a global, whatever else is set.

    TANDEM_FAILPOINTS="decode.after_token=park@17;store.write=fail@3;attach.read=sleep:0.5;engine.step=exit@100"

    park       one line `FAILPOINT <name> <n> pid=<pid>` to the file TANDEM_FAILPOINT_FILE, then wait until
               `<that file>.<name>.go` exists; the test kills, freezes or unplugs something in between
    fail       raise FailpointError
    sleep:<s>  wait that many seconds
    exit       end the process at once with status 41, as a crash would: no cleanup, no flush

`@n` fires at the n-th hit of the name only, counted from 1; without it every hit fires. A name may have several
actions.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

EXIT_STATUS = 41
_POLL_S = 0.01
_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_ACTIONS = ("park", "fail", "sleep", "exit")


class FailpointError(Exception):
    """What the action `fail` raises: a fault that a test asked for."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a failpoint does at a hit. `at_hit` is the one hit that fires, counted from 1; None fires at every hit."""

    kind: str
    seconds: float = 0.0
    at_hit: int | None = None


def parse(spec: str) -> dict[str, list[Action]]:
    """The actions by name; raises ValueError that names the entry which is not `name=action[:seconds][@n]`."""
    actions: dict[str, list[Action]] = defaultdict(list)
    for entry in filter(None, (part.strip() for part in spec.split(";"))):
        name, equals, rest = entry.partition("=")
        what, at, count = rest.partition("@")
        kind, _, seconds = what.partition(":")
        try:
            action = Action(kind, float(seconds) if seconds else 0.0, int(count) if at else None)
        except ValueError:
            action = Action("")
        well_formed = equals and _NAME.fullmatch(name) and kind in _ACTIONS and bool(seconds) == (kind == "sleep")
        if not well_formed or action.kind != kind or (action.at_hit is not None and action.at_hit < 1):
            raise ValueError(f"failpoint {entry!r} is not name=park|fail|sleep:<s>|exit, optionally with @n (n >= 1)")
        actions[name].append(action)
    return dict(actions)


class _Failpoints:
    """The hits and actions of this process. Any thread may hit; the lock covers the counters alone."""

    def __init__(self, spec: str, file: str | None) -> None:
        self._actions = parse(spec)
        self._file = file
        self._hits: Counter[str] = Counter()
        self._lock = threading.Lock()
        parks = any(action.kind == "park" for actions in self._actions.values() for action in actions)
        if parks and not file:
            raise ValueError("a failpoint parks, so TANDEM_FAILPOINT_FILE must name the file for its handshake line")

    def due(self, name: str) -> tuple[int, list[Action]]:
        """Counts one hit of `name`; returns its number and the actions that fire now."""
        if name not in self._actions:
            return 0, []
        with self._lock:
            self._hits[name] += 1
            count = self._hits[name]
        return count, [action for action in self._actions[name] if action.at_hit in (None, count)]

    def announce(self, name: str, count: int) -> Path:
        """Writes the handshake line of a park; returns the file whose appearance ends it."""
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
    """Sets this process's failpoints with fresh counters; None turns them all off. For tests in one process."""
    global _active
    _active = None if spec is None else _Failpoints(spec, file)


def hit(name: str) -> None:
    """A failpoint on a thread: it may block this thread."""
    if _active is None:
        return
    count, actions = _active.due(name)
    for action in actions:
        if action.kind == "park":
            go = _active.announce(name, count)
            while not go.exists():
                time.sleep(_POLL_S)
        elif action.kind == "sleep":
            time.sleep(action.seconds)
        else:
            _break(action, name, count)


async def hit_async(name: str) -> None:
    """A failpoint on an event loop: park and sleep await, and the loop goes on."""
    if _active is None:
        return
    count, actions = _active.due(name)
    for action in actions:
        if action.kind == "park":
            go = _active.announce(name, count)
            while not go.exists():  # noqa: ASYNC110 - another process makes the file
                await asyncio.sleep(_POLL_S)
        elif action.kind == "sleep":
            await asyncio.sleep(action.seconds)
        else:
            _break(action, name, count)


def _break(action: Action, name: str, count: int) -> None:
    if action.kind == "exit":
        os._exit(EXIT_STATUS)
    raise FailpointError(f"failpoint {name}, hit {count}")


if os.environ.get("TANDEM_ENABLE_FAILPOINTS") == "1":
    configure(os.environ.get("TANDEM_FAILPOINTS", ""), file=os.environ.get("TANDEM_FAILPOINT_FILE"))
