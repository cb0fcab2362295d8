"""Where a request is retried: how an attempt failed, whether another one follows, and how many may run at one time.

    attempt ──CallFailed──▶ `AttemptHistory.record` ──▶ `give_up`? ──no──▶ `RetryBudget` permits ──▶ another attempt
                                                          └──yes──▶ the error for the client

Before the first token a request is retried, afterwards it is resumed from the emitted tokens. Both go to another
instance, and only if the failure was not the request's own. The loop over attempts is `Dispatcher._run_attempts` in
router/dispatch/dispatcher.py, and what follows a failure `Dispatcher._after_failure`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from router.pools.instance_info import InstanceKey, Role
from serving.errors import InternalError, Overloaded, ServiceError, Unavailable
from serving.settings import Section, setting
from serving.waits import Broadcast


class FailoverSettings(Section):
    """How often a request is retried or resumed on other instances."""

    max_retries: int = setting(
        2, "Attempts in a row that may fail without a new token; with the next such failure the request fails.", ge=0
    )
    max_resumptions: int = setting(3, "Times that a stream continues on another instance.", ge=0)
    resume_wait_s: float = setting(
        5.0,
        "Seconds that a stream waits for an instance on which to continue, and a new request for one that is silent.",
        ge=0,
    )
    retry_share: float = setting(0.2, "Concurrent retries, as a share of the active choices of requests.", ge=0, le=1)
    min_retries_under_way: int = setting(3, "Concurrent retries that are always permitted.", ge=1)
    retry_wait_s: float = setting(5.0, "Seconds that a retry waits for a permit before the request is rejected.", ge=0)


FailureKind = Literal["refused", "late", "broken", "internal", "final", "moved"]
"""How a call to an instance failed.

refused: the instance has no room; another one may have some. late: its reservation ended before KV and seed came from
the other instance of the pair. broken: the instance or the connection to it failed. internal: the instance reports an
error of its own, which a bad request can cause as well. final: every instance would answer the same. moved: not a
failure; the instance is about to end and another one takes over.
"""

Death = Literal["crashed", "vanished"]
"""How an instance may have ended under a call. crashed: its server reported that its engine did. vanished: the call had
reached the instance and ended without a status of the instance's own; whether the process has ended, its pool knows."""

_MAX_INTERNAL = 1  # A request that breaks the instances that compute it must not be sent to all of them


@dataclass(eq=False)
class CallFailed(Exception):
    """A call to the instance `key` of the pool `role` failed. `error` is the answer to the client if no other attempt
    follows."""

    key: InstanceKey
    role: Role
    kind: FailureKind
    error: ServiceError
    detail: str
    death: Death | None = None

    def __str__(self) -> str:
        return f"{self.key.address}: {self.detail}"


@dataclass(slots=True)
class AttemptHistory:
    """The failed attempts of one choice so far. Owned by its flow."""

    num_fruitless: int = 0  # failed attempts in a row without a token
    num_resumptions: int = 0
    num_internal: int = 0
    refused_since_s: float | None = None
    """When the first of the attempts in a row without a token was refused; None: none was."""
    failed: set[InstanceKey] = field(default_factory=set)
    """Reported an internal error, which the request may have caused: never used again."""
    set_aside: set[InstanceKey] = field(default_factory=set)
    """Were overloaded or unavailable: not used while there are others."""
    vanished: set[InstanceKey] = field(default_factory=set)
    """Of those set aside: may have ended, or be silent for a while; their pool is about to know."""
    last_error: ServiceError | None = None

    @property
    def excluded(self) -> frozenset[InstanceKey]:
        return frozenset(self.failed | self.set_aside)

    def record(self, failure: CallFailed, *, progressed: bool) -> None:
        """Records one attempt that failed or was moved; `progressed` if it brought tokens: what failed before it no
        longer counts."""
        if progressed:
            self.num_fruitless, self.last_error, self.refused_since_s = 0, None, None
        if failure.kind == "moved":
            return
        (self.failed if failure.kind == "internal" else self.set_aside).add(failure.key)
        if failure.death == "vanished":
            self.vanished.add(failure.key)
        self.num_internal += failure.kind == "internal"
        self.num_fruitless += not progressed
        self.num_resumptions += progressed
        if failure.kind == "refused" and self.refused_since_s is None:
            self.refused_since_s = time.monotonic()
        self.last_error = failure.error

    def may_wait_for_room(self, wait_s: float) -> bool:
        """Whether an attempt was refused, the first one less than `wait_s` ago."""
        return self.refused_since_s is not None and time.monotonic() < self.refused_since_s + wait_s

    def forgive(self) -> None:
        """An overloaded instance may have room by now, and an unavailable one may be back."""
        self.set_aside.clear()
        self.vanished.clear()


