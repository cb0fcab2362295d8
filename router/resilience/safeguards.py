"""What keeps one bad instance, or one bad request, from affecting the others: made once per router.

    failed ──retry budget──▶ another attempt ──outlier detection──▶ an instance ──probation──▶ computing
                                                            first token, or failed ◀──────────────┘
                                                                  └──▶ evidence of poison-request detection

`Safeguards` owns the four. A `Guard` follows one choice through its attempts: the request's trace notifies it of
events, and the dispatcher waits at its gates (`wait_probation`, `wait_permit`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from router.pools.instance import LEFT
from router.pools.instance_info import WIRE_ROLES, InstanceKey, InstanceView, Role
from router.pools.pool import Pools
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from router.resilience.poison_requests import (
    Incident,
    PoisonDetection,
    Probation,
    Probations,
    QuarantineSettings,
    Suspect,
    content_digest,
)
from router.resilience.retry import CallFailed, FailoverSettings, RetryBudget, RetryPermit
from serving.errors import ServiceError
from serving.settings import Section, setting

_log = logging.getLogger(__name__)
_MARGIN_S = 0.5
_ONE_EVENT_S = 0.1


class EjectionSettings(Section):
    """When an instance that reports its load and yet fails requests is ejected."""

    failures: int = setting(5, "Failures in a row, with no token between them, that eject an instance.", ge=1)
    ejection_s: float = setting(30.0, "Seconds of the first ejection; the n-th lasts n times as long.", gt=0)
    max_share: float = setting(0.5, "Share of a pool's ready instances that may be ejected at once.", ge=0, le=1)


@dataclass(slots=True)
class _Record:
    num_failures: int = 0  # events in a row
    last_failure_s: float = float("-inf")
    num_ejections: int = 0
    until_s: float = float("-inf")
    on_probation: bool = False


class OutlierDetection:
    """Ejects the instances of one pool that fail where others do not: they are not picked for a while.

        in ──`failures` events in a row──▶ ejected for `ejection_s` × count ──▶ on probation ──a success──▶ in
                                                ▲──────────────one failure──────────┘

    A failure is the instance's own: a broken stream, a reservation that does not come, an INTERNAL; never a rejection
    for lack of room, nor the wait for it. Failures at the same moment are one event. A dead or silent instance is out
    by its load reports (router/pools/instance.py); this is for those that report and yet fail. A new process at the
    address has no record.

    At most a share of a pool's ready instances is ejected, and never the last one. If no other instance is available,
    an ejected one is picked nevertheless (`Dispatcher._plan_now`). `clock` is monotonic, in seconds.
    """

    def __init__(self, settings: EjectionSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._records: dict[InstanceKey, _Record] = {}

    def ejected_s(self, key: InstanceKey) -> float | None:
        """Seconds for which this instance is still ejected; None if it is not."""
        record = self._records.get(key)
        if record is None or (remaining_s := record.until_s - self._clock()) <= 0:
            return None
        return remaining_s

    def succeeded(self, key: InstanceKey) -> None:
        if (record := self._records.get(key)) is not None:
            record.num_failures = 0
            record.on_probation = False

    def failed(self, key: InstanceKey, pool: Sequence[InstanceView]) -> None:
        """The instance has failed a request; `pool` are the views of all instances, this one included."""
        now_s = self._clock()
        self._forget(pool, now_s)
        record = self._records.setdefault(key, _Record())
        if record.until_s > now_s or now_s - record.last_failure_s < _ONE_EVENT_S:
            return
        record.last_failure_s = now_s
        record.num_failures += 1
        if record.num_failures < (1 if record.on_probation else self._settings.failures):
            return
        if self._may_eject(key, pool):
            self._eject(key, record, now_s)

    def crashed(self, key: InstanceKey, pool: Sequence[InstanceView]) -> None:
        """Its server has reported that its engine is gone, and will soon be gone itself."""
        now_s = self._clock()
        self._forget(pool, now_s)
        self._records.setdefault(key, _Record()).until_s = now_s + self._settings.ejection_s

    def marked(self, views: tuple[InstanceView, ...]) -> tuple[InstanceView, ...]:
        """The views with the ejected ones marked as out, so that the picker ignores and explains them."""
        if not self._records:
            return views
        return tuple(self._mark(view) for view in views)

    def _mark(self, view: InstanceView) -> InstanceView:
        remaining_s = self.ejected_s(view.key)
        if remaining_s is None or view.out is not None:
            return view
        return replace(view, out=f"ejected for {remaining_s:.0f} s more")

    def _eject(self, key: InstanceKey, record: _Record, now_s: float) -> None:
        settings = self._settings
        num_served = int((now_s - record.until_s) / settings.ejection_s) if record.num_ejections else 0
        record.num_ejections = max(record.num_ejections - num_served, 0) + 1
        period_s = settings.ejection_s * record.num_ejections
        _log.warning("%s is ejected for %g s: %d failures in a row", key.address, period_s, record.num_failures)
        record.until_s = now_s + period_s
        record.num_failures = 0
        record.on_probation = True

    def _may_eject(self, key: InstanceKey, pool: Sequence[InstanceView]) -> bool:
        """Whether others remain, and the ejected ones are within their share of those that serve: of the ready and
        ejected ones. This one counts among them: that it fails may be why it is lost."""
        ready = {view.key for view in pool if view.out is None}
        ejected = {view.key for view in pool if self.ejected_s(view.key) is not None and not _ends(view)}
        others = ready - ejected - {key}
        return bool(others) and len(ejected) + 1 <= self._settings.max_share * len(ready | ejected | {key})

    def _forget(self, pool: Sequence[InstanceView], now_s: float) -> None:
        """Drops the records of processes that are gone."""
        known = {view.key for view in pool}
        for key in [one for one, record in self._records.items() if one not in known and record.until_s <= now_s]:
            del self._records[key]


def _ends(view: InstanceView) -> bool:
    return view.load.draining or view.out == LEFT


class Safeguards:
    """Owns the retry budget, the evidence against requests, and each pool's outliers. Belongs to one event loop."""

    def __init__(
        self,
        pools: Pools,
        failover: FailoverSettings,
        ejection: EjectionSettings,
        quarantine: QuarantineSettings,
        *,
        beat_timeout_s: float,
    ) -> None:
        self.pools = pools
        self.budget = RetryBudget(failover)
        self._known_gone_after_s = beat_timeout_s + _MARGIN_S
        self.poison = PoisonDetection(quarantine, self._known_gone_after_s)
        self.probations = Probations(quarantine.trial_wait_s)
        self.outliers: dict[Role, OutlierDetection] = {role: OutlierDetection(ejection) for role in WIRE_ROLES}

    def check(self, request: GenerationRequest) -> None:
        """Raises PoisonRequestRejected while requests of this content are rejected."""
        if not self.poison.is_empty:
            self.poison.check(content_digest(request))

    def views_to_try(self) -> Iterator[tuple[Sequence[InstanceView], Sequence[InstanceView]]]:
        """Decode and prefill views of the pools, in the order in which a request tries them. Ejected instances come
        last: any is better than none."""
        decode, prefill = self.pools.decode.views(), self.pools.prefill.views()
        marked = self.outliers["decode"].marked(decode), self.outliers["prefill"].marked(prefill)
        yield marked
        if marked != (decode, prefill):
            yield decode, prefill

    def is_gone(self, key: InstanceKey) -> bool:
        """Whether that process cannot be picked now and does not report a drain; removed ones, drained or not, count as
        gone, and one that froze and came back does not."""
        instance = self.pools.instance(key)
        view = instance.view() if instance is not None else None
        return view is None or (view.out is not None and not view.load.draining)

    async def wait_gone(self, key: InstanceKey) -> None:
        """Returns when that process is gone, or when a live one must have reported since this call."""
        until_s = time.monotonic() + self._known_gone_after_s
        while not self.is_gone(key) and (remaining_s := until_s - time.monotonic()) > 0:
            await self.pools.wait_for_change(remaining_s)


