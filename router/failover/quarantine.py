"""Which requests break whoever computes them: evidence by the digest of their content, and a refusal for a while.

    innocent ──an instance dies under it, or answers INTERNAL──▶ suspect ──again, alone on trial──▶ refused for `ttl_s`
        ▲────────────────── a token from another instance ──────────┘

Instances die of many things, and each death cuts a crowd of streams, so being there proves little. Evidence is clear
when the instance itself has told of a crash or an error, and when of all that it computed only this one had just begun
(no token of it had come from there). Two strikes of clear evidence convict; with a vaguer one among them (several had
just begun, or it had streamed for a while, and the process vanished without a word, as a machine does that loses
power) it takes three. Three rules keep the innocent out:

- **A token acquits.** A stream that goes on at another instance has passed the place at which the first one died. A
  decode instance's token clears all; a prefill instance's clears what happened at prefill instances.
- **The last strike must have struck him alone.** Who had just begun when an instance died, or was there when one
  crashed, or has two strikes, is a prime suspect, and those are computed one at a time (trials.py).
- **Deaths that no suspect explains raise the bar.** When all who were on a dead instance have been acquitted, something
  else has killed it. As many of those as there were of late, so many more strikes it takes: while somebody pulls
  plugs, nobody is called poison.

Docs: docs/failover.md. Nothing here waits or sends.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import grpc

from router.config import QuarantineSettings
from router.pools.instances import InstanceKey, Role
from router.request import GenerationRequest
from router.sampling import to_wire
from serving.errors import ServiceError

T = TypeVar("T")
_log = logging.getLogger(__name__)

_STRIKES = 2
IsGone = Callable[[InstanceKey], bool]
"""Whether that very process has left its pool otherwise than by a drain."""


class Quarantined(ServiceError):
    """The request has broken two instances, or one of its content has. INTERNAL, with a text that clients may read."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, remaining_s: float) -> None:
        super().__init__(
            "instances have ended or failed while they computed this request; "
            f"its content is refused for {remaining_s:.0f} s more"
        )
        self._remaining_s = remaining_s

    @property
    def retry_after_s(self) -> float:
        return self._remaining_s


class Suspect(NamedTuple):
    """One choice of a request by its content: who asks, and with which seed, does not matter."""

    digest: bytes
    choice: int


def content_digest(request: GenerationRequest) -> bytes:
    """Equal for requests that make an instance compute the same, but for the draws."""
    content = hashlib.sha256(array("q", request.prompt_token_ids).tobytes())
    content.update(to_wire(request.params, None).SerializeToString(deterministic=True))
    return content.digest()


@dataclass(frozen=True, slots=True)
class _Strike:
    role: Role
    is_death: bool
    """Else the instance lives and has answered INTERNAL."""
    told: bool
    """By the instance itself."""
    had_begun: bool = False
    """A token had come from there."""
    alone: bool = True

    @property
    def is_prime(self) -> bool:
        """Whether this alone is reason enough for a trial of its own."""
        return self.told or not self.had_begun

    def __str__(self) -> str:
        how = ("crashed" if self.told else "vanished") if self.is_death else "failed"
        when = "in the middle" if self.had_begun else "at the beginning"
        return f"{how} {when}, {'alone' if self.alone else 'in company'}"


@dataclass(slots=True)
class _Record:
    last_s: float = 0.0
    strikes: dict[InstanceKey, _Strike] = field(default_factory=dict)


@dataclass(slots=True)
class _Death:
    at_s: float
    suspects: set[Suspect] = field(default_factory=set)
    """Who was being computed there and has not been acquitted since."""
    num_beginners: int = 0
    """How many had no token from there yet."""


