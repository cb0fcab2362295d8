"""How fast somebody is served while he waits: what a predicted wait rests on.

Only time in which he waited counts, and only what was served to him in that time: a half-empty house says nothing about
what a full one would do. Old observations fade with the time constant, measured in time of waiting.
"""

from __future__ import annotations

import math

_FADING_S = 20.0
_MIN_NUM_SERVED = 3.0
_MIN_WAITING_S = 0.5
_GUESS_S = 4.0


class ServiceRate:
    """One line's rate. Times are given, never read."""

    __slots__ = ("_at_s", "_cost", "_num_served", "_waiting", "_waiting_s")

    def __init__(self) -> None:
        self._at_s = 0.0
        self._waiting = False
        self._waiting_s = 0.0
        self._cost = 0.0
        self._num_served = 0.0

    def observe(self, now_s: float, *, waiting: bool, cost: float = 0.0) -> None:
        """Something was served (`cost` over 0) or somebody came or went; `waiting` is how it stands from now on."""
        if self._waiting:
            elapsed_s = max(now_s - self._at_s, 0.0)
            kept = math.exp(-elapsed_s / _FADING_S)
            self._waiting_s = self._waiting_s * kept + elapsed_s
            self._cost = self._cost * kept + cost
            self._num_served = self._num_served * kept + (cost > 0)
        self._at_s, self._waiting = now_s, waiting

    def per_s(self, guess_per_s: float | None = None) -> float | None:
        """Cost per second. A guess counts as much as four seconds of seeing; None if there is neither."""
        if guess_per_s is not None:
            return (self._cost + guess_per_s * _GUESS_S) / (self._waiting_s + _GUESS_S)
        if self._num_served < _MIN_NUM_SERVED or self._waiting_s < _MIN_WAITING_S:
            return None
        return self._cost / self._waiting_s

    def forget(self) -> None:
        """What serves has changed."""
        self._waiting_s = self._cost = self._num_served = 0.0
