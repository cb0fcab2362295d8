"""Detects requests that break the instances that compute them: evidence by content digest, and rejection for a while.

    no evidence ──an instance dies under it, or answers INTERNAL──▶ suspect ──again, alone──▶ rejected for `ttl_s`
        ▲────────────────── a token from another instance ────────────┘

Instances die of many causes, and each death cuts many streams, so one incident proves little. docs/failover.md has the
rules: which evidence is clear and how much of it suffices, what clears a suspect, when the last incident counts, and
why unexplained deaths raise the threshold. Only `Probations` waits; nothing here sends.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import grpc

from router.pools.instance_info import InstanceKey, Role
from router.request.generation_request import GenerationRequest, to_wire
from serving.errors import ServiceError
from serving.settings import MAX_TIME_S, Section, setting
from serving.waits import Broadcast

T = TypeVar("T")
_log = logging.getLogger(__name__)

_NUM_INCIDENTS = 2  # that suffice to reject a content
IsGone = Callable[[InstanceKey], bool]  # whether that very process has left its pool otherwise than by a drain


class QuarantineSettings(Section):
    """When a request counts as the cause of instance failures."""

    ttl_s: float = setting(300.0, "Seconds for which the same content is rejected.", gt=0, le=MAX_TIME_S)
    memory_s: float = setting(60.0, "Seconds for which the death of an instance counts as evidence.", gt=0)
    trial_wait_s: float = setting(
        1.0, "Longest wait in seconds of a suspect request for another one at the same instance.", ge=0
    )
    max_entries: int = setting(1024, "Entries of each table: suspects, deaths, refused contents.", ge=1)


class PoisonRequestRejected(ServiceError):
    """The request has broken two instances, or one of its content has. INTERNAL, with a text that clients may read."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, remaining_s: float) -> None:
        super().__init__(
            "instances have ended or failed while they computed this request; "
            f"its content is rejected for {remaining_s:.0f} s more"
        )
        self.retry_after_s = remaining_s


class Suspect(NamedTuple):
    """One choice of a request by its content: who asks, and with which seed, does not matter."""

    digest: bytes
    choice: int


def content_digest(request: GenerationRequest) -> bytes:
    """Equal for requests that make an instance compute the same, but for the draws."""
    content = hashlib.sha256(f"{request.lora}\0".encode())  # a name has no NUL in it
    content.update(array("q", request.prompt_token_ids).tobytes())
    sampling = to_wire(request.params)
    sampling.ClearField("seed")
    content.update(sampling.SerializeToString(deterministic=True))
    return content.digest()


@dataclass(frozen=True, slots=True)
class Incident:
    """What happened to an instance that computed a suspect."""

    role: Role
    is_death: bool = True  # else the instance lives and has answered INTERNAL
    reported: bool = False  # by the instance itself
    had_token: bool = False  # it had sent a token of the request
    alone: bool = True  # no other suspect was on probation there

    @property
    def is_prime(self) -> bool:
        """Whether this one alone makes the request a prime suspect."""
        return self.reported or not self.had_token

    def __str__(self) -> str:
        how = ("crashed" if self.reported else "vanished") if self.is_death else "failed"
        when = "after" if self.had_token else "before"
        return f"{how} {when} its first token, {'alone' if self.alone else 'with other suspects'}"


@dataclass(slots=True)
class _Record:
    last_s: float = 0.0
    incidents: dict[InstanceKey, Incident] = field(default_factory=dict)


@dataclass(slots=True)
class _Death:
    at_s: float
    suspects: set[Suspect] = field(default_factory=set)  # computed there and not cleared since
    num_without_token: int = 0