class Quarantine:
    """The evidence of one router. All tables are bounded: the oldest entry goes first. `clock` is monotonic."""

    def __init__(self, settings: QuarantineSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._suspects: OrderedDict[Suspect, _Record] = OrderedDict()
        """Whoever was struck last is last."""
        self._deaths: OrderedDict[InstanceKey, _Death] = OrderedDict()
        self._refused_until_s: OrderedDict[bytes, float] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        """Whether nobody is suspected or refused: then nothing needs a digest."""
        return not self._suspects and not self._refused_until_s

    @property
    def num_refused(self) -> int:
        """Contents that are refused now."""
        self._forget()
        return len(self._refused_until_s)

    def check(self, digest: bytes) -> None:
        """Raises Quarantined while this content is refused."""
        self._forget()
        if (refusal := self._refusal(digest)) is not None:
            raise refusal

    def is_suspect(self, suspect: Suspect) -> bool:
        """Whether there is evidence against it: what becomes of it is then a trial."""
        self._forget()
        return suspect in self._suspects

    def is_prime(self, suspect: Suspect) -> bool:
        """Whether the evidence is clear, or there is more than one strike."""
        record = self._suspects.get(suspect)
        return record is not None and (
            len(record.strikes) > 1 or any(strike.is_prime for strike in record.strikes.values())
        )

    def num_strikes(self, suspect: Suspect) -> int:
        """At how many instances something broke under it, acquittals taken off."""
        record = self._suspects.get(suspect)
        return len(record.strikes) if record is not None else 0

    def died(
        self,
        suspect: Suspect,
        key: InstanceKey,
        role: Role,
        *,
        began_s: float,
        told: bool = False,
        had_begun: bool = False,
        alone: bool = True,
    ) -> None:
        """The instance was lost while it computed this.

        `began_s` is when it was told to, `told` whether it has told of a crash, `had_begun` whether a token had come
        from there, `alone` whether no other suspect was on trial there. Who came when it was dying already is not
        struck.
        """
        death = self._deaths.setdefault(key, _Death(self._clock()))
        if death.at_s < began_s:
            return
        record = self._struck(suspect)
        if key not in record.strikes:
            record.strikes[key] = _Strike(role, is_death=True, told=told, had_begun=had_begun, alone=alone)
            death.num_beginners += not had_begun
            death.suspects.add(suspect)
        self._bound()

    def failed(self, suspect: Suspect, key: InstanceKey, role: Role) -> None:
        """The instance answered INTERNAL to this."""
        self._struck(suspect).strikes[key] = _Strike(role, is_death=False, told=True)
        self._bound()

    def acquit(self, suspect: Suspect, role: Role) -> None:
        """An instance of this role has given a token of it."""
        record = self._suspects.get(suspect)
        if record is None:
            return
        for key in [key for key, strike in record.strikes.items() if role in ("decode", strike.role)]:
            del record.strikes[key]
            if (death := self._deaths.get(key)) is not None:
                death.suspects.discard(suspect)
        if not record.strikes:
            del self._suspects[suspect]

    def convict(self, suspect: Suspect, is_gone: IsGone) -> Quarantined | None:
        """The refusal, when the evidence suffices: from now on this content is refused."""
        self._forget()
        record = self._suspects.get(suspect)
        if record is None:
            return self._refusal(suspect.digest)
        proven = {key: strike for key, strike in record.strikes.items() if not strike.is_death or is_gone(key)}
        needed = _STRIKES + (not all(self._is_clear(key, strike) for key, strike in proven.items()))
        if any(strike.is_death for strike in proven.values()):
            needed += self._num_unexplained(is_gone)
        if len(proven) < needed or not list(proven.values())[-1].alone:
            return None
        where = ", ".join(f"{key.address} ({strike})" for key, strike in record.strikes.items())
        _log.warning("a request is refused for %g s, for what it did at %s", self._settings.ttl_s, where)
        del self._suspects[suspect]
        self._refused_until_s[suspect.digest] = self._clock() + self._settings.ttl_s
        self._bound()
        return Quarantined(self._settings.ttl_s)

    def _refusal(self, digest: bytes) -> Quarantined | None:
        until_s = self._refused_until_s.get(digest)
        return Quarantined(until_s - self._clock()) if until_s is not None else None

    def _is_clear(self, key: InstanceKey, strike: _Strike) -> bool:
        death = self._deaths.get(key)
        return strike.told or (not strike.had_begun and death is not None and death.num_beginners == 1)

    def _struck(self, suspect: Suspect) -> _Record:
        self._forget()
        record = self._suspects.setdefault(suspect, _Record())
        record.last_s = self._clock()
        self._suspects.move_to_end(suspect)
        return record

    def _num_unexplained(self, is_gone: IsGone) -> int:
        """Recent deaths that cannot have been the doing of anybody who is still suspected."""
        return sum(not death.suspects and is_gone(key) for key, death in self._deaths.items())

    def _forget(self) -> None:
        """What is too old to mean anything."""
        now_s = self._clock()
        _drop_oldest(self._refused_until_s, lambda until_s: until_s <= now_s)
        _drop_oldest(self._deaths, lambda death: death.at_s + self._settings.memory_s <= now_s)
        _drop_oldest(self._suspects, lambda record: record.last_s + self._settings.memory_s <= now_s)

    def _bound(self) -> None:
        tables: tuple[OrderedDict[Any, Any], ...] = (self._suspects, self._deaths, self._refused_until_s)
        for table in tables:
            while len(table) > self._settings.max_entries:
                table.popitem(last=False)


def _drop_oldest(table: OrderedDict[Any, T], is_old: Callable[[T], bool]) -> None:
    while table and is_old(next(iter(table.values()))):
        table.popitem(last=False)
