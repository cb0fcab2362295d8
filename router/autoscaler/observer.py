"""Looks at the pools for the autoscaler: the one place that reads the router's state for it.

pools (with who is ejected), admission, recent latencies ──look──▶ PoolObservation for each pool
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from router.admission.door import Admission
from router.autoscaler.latencies import RecentLatencies
from router.autoscaler.observation import EMPTY_DOOR, DoorLook, InstanceLook, PoolObservation, observe
from router.autoscaler.policy import AutoscalerSettings
from router.failover.safeguards import Safeguards
from router.pools.instances import Role


class Observer:
    """Belongs to the router's event loop."""

    def __init__(
        self,
        safeguards: Safeguards,
        admission: Admission,
        latencies: RecentLatencies,
        settings: AutoscalerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._safeguards = safeguards
        self._admission = admission
        self._latencies = latencies
        self._settings = settings
        self._clock = clock

    def look(self, sizes: Mapping[Role, int]) -> dict[Role, PoolObservation]:
        """Both pools now, of which `sizes` are told to be there."""
        door, lacking = door_of(self._admission), lacks(self._admission)
        prefill = self._look("prefill", sizes.get("prefill"), door if lacking == "prefill" else EMPTY_DOOR)
        waits_for_decode = is_for_decode(lacking, prefill)
        decode = self._look("decode", sizes.get("decode"), door if waits_for_decode else EMPTY_DOOR)
        return {"prefill": prefill, "decode": decode}

    def _look(self, role: Role, size: int | None, door: DoorLook) -> PoolObservation:
        policy = self._settings.prefill if role == "prefill" else self._settings.decode
        return observe(
            role,
            self._clock(),
            size,
            tuple(_looks(role, self._safeguards)),
            door,
            self._latencies.of(role),
            policy,
            self._settings.stale_s,
        )


def door_of(admission: Admission) -> DoorLook:
    """Who waits at the door, and how long a newcomer would: what is queued by the rate at which it goes in."""
    if not admission.num_queued:
        return EMPTY_DOOR
    rate_per_s = admission.rate_per_s
    return DoorLook(admission.num_queued, admission.num_queued_tokens / rate_per_s if rate_per_s else None)


def lacks(admission: Admission) -> Role | None:
    """Which pool the queue waits for; None: for neither, since this router's own limits are reached."""
    held, limits = admission.held, admission.limits
    if held.num_requests >= limits.num_requests or held.num_tokens >= limits.num_tokens:
        return None
    return "prefill" if held.num_prefill_tokens >= limits.num_prefill_tokens else "decode"


def is_for_decode(lacking: Role | None, prefill: PoolObservation) -> bool:
    """Whether the queue waits for the decode pool: also where prefill is lacking since nobody fetches what it holds."""
    return lacking == "decode" or (lacking == "prefill" and prefill.is_held_up)


def _looks(role: Role, safeguards: Safeguards) -> Iterator[InstanceLook]:
    pool, ejection = safeguards.side(role)
    marked = {view.key: view for view in ejection.marked(pool.views())}
    for member in pool.members:
        view = marked.get(member.key) if member.key is not None else None
        name = view.instance_id if view is not None else member.address
        yield InstanceLook(name, member.state, view.up_s if view else 0.0, member.beat_age_s, view)