class PoisonDetection:
    """The evidence of one router. All tables are bounded: the oldest entry goes first. `clock` is monotonic.

    `known_gone_after_s`: after its loss, no process is picked for longer without a new report.
    """

    def __init__(
        self, settings: QuarantineSettings, known_gone_after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._known_gone_after_s = known_gone_after_s
        self._clock = clock
        self._suspects: OrderedDict[Suspect, _Record] = OrderedDict()  # by their last incident, the newest last
        self._deaths: OrderedDict[InstanceKey, _Death] = OrderedDict()
        self._rejected_until_s: OrderedDict[bytes, float] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        """Whether there are neither suspects nor rejections: then no request needs a digest."""
        return not self._suspects and not self._rejected_until_s

    @property
    def num_rejected(self) -> int:
        self._forget()
        return len(self._rejected_until_s)

    def check(self, digest: bytes) -> None:
        """Raises PoisonRequestRejected while this content is rejected."""
        self._forget()
        if (rejection := self._rejection(digest)) is not None:
            raise rejection

    def is_suspect(self, suspect: Suspect) -> bool:
        """Whether there is evidence against it: it is then computed on probation."""
        self._forget()
        return suspect in self._suspects

    def is_prime_suspect(self, suspect: Suspect) -> bool:
        """Whether the evidence is clear, or there is more than one incident."""
        incidents = self._incidents(suspect)
        return len(incidents) > 1 or any(incident.is_prime for incident in incidents.values())

    def num_incidents(self, suspect: Suspect) -> int:
        """At how many instances something broke under it since it was last cleared."""
        return len(self._incidents(suspect))

    def died(self, suspect: Suspect, key: InstanceKey, incident: Incident, began_s: float) -> None:
        """The instance was lost while it computed this, which it was sent at `began_s`. A request that came when the
        instance was dying already is not a suspect."""
        death = self._deaths.get(key)
        if death is None or death.at_s + self._known_gone_after_s < began_s:
            death = self._new_death(key)
        elif death.at_s < began_s:
            return
        record = self._record(suspect)
        if key not in record.incidents:
            record.incidents[key] = incident
            death.num_without_token += not incident.had_token
            death.suspects.add(suspect)
        self._forget()

    def _new_death(self, key: InstanceKey) -> _Death:
        """Instead of an earlier one of the same process, which has survived that: it was lost for a moment, and is
        evidence against no request."""
        if (survived := self._deaths.pop(key, None)) is not None:
            for suspect in survived.suspects:
                if (incident := self._incidents(suspect).get(key)) is not None and incident.is_death:
                    self._drop_incident(suspect, key)
        death = self._deaths[key] = _Death(self._clock())
        return death

    def failed(self, suspect: Suspect, key: InstanceKey, role: Role) -> None:
        """The instance answered INTERNAL to this."""
        self._record(suspect).incidents[key] = Incident(role, is_death=False, reported=True)
        self._forget()

    def clear(self, suspect: Suspect, role: Role) -> None:
        """An instance of this role has sent a token of it."""
        record = self._suspects.get(suspect)
        if record is None:
            return
        for key in [key for key, incident in record.incidents.items() if role in ("decode", incident.role)]:
            self._drop_incident(suspect, key)
            if (death := self._deaths.get(key)) is not None:
                death.suspects.discard(suspect)

    def _drop_incident(self, suspect: Suspect, key: InstanceKey) -> None:
        if (record := self._suspects.get(suspect)) is not None:
            record.incidents.pop(key, None)
            if not record.incidents:
                del self._suspects[suspect]

    def reject_if_proven(self, suspect: Suspect, is_gone: IsGone) -> PoisonRequestRejected | None:
        """The error to answer with if the evidence suffices: from now on this content is rejected."""
        self._forget()
        record = self._suspects.get(suspect)
        if record is None:
            return self._rejection(suspect.digest)
        proven = {key: incident for key, incident in record.incidents.items() if not incident.is_death or is_gone(key)}
        needed = _NUM_INCIDENTS + (not all(self._is_clear(key, incident) for key, incident in proven.items()))
        if any(incident.is_death for incident in proven.values()):
            # Recent deaths that no current suspect explains.
            needed += sum(not death.suspects and is_gone(key) for key, death in self._deaths.items())
        if len(proven) < needed or not list(proven.values())[-1].alone:
            return None
        where = ", ".join(f"{key.address} ({incident})" for key, incident in record.incidents.items())
        _log.warning("a content is rejected for %g s: instances failed on it: %s", self._settings.ttl_s, where)
        del self._suspects[suspect]
        self._rejected_until_s[suspect.digest] = self._clock() + self._settings.ttl_s
        self._rejected_until_s.move_to_end(suspect.digest)
        self._forget()
        return PoisonRequestRejected(self._settings.ttl_s)

    def _rejection(self, digest: bytes) -> PoisonRequestRejected | None:
        until_s = self._rejected_until_s.get(digest)
        return PoisonRequestRejected(until_s - self._clock()) if until_s is not None else None

    def _is_clear(self, key: InstanceKey, incident: Incident) -> bool:
        death = self._deaths.get(key)
        return incident.reported or (not incident.had_token and death is not None and death.num_without_token == 1)

    def _incidents(self, suspect: Suspect) -> dict[InstanceKey, Incident]:
        record = self._suspects.get(suspect)
        return record.incidents if record is not None else {}

    def _record(self, suspect: Suspect) -> _Record:
        self._forget()
        record = self._suspects.setdefault(suspect, _Record())
        record.last_s = self._clock()
        self._suspects.move_to_end(suspect)
        return record

    def _forget(self) -> None:
        """Drops what is too old to be evidence, and what is too much."""
        now_s, most = self._clock(), self._settings.max_entries
        _trim(self._rejected_until_s, most, lambda until_s: until_s <= now_s)
        _trim(self._deaths, most, lambda death: death.at_s + self._settings.memory_s <= now_s)
        _trim(self._suspects, most, lambda record: record.last_s + self._settings.memory_s <= now_s)


def _trim(table: OrderedDict[Any, T], most: int, is_old: Callable[[T], bool]) -> None:
    while table and (len(table) > most or is_old(next(iter(table.values())))):
        table.popitem(last=False)


@dataclass(slots=True, eq=False)
class Probation:
    """One suspect that an instance computes now, until its first token from there or its failure."""

    suspect: Suspect
    key: InstanceKey
    is_prime: bool
    alone: bool = True  # no suspect of its kind was on probation there at the same time


class Probations:
    """The suspects that instances compute now, one prime suspect at a time, so that the next death has one cause.

        suspect ──wait until no prime suspect is there──▶ on probation ──first token (cleared), or failure──▶ over
                            └──longer than `quarantine.trial_wait_s`──▶ on probation together with others

    Otherwise requests that were interrupted together would be resumed together, the poisonous one would break the next
    instance, and its cause would stay ambiguous. Only a prime suspect waits, for a bounded time: streams that merely
    ran when their instance vanished go on at once. One per router, on one event loop.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._running: defaultdict[InstanceKey, list[Probation]] = defaultdict(list)
        self._end = Broadcast()

    @property
    def num_running(self) -> int:
        return sum(map(len, self._running.values()))

    async def wait_free(self, suspect: Suspect, key: InstanceKey) -> None:
        """Waits, at most `wait_s`, until no other prime suspect is at `key` and `suspect` itself is nowhere else."""
        until_s = time.monotonic() + self._wait_s
        while not self._is_free(suspect, key) and (remaining_s := until_s - time.monotonic()) > 0:
            await self._end.wait(remaining_s)

    def begin(self, suspect: Suspect, key: InstanceKey, *, is_prime: bool) -> Probation:
        probation = Probation(suspect, key, is_prime)
        for other in self._running[key]:
            if other.suspect != suspect:
                probation.alone = probation.alone and is_prime and not other.is_prime
                other.alone = other.alone and other.is_prime and not is_prime
        self._running[key].append(probation)
        return probation

    def end(self, probation: Probation) -> None:
        running = self._running[probation.key]
        if probation in running:
            running.remove(probation)
            self._end.notify()
        if not running:
            del self._running[probation.key]

    def _is_free(self, suspect: Suspect, key: InstanceKey) -> bool:
        elsewhere = any(one.suspect == suspect and one.key != key for one in chain(*self._running.values()))
        occupied = any(one.suspect != suspect and one.is_prime for one in self._running.get(key, ()))
        return not elsewhere and not occupied
