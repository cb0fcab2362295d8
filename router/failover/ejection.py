"""Instances that fail where others do not are left out for a while: passive, by what requests saw of them.

    in ──`failures` events in a row──▶ ejected for `ejection_s` × count ──▶ on probation ──a success──▶ in
                                            ▲──────────────one failure──────────┘

A failure is one that is the instance's fault: a broken stream, a reservation that does not come, an INTERNAL. Failures
at the same moment are one event: a connection that breaks under fifty streams has failed once. A refusal is no failure.
A dead or silent instance is out by itself (member.py); this is for those that beat and yet fail. An instance that comes
back as another process begins anew.

At most a share of a pool is ejected, and never its last ready instance; should the others go while it is ejected, it is
asked nevertheless (`marked`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from router.config import EjectionSettings
from router.pools.instances import InstanceKey, InstanceView

_log = logging.getLogger(__name__)
_ONE_EVENT_S = 0.1


@dataclass(slots=True)
class _Standing:
    num_failures: int = 0
    """Events in a row."""
    last_failure_s: float = float("-inf")
    num_ejections: int = 0
    until_s: float = float("-inf")
    on_probation: bool = False


class Ejection:
    """The standing of one pool's instances. `clock` is monotonic, in seconds."""

    def __init__(self, settings: EjectionSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._standings: dict[InstanceKey, _Standing] = {}

    def ejected_s(self, key: InstanceKey) -> float | None:
        """Seconds for which this instance is still left out; None when it is in."""
        standing = self._standings.get(key)
        if standing is None or (remaining_s := standing.until_s - self._clock()) <= 0:
            return None
        return remaining_s

    def succeeded(self, key: InstanceKey) -> None:
        """The instance has given a token."""
        if (standing := self._standings.get(key)) is not None:
            standing.num_failures = 0
            standing.on_probation = False

    def failed(self, key: InstanceKey, pool: Sequence[InstanceView]) -> None:
        """The instance has failed a request; `pool` are the views of all that are there beside it, and it."""
        now_s = self._clock()
        self._forget(pool, now_s)
        standing = self._standings.setdefault(key, _Standing())
        if standing.until_s > now_s or now_s - standing.last_failure_s < _ONE_EVENT_S:
            return
        standing.last_failure_s = now_s
        standing.num_failures += 1
        if standing.num_failures < (1 if standing.on_probation else self._settings.failures):
            return
        if not self._may_eject(key, pool):
            return
        self._eject(key, standing, now_s)

    def crashed(self, key: InstanceKey) -> None:
        """Its front has told that its engine is gone, and will soon be gone itself."""
        self._standings.setdefault(key, _Standing()).until_s = self._clock() + self._settings.ejection_s

    def marked(self, views: Sequence[InstanceView]) -> Sequence[InstanceView]:
        """The views with those that are ejected marked as out, for the picker to pass over and to explain."""
        if not self._standings:
            return views
        return [self._mark(view) for view in views]

    def _mark(self, view: InstanceView) -> InstanceView:
        remaining_s = self.ejected_s(view.key)
        if remaining_s is None or view.out is not None:
            return view
        return replace(view, out=f"ejected for {remaining_s:.0f} s more")

    def _eject(self, key: InstanceKey, standing: _Standing, now_s: float) -> None:
        settings = self._settings
        num_served = int((now_s - standing.until_s) / settings.ejection_s) if standing.num_ejections else 0
        standing.num_ejections = max(standing.num_ejections - num_served, 0) + 1
        period_s = settings.ejection_s * standing.num_ejections
        _log.warning("%s is ejected for %g s: %d failures in a row", key.address, period_s, standing.num_failures)
        standing.until_s = now_s + period_s
        standing.num_failures = 0
        standing.on_probation = True

    def _may_eject(self, key: InstanceKey, pool: Sequence[InstanceView]) -> bool:
        ejected = {view.key for view in pool if self.ejected_s(view.key) is not None}
        others = [view for view in pool if view.key != key and view.out is None and view.key not in ejected]
        return bool(others) and len(ejected) + 1 <= self._settings.max_share * len(pool)

    def _forget(self, pool: Sequence[InstanceView], now_s: float) -> None:
        """Processes that are no more."""
        known = {view.key for view in pool}
        for key in [one for one, standing in self._standings.items() if one not in known and standing.until_s <= now_s]:
            del self._standings[key]
