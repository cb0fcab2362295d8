"""What has been done to a pool's size, as far as the next decision must respect it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["out", "in"]
"""More instances, or fewer."""


@dataclass(frozen=True, slots=True)
class History:
    """Times are those of the looks, seconds."""

    since_s: float
    """Looks from then on count: the start, or the last change."""
    changed_s: float | None = None
    direction: Direction | None = None
    """Of the last change; None: there was none, or somebody else made it, and where to go from there is open."""
    reversed_s: float | None = None
    """When the direction last became another one."""

    def after(self, at_s: float, direction: Direction) -> History:
        """The autoscaler has changed the size."""
        is_reversal = self.direction is not None and self.direction != direction
        return History(at_s, at_s, direction, at_s if is_reversal else self.reversed_s)

    def after_another_s_change(self, at_s: float) -> History:
        """An operator has changed the size, or another router."""
        return History(at_s, at_s)
