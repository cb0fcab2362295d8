"""What there is to say about a Redis before pages are put into it. Pure: from INFO to plain sentences."""

from __future__ import annotations

from collections.abc import Mapping

_NEARLY_FULL = 0.9


def survey(info: Mapping[str, str]) -> list[str]:
    """Warnings for the operator; none: it is set up as it should be. `info` is INFO memory and INFO replication."""
    warnings = []
    policy = info.get("maxmemory_policy", "")
    limit, used = _number(info, "maxmemory"), _number(info, "used_memory")
    if policy.startswith("allkeys-"):
        warnings.append(
            f"maxmemory-policy is {policy}: when memory is short it drops pages, and whatever else is kept there,"
            " without a word; pages that are gone are computed again. Set noeviction or volatile-lru: every page has a"
            " time to live"
        )
    if limit == 0:
        warnings.append(
            "maxmemory is not set: pages may take all of that machine's memory. Set it to what KV may have, e.g."
            " `maxmemory 16gb`"
        )
    elif limit and used is not None and used > _NEARLY_FULL * limit:
        warnings.append(
            f"{used / limit:.0%} of maxmemory is in use: what does not fit is not saved until other pages have expired"
        )
    if info.get("role") == "slave":
        warnings.append("it is a replica: pages can be read and not saved. Give the primary's address")
    return warnings


def _number(info: Mapping[str, str], name: str) -> int | None:
    value = info.get(name, "")
    return int(value) if value.isdecimal() else None
