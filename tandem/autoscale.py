"""`--autoscale decode=1..3`: bounds of the pools as a person writes them, and as the router's flags."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from tandem.roster import MAX_SIZE, ROLES, Role
from tandem.stack_settings import StackSettings

_BOUNDS = re.compile(r"(?P<pool>[^=]*)=(?P<least>[0-9]{1,4})\.\.(?P<most>[0-9]{1,4})")


class Bounds(NamedTuple):
    """How many instances a pool may have, both included."""

    least: int
    most: int


def parse_bounds(texts: Iterable[str]) -> dict[Role, Bounds]:
    """The bounds by pool. Raises ValueError, which says what to type instead."""
    bounds: dict[Role, Bounds] = {}
    for text in texts:
        matched = _BOUNDS.fullmatch(text)
        if matched is None:
            raise ValueError(f"{text!r} is not POOL=MIN..MAX: write decode=1..3")
        role = _role(matched["pool"])
        if role in bounds:
            raise ValueError(f"the {role} pool is named twice: write the one range that it is to have")
        bounds[role] = Bounds(int(matched["least"]), int(matched["most"]))
        if not 1 <= bounds[role].least <= bounds[role].most <= MAX_SIZE:
            raise ValueError(f"{text!r}: a range is MIN..MAX with 1 <= MIN <= MAX <= {MAX_SIZE}, as in {role}=1..3")
    return bounds


def autoscaled(settings: StackSettings, bounds: Mapping[Role, Bounds]) -> StackSettings:
    """The settings of a stack whose router resizes its pools within `bounds`; a pool without bounds keeps its size.

    Raises ValueError for a pool that does not begin within its bounds, and for one without instances.
    """
    if not bounds:
        return settings
    flags = ["--autoscaler-enabled"]
    sizes: dict[Role, int] = {"prefill": settings.num_prefill, "decode": settings.num_decode}
    for role, size in sizes.items():
        least, most = bounds.get(role, (size, size))
        if not max(least, 1) <= size <= most:
            allowed = f"{least}..{most}" if role in bounds else f"1..{MAX_SIZE}, where the pools grow by themselves"
            raise ValueError(f"the {role} pool begins with {size} instances, outside {allowed}: set --{role} too")
        flags += [f"--autoscaler-{role}-min-size", str(least), f"--autoscaler-{role}-max-size", str(most)]
    most_of = {role: bounds[role].most for role in bounds}
    return replace(
        settings,
        max_prefill=most_of.get("prefill", 0),
        max_decode=most_of.get("decode", 0),
        router_args=(*flags, *settings.router_args),
    )


def _role(name: str) -> Role:
    for role in ROLES:
        if name == role:
            return role
    similar = difflib.get_close_matches(name, ROLES, n=1, cutoff=0.5)
    hint = f"did you mean {similar[0]}?" if similar else "the pools are prefill and decode"
    raise ValueError(f"there is no pool {name!r}: {hint}")
