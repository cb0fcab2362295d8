"""What keeps one bad instance, or one bad request, from pulling the others down: made once per router.

    failed ──retry_budget──▶ another attempt ──ejection──▶ an instance ──trials──▶ computed ──quarantine──▶ evidence

`Safeguards` owns the four; a `Guard` accompanies one choice through its attempts and tells them what happens.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import NamedTuple, Self

from router.choice import Choice
from router.config import RouterSettings
from router.failover.ejection import Ejection
from router.failover.quarantine import Quarantine, Suspect, content_digest
from router.failover.retry_budget import RetryBudget, Turn
from router.failover.trials import Trial, Trials
from router.legs import LegFailed
from router.pools.instances import InstanceKey, Role
from router.pools.pool import Pool, Pools
from router.request import GenerationRequest
from serving.errors import ServiceError

_MARGIN_S = 0.5


class Safeguards:
    """Owns the retry budget, the evidence against requests, and each pool's outliers. Belongs to one event loop."""

    def __init__(self, pools: Pools, settings: RouterSettings) -> None:
        self.pools = pools
        self.budget = RetryBudget(settings.failover)
        self.quarantine = Quarantine(settings.quarantine)
        self.trials = Trials(settings.quarantine.trial_wait_s)
        self.prefill = Ejection(settings.ejection)
        self.decode = Ejection(settings.ejection)
        self._fate_known_within_s = settings.pools.beat_timeout_s + _MARGIN_S

    def check(self, request: GenerationRequest) -> None:
        """Raises Quarantined while requests of this content are refused."""
        if not self.quarantine.is_empty:
            self.quarantine.check(content_digest(request))

    def guard(self, choice: Choice) -> Guard:
        """One for the whole life of a choice."""
        return Guard(self, choice)

    def side(self, role: Role) -> tuple[Pool, Ejection]:
        """The pool of a role, and who is left out of it."""
        return (self.pools.prefill, self.prefill) if role == "prefill" else (self.pools.decode, self.decode)

    def is_gone(self, key: InstanceKey) -> bool:
        """Whether that process has left its pool otherwise than by a drain; one that froze and came back has not."""
        member = self.pools.prefill.member(key) or self.pools.decode.member(key)
        view = member.view() if member is not None else None
        return view is None or (view.out is not None and not view.load.draining)

    async def wait_gone(self, key: InstanceKey) -> None:
        """Returns when that process is gone, or when it must have told of itself since this call if it were not."""
        until_s = time.monotonic() + self._fate_known_within_s
        while not self.is_gone(key) and (remaining_s := until_s - time.monotonic()) > 0:
            await self.pools.wait_for_news(remaining_s)


class _Computing(NamedTuple):
    """Who computes the choice now."""

    key: InstanceKey
    role: Role
    began_s: float


class Guard:
    """One choice, as the safeguards see it. Owned by its flow, which is inside its `with` to the end."""

    def __init__(self, safeguards: Safeguards, choice: Choice) -> None:
        self._safeguards = safeguards
        self._choice = choice
        self._computing: _Computing | None = None
        self._has_token = False
        self._trial: Trial | None = None
        self._turn: Turn | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @cached_property
    def suspect(self) -> Suspect:
        return Suspect(content_digest(self._choice.request), self._choice.index)

    async def wait_trial(self, key: InstanceKey) -> None:
        """Before the instance is told to compute: a suspect waits until it can be tried alone, but never long.

        Raises Quarantined when requests of this content are refused by now.
        """
        self._end_trial()
        if self._is_suspect() and self._safeguards.quarantine.is_prime(self.suspect):
            await self._safeguards.trials.wait_turn(self.suspect, key)
        if not self._safeguards.quarantine.is_empty:
            self._safeguards.quarantine.check(self.suspect.digest)
        self._begin_trial(key)  # already: others of this content wait from now on

    def begins(self, key: InstanceKey, role: Role) -> None:
        """The instance has been told to compute."""
        if self._trial is None or self._trial.key != key:
            self._end_trial()
            self._begin_trial(key)
        self._computing, self._has_token = _Computing(key, role, time.monotonic()), False

    def token(self) -> None:
        """The instance has given a token: it works, and the choice is past what may have broken another one."""
        if self._has_token or self._computing is None:
            return
        self._has_token = True
        self._end()
        _, ejection = self._safeguards.side(self._computing.role)
        ejection.succeeded(self._computing.key)
        if self._is_suspect():
            self._safeguards.quarantine.acquit(self.suspect, self._computing.role)

    async def failed(self, failure: LegFailed) -> ServiceError | None:
        """Takes note of a failed attempt; the error to answer with when the fault is the request's."""
        try:
            return await self._judged(failure)
        finally:
            self._end()  # not before: whoever waits for the end of the trial is to know the judgement

    async def _judged(self, failure: LegFailed) -> ServiceError | None:
        computing, trial = self._computing, self._trial
        self._computing = None
        if failure.kind not in ("broken", "internal"):
            return None
        role: Role = "prefill" if failure.key == self._choice.prefill_key else "decode"
        pool, ejection = self._safeguards.side(role)
        if failure.death == "crashed":
            ejection.crashed(failure.key)
        else:
            ejection.failed(failure.key, pool.views())
        quarantine = self._safeguards.quarantine
        if failure.kind == "internal":
            quarantine.failed(self.suspect, failure.key, role)
        elif failure.death is not None and computing is not None and computing.key == failure.key:
            told, alone = failure.death == "crashed", trial is None or trial.alone
            quarantine.died(
                self.suspect,
                failure.key,
                role,
                began_s=computing.began_s,
                told=told,
                had_begun=self._has_token,
                alone=alone,
            )
        else:
            return None
        if quarantine.num_strikes(self.suspect) < 2:
            return None
        if failure.kind == "broken":
            await self._safeguards.wait_gone(failure.key)
        return quarantine.convict(self.suspect, self._safeguards.is_gone)

    async def wait_turn(self) -> bool:
        """Before another attempt: whether there is a turn for it."""
        budget = self._safeguards.budget
        self._turn = budget.resume() if self._choice.num_emitted else await budget.retry()
        return self._turn is not None

    def _end(self) -> None:
        """Gives the trial and the turn back. Idempotent."""
        self._end_trial()
        if self._turn is not None:
            self._turn.end()
            self._turn = None

    def _begin_trial(self, key: InstanceKey) -> None:
        if self._is_suspect():
            is_prime = self._safeguards.quarantine.is_prime(self.suspect)
            self._trial = self._safeguards.trials.begin(self.suspect, key, is_prime=is_prime)

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._trial.end()
            self._trial = None

    def _is_suspect(self) -> bool:
        quarantine = self._safeguards.quarantine
        return not quarantine.is_empty and quarantine.is_suspect(self.suspect)