class _Computing(NamedTuple):
    key: InstanceKey
    role: Role
    began_s: float


@dataclass(eq=False)
class Guard:
    """One choice, as the safeguards see it. Its flow owns it and stays inside its `with` for the choice's life."""

    safeguards: Safeguards
    choice: Choice
    _computing: _Computing | None = None
    _has_token: bool = False
    _has_evidence: bool = False  # whether the last failure counts against the request
    _probation: Probation | None = None
    _permit: RetryPermit | None = None

    def __enter__(self) -> Self:
        self.safeguards.budget.num_active += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.safeguards.budget.num_active -= 1
        self._release()

    @cached_property
    def suspect(self) -> Suspect:
        return Suspect(content_digest(self.choice.request), self.choice.index)

    # What has happened

    def computing(self, key: InstanceKey, role: Role) -> None:
        """The instance has been sent what it needs to compute."""
        if self._probation is None or self._probation.key != key:
            self._end_probation()
            self._begin_probation(key)
        self._computing, self._has_token = _Computing(key, role, time.monotonic()), False

    def token(self) -> None:
        """The instance has sent a token: it works, and the choice is past what may have broken another one."""
        if self._has_token or self._computing is None:
            return
        self._has_token = True
        self._release()
        self.safeguards.outliers[self._computing.role].succeeded(self._computing.key)
        if self._is_suspect():
            self.safeguards.poison.clear(self.suspect, self._computing.role)

    def paused(self) -> None:
        """Another tenant has the request's slot, maybe for long: no retry waits for the choice meanwhile."""
        self._release()

    def failed(self, failure: CallFailed) -> None:
        """An attempt has failed; `rejection` says whether the request is the cause."""
        computing, self._computing, self._has_evidence = self._computing, None, False
        if failure.kind not in ("broken", "internal"):
            self._release()
            return
        role = failure.role
        outliers, views = self.safeguards.outliers[role], self.safeguards.pools.by_role[role].views()
        if failure.death == "crashed":
            outliers.crashed(failure.key, views)
        else:
            outliers.failed(failure.key, views)
        if failure.kind == "internal":
            self._has_evidence = True
            self.safeguards.poison.failed(self.suspect, failure.key, role)
        elif failure.death is not None and computing is not None and computing.key == failure.key:
            self._has_evidence = True
            alone = self._probation is None or self._probation.alone
            incident = Incident(role, reported=failure.death == "crashed", had_token=self._has_token, alone=alone)
            self.safeguards.poison.died(self.suspect, failure.key, incident, computing.began_s)

    # What the dispatcher waits for

    async def rejection(self, failure: CallFailed) -> ServiceError | None:
        """After `failed`: the error to answer with if the request breaks instances. Ends the probation, only then:
        requests that wait for its end depend on the result."""
        try:
            if not self._has_evidence or self.safeguards.poison.num_incidents(self.suspect) < 2:
                return None
            if failure.kind == "broken":
                await self.safeguards.wait_gone(failure.key)
            return self.safeguards.poison.reject_if_proven(self.suspect, self.safeguards.is_gone)
        finally:
            self._release()

    async def wait_probation(self, key: InstanceKey) -> None:
        """Before the instance is sent what it needs to compute: a suspect waits, for a bounded time, until it is the
        only one there. Raises PoisonRequestRejected when requests of this content have been rejected meanwhile."""
        self._end_probation()
        if self._is_suspect() and self.safeguards.poison.is_prime_suspect(self.suspect):
            await self.safeguards.probations.wait_free(self.suspect, key)
        if not self.safeguards.poison.is_empty:
            self.safeguards.poison.check(self.suspect.digest)
        self._begin_probation(key)  # already: others of this content wait from now on

    async def wait_permit(self, *, has_begun: bool = False) -> bool:
        """Before another attempt: whether the retry budget permits it. Where the client has tokens of other choices
        (`has_begun`), it follows after the wait in any case: an error would end those, too."""
        budget = self.safeguards.budget
        self._permit = budget.resume() if self.choice.num_emitted else await budget.wait_permit()
        if self._permit is None and has_begun:
            self._permit = budget.resume()
        return self._permit is not None

    def _release(self) -> None:
        """Gives probation and permit back. Idempotent."""
        self._end_probation()
        if self._permit is not None:
            self._permit.close()
            self._permit = None

    def _begin_probation(self, key: InstanceKey) -> None:
        if self._is_suspect():
            is_prime = self.safeguards.poison.is_prime_suspect(self.suspect)
            self._probation = self.safeguards.probations.begin(self.suspect, key, is_prime=is_prime)

    def _end_probation(self) -> None:
        if self._probation is not None:
            self.safeguards.probations.end(self._probation)
            self._probation = None

    def _is_suspect(self) -> bool:
        return not self.safeguards.poison.is_empty and self.safeguards.poison.is_suspect(self.suspect)
