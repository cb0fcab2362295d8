"""Looks after the members of a local stack: starts again those that end, and follows the roster of its pools.

    seated ──started──▶ newcomer ──ready──▶ settled ──ends by itself──▶ started again after 0.5 s, 1 s, 2 s … 8 s
                           │                   └──more than 5 times within a minute──▶ StackFailed
                           └──cannot start, or ends as often──▶ given up: its pool stays one smaller
    any of them ──no longer in the roster: SIGTERM──▶ leaving ──its process ends──▶ gone: files, name and cores are free

Whoever leaves drains in its own time and by its own rules (docs/operations.md), is not started again, and is killed
only when it has taken longer than any request may.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from serving.lifetime import EXIT_CANNOT_START
from tandem.crew import ROUTER, Crew
from tandem.member import Member
from tandem.restarts import MAX_ENDS, WITHIN_S, Restarts

_LEAVE_TIMEOUT_S = 660.0
"""Above the longest call (server.max_deadline_s) and its drain: only an instance that is frozen is there so long."""


class StackFailed(Exception):
    """The stack cannot start or go on. The message names the member, how it ended, and the end of its log."""


@dataclass(frozen=True, slots=True)
class StackEvent:
    """Something that `look` saw or did. `lines` are the last ones of the member's log, if it ended."""

    member: str
    what: str
    lines: tuple[str, ...] = ()


class Supervisor:
    """Owned by LocalStack, whose crew it is; used from one thread at a time."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._restarts = Restarts()
        self._newcomers: set[str] = set()
        self._leave_until_s: dict[str, float] = {}
        self._version = crew.roster.seating.version

    def look(self) -> list[StackEvent]:
        """One look at everybody. Raises StackFailed when a member that the stack needs ends too often."""
        now_s = time.monotonic()
        events = list(self._follow_roster(now_s))
        for member in list(self._crew.members.values()):
            if member.name in self._leave_until_s:
                events += self._see_off(member, now_s)
            elif not member.running:
                events += self._bring_back(member, now_s)
            elif member.name in self._newcomers and member.ready:
                self._newcomers.remove(member.name)
                events.append(StackEvent(member.name, f"{member.name} is ready after {now_s - member.started_s:.1f} s"))
        return events

    def _follow_roster(self, now_s: float) -> Iterator[StackEvent]:
        seating = self._crew.roster.seating
        if seating.version == self._version:
            return
        self._version = seating.version
        for seat in seating.leaving:
            if seat.name not in self._crew.members:
                self._crew.roster.vacate(seat.name)  # it left before it was started
        staying = {ROUTER, *(seat.name for seat in seating.seats)}
        for member in self._crew.members.values():
            if member.name not in staying and member.name not in self._leave_until_s:
                self._restarts.forget(member.name)
                self._newcomers.discard(member.name)
                self._leave_until_s[member.name] = now_s + _LEAVE_TIMEOUT_S
                if member.running:
                    member.send(signal.SIGTERM)
                    yield StackEvent(member.name, f"{member.name} was told to go and drains")
        for seat in seating.seats:
            if seat.name not in self._crew.members:
                self._newcomers.add(seat.name)
                self._crew.start(self._crew.add(seat))
                yield StackEvent(seat.name, f"{seat.name} was started at {seat.address}")

    def _see_off(self, member: Member, now_s: float) -> Iterator[StackEvent]:
        if member.running and now_s < self._leave_until_s[member.name]:
            return
        was_frozen = member.running
        member.kill()  # its engine core may be left
        in_peace = member.exit_status == 0 or (member.exit_status == -signal.SIGTERM and member.ready_s is None)
        if was_frozen:
            yield StackEvent(member.name, f"{member.name} did not end within {_LEAVE_TIMEOUT_S:g} s and was killed")
        elif in_peace:
            yield StackEvent(member.name, f"{member.name} is gone")
        else:
            what = f"{member.name} is gone, not as it should: it {member.end()}"
            yield StackEvent(member.name, what, tuple(member.last_lines()))
        del self._leave_until_s[member.name]
        self._crew.remove(member)

    def _bring_back(self, member: Member, now_s: float) -> Iterator[StackEvent]:
        if not self._restarts.awaits(member.name):
            yield self._note_end(member, now_s)
        elif self._restarts.is_due(member.name, now_s):
            self._crew.start(member)
            yield StackEvent(member.name, f"{member.name} was started again")

    def _note_end(self, member: Member, now_s: float) -> StackEvent:
        member.kill()  # its engine core may be left
        lines = tuple(member.last_lines())
        backoff_s = self._restarts.ended(member.name, now_s)
        is_hopeless = backoff_s is None or member.exit_status == EXIT_CANNOT_START
        if member.name in self._newcomers and is_hopeless and self._crew.roster.give_up(member.name):
            what = f"{member.name} {member.end()} before it was ready; its pool goes on without it"
            return StackEvent(member.name, what, lines)
        if backoff_s is None:
            raise StackFailed(ended(member, f"{MAX_ENDS + 1} times within {WITHIN_S:g} s; giving up"))
        return StackEvent(member.name, f"{member.name} {member.end()}; starting it again in {backoff_s:g} s", lines)


def ended(member: Member, when: str) -> str:
    """How a member ended, for people, with the end of its log."""
    return f"{member.name} {member.end()} {when}\n{log_of(member)}"


def log_of(member: Member) -> str:
    """The end of its log, for people."""
    lines = member.last_lines()
    return "\n  ".join(["the end of its log:", *lines]) if lines else "its log is empty"