def give_up(
    failure: CallFailed,
    history: AttemptHistory,
    limits: FailoverSettings,
    retry_after_s: float,
    *,
    has_begun: bool = False,
) -> ServiceError | None:
    """The error for the client after `failure`, which `history` has recorded; None if another attempt may follow.
    `has_begun`: the client has tokens, so that the request waits where there is no room."""
    if failure.kind == "final":
        return failure.error
    if history.num_internal > _MAX_INTERNAL:
        return InternalError("two instances failed on this request")
    if history.num_resumptions > limits.max_resumptions:
        return no_instance(history, retry_after_s)
    waits = has_begun and failure.kind == "refused" and history.may_wait_for_room(limits.resume_wait_s)
    if history.num_fruitless > limits.max_retries and not waits:
        return no_instance(history, retry_after_s)
    return None


def no_instance(
    history: AttemptHistory, retry_after_s: float, why: str = "no instance can serve the request now"
) -> ServiceError:
    """The error for the client when no instance is left to try."""
    if isinstance(history.last_error, Overloaded):
        hint_s = history.last_error.retry_after_s
        return Overloaded("every instance is full", retry_after_s if hint_s is None else hint_s)
    if isinstance(history.last_error, InternalError):
        return history.last_error
    return Unavailable(why, retry_after_s)


RetryPermit = ExitStack
"""One further attempt that is under way. `close` it at its first token or its end, whichever is first; idempotent."""


class RetryBudget:
    """Limits the further attempts under way, so that the retries of a failing pool do not overload what is left of it.

        failed before its first token ──wait for a permit──▶ under way ──first token, or failed again──▶ over
        failed after it (a resumption) ─────────at once────▶ under way ──────────────────────────────▶ over

    A retry is rejected only when no permit becomes free: one death fails many requests together, and each of them can
    be served elsewhere, a few at a time. A resumption never waits, since all work on it would be lost; it counts, and
    `failover.max_resumptions` and probation (poison_requests.py) bound it. One per router, on one event loop.
    """

    def __init__(self, settings: FailoverSettings) -> None:
        self.num_active = 0  # choices of requests that run; counted by their guards
        self._settings = settings
        self.num_under_way = 0  # retries and resumptions without a token so far
        self._free = Broadcast()

    @property
    def limit(self) -> int:
        return max(self._settings.min_retries_under_way, int(self._settings.retry_share * self.num_active))

    def resume(self) -> RetryPermit:
        """A permit for a stream that has begun."""
        self.num_under_way += 1
        permit = RetryPermit()
        permit.callback(self._released)
        return permit

    async def wait_permit(self) -> RetryPermit | None:
        """A permit for a request without a token; None if none becomes free within `failover.retry_wait_s`."""
        until_s = time.monotonic() + self._settings.retry_wait_s
        while self.num_under_way >= self.limit:
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                return None
            await self._free.wait(remaining_s)
        return self.resume()

    def _released(self) -> None:
        self.num_under_way -= 1
        self._free.notify()
