"""When a failed attempt is followed by another, and when the request is given up: a pure decision over a small history.

Before the first token a request is retried, after it it is resumed; both elsewhere, and both only when another
instance could do better. Two answers of INTERNAL end it: a request that breaks whoever serves it must not be handed
round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.config import FailoverSettings
from router.legs import LegFailed
from router.pools.instances import InstanceKey
from serving.errors import InternalError, Overloaded, ServiceError, Unavailable

_MAX_INTERNAL = 1


@dataclass(slots=True)
class History:
    """What has gone wrong with one choice so far. Owned by its flow."""

    num_fruitless: int = 0
    """Failed attempts in a row that brought no token."""
    num_resumptions: int = 0
    num_internal: int = 0
    failed: set[InstanceKey] = field(default_factory=set)
    """Said that it was their own fault, which the request may have caused: never asked again."""
    set_aside: set[InstanceKey] = field(default_factory=set)
    """Were full, or could not be reached: not asked again while there are others."""
    last_error: ServiceError | None = None

    @property
    def excluded(self) -> frozenset[InstanceKey]:
        """Instances that are not asked now."""
        return frozenset(self.failed | self.set_aside)

    def record(self, failure: LegFailed, *, progressed: bool) -> None:
        """Takes note of one failed attempt."""
        (self.failed if failure.kind == "internal" else self.set_aside).add(failure.key)
        self.num_internal += failure.kind == "internal"
        self.num_fruitless = 0 if progressed else self.num_fruitless + 1
        self.num_resumptions += progressed
        self.last_error = failure.error

    def forgive(self) -> None:
        """A full instance may have room by now, and one that was frozen or cut off may be back."""
        self.set_aside.clear()


def give_up(
    failure: LegFailed, history: History, limits: FailoverSettings, retry_after_s: float
) -> ServiceError | None:
    """The error to answer the request with after `failure`, which `history` has recorded; None to try again."""
    if failure.kind == "final":
        return failure.error
    if history.num_internal > _MAX_INTERNAL:
        return InternalError("two instances failed on this request")
    if history.num_fruitless > limits.max_retries or history.num_resumptions > limits.max_resumptions:
        return no_instance(history, retry_after_s)
    return None


def no_instance(
    history: History, retry_after_s: float, why: str = "no instance can serve the request now"
) -> ServiceError:
    """What the client is told when nobody is left to ask."""
    if isinstance(history.last_error, Overloaded):
        hint_s = history.last_error.retry_after_s
        return Overloaded("every instance is full", retry_after_s if hint_s is None else hint_s)
    if isinstance(history.last_error, InternalError):
        return history.last_error
    return Unavailable(why, retry_after_s)
