"""What keeps one bad instance, or one bad request, from affecting the others: made once per router.

    failed ──retry budget──▶ another attempt ──outlier detection──▶ an instance ──probation──▶ computing
                                                            first token, or failed ◀──────────────┘
                                                                  └──▶ evidence of poison-request detection

`Safeguards` owns the four. A `Guard` follows one choice through its attempts: the request's trace notifies it of
events, and the dispatcher waits at its gates (`wait_probation`, `wait_permit`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

from router.pools.instance_info import InstanceKey, Role
from router.pools.pool import Pool, Pools
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from router.resilience.outlier_detection import EjectionSettings, OutlierDetection
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

_MARGIN_S = 0.5


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
        self.prefill = OutlierDetection(ejection)
        self.decode = OutlierDetection(ejection)

    def check(self, request: GenerationRequest) -> None:
        """Raises PoisonRequestRejected while requests of this content are rejected."""
        if not self.poison.is_empty:
            self.poison.check(content_digest(request))

    def of_role(self, role: Role) -> tuple[Pool, OutlierDetection]:
        return self.pools.by_role[role], self.prefill if role == "prefill" else self.decode

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
        _, outliers = self.safeguards.of_role(self._computing.role)
        outliers.succeeded(self._computing.key)
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
        pool, outliers = self.safeguards.of_role(role)
        if failure.death == "crashed":
            outliers.crashed(failure.key)
        else:
            outliers.failed(failure.key, pool.views())
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

    async def wait_permit(self) -> bool:
        """Before another attempt: whether the retry budget permits it."""
        budget = self.safeguards.budget
        self._permit = budget.resume() if self.choice.num_emitted else await budget.wait_permit()
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
