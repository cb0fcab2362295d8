"""Requests that were on an instance when it died are then computed one at a time, so that a next death has one cause.

    suspect ──wait until nobody is on trial there──▶ on trial ──first token (acquitted), or failure──▶ over
                        └──longer than `quarantine.trial_wait_s`──▶ on trial in company

Without this, a crowd that was cut together would be resumed together, its poisonous one would take the next instance
with it, and nothing would tell which of them it was. Only a prime suspect waits (quarantine.py says who is one): a
crowd of streams that merely ran when their instance vanished goes on at once. The wait is short and bounded: a stall is
worse than a doubt.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

from router.failover.quarantine import Suspect
from router.news import News
from router.pools.instances import InstanceKey


class Trial:
    """One suspect that an instance computes now. `end` it at the first token from there, or when that has failed."""

    def __init__(self, trials: Trials, suspect: Suspect, key: InstanceKey, is_prime: bool) -> None:
        self.suspect = suspect
        self.key = key
        self.is_prime = is_prime
        self.alone = True
        """Nobody as suspicious was on trial there at the same time."""
        self._trials: Trials | None = trials

    def end(self) -> None:
        """Idempotent."""
        trials, self._trials = self._trials, None
        if trials is not None:
            trials._ended(self)


class Trials:
    """Who is on trial where. One per router, on one event loop."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._running: defaultdict[InstanceKey, list[Trial]] = defaultdict(list)
        self._news = News()

    @property
    def num_running(self) -> int:
        return sum(map(len, self._running.values()))

    async def wait_turn(self, suspect: Suspect, key: InstanceKey) -> None:
        """Returns when no other prime suspect is on trial at `key` and `suspect` itself nowhere else, or after a
        while."""
        until_s = time.monotonic() + self._wait_s
        while not self._is_free(suspect, key) and (remaining_s := until_s - time.monotonic()) > 0:
            await self._news.wait(remaining_s)

    def begin(self, suspect: Suspect, key: InstanceKey, *, is_prime: bool) -> Trial:
        """The instance begins to compute now."""
        trial = Trial(self, suspect, key, is_prime)
        for other in self._running[key]:
            if other.suspect != suspect:
                trial.alone = trial.alone and is_prime and not other.is_prime
                other.alone = other.alone and other.is_prime and not is_prime
        self._running[key].append(trial)
        return trial

    def _is_free(self, suspect: Suspect, key: InstanceKey) -> bool:
        elsewhere = any(trial.suspect == suspect and trial.key != key for trial in self._all())
        occupied = any(trial.suspect != suspect and trial.key == key and trial.is_prime for trial in self._all())
        return not elsewhere and not occupied

    def _all(self) -> Iterator[Trial]:
        return chain.from_iterable(self._running.values())

    def _ended(self, trial: Trial) -> None:
        self._running[trial.key].remove(trial)
        if not self._running[trial.key]:
            del self._running[trial.key]
        self._news.tell()
