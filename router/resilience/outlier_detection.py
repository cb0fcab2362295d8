"""Outlier detection: instances that fail where others do not are not picked for a while. Passive, by what requests see.

    in ──`failures` events in a row──▶ ejected for `ejection_s` × count ──▶ on probation ──a success──▶ in
                                            ▲──────────────one failure──────────┘

A failure is the instance's own: a broken stream, a reservation that does not come, an INTERNAL; never a rejection for
lack of room, nor the wait for it. Failures at the same moment are one event. A dead or silent instance is out by its
load reports (router/pools/instance.py); this is for those that report and yet fail. A new process at the address has
no record.

At most a share of a pool's ready instances is ejected, and never the last one. If no other instance is available, an
ejected one is picked nevertheless (`Dispatcher._plan_now`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from router.pools.instance import LEFT
from router.pools.instance_info import InstanceKey, InstanceView
from serving.settings import Section, setting

_log = logging.getLogger(__name__)
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
    """The records of one pool's instances. `clock` is monotonic, in seconds."""

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

    def crashed(self, key: InstanceKey) -> None:
        """Its server has reported that its engine is gone, and will soon be gone itself."""
        self._records.setdefault(key, _Record()).until_s = self._clock() + self._settings.ejection_s

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
