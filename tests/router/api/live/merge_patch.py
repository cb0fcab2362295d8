"""JSON merge patches (RFC 7396) as the page applies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.api.live.state import Json


def patched(before: Json, patch: Mapping[str, Any]) -> Json:
    """`before` with the changes of `patch`; neither is changed."""
    after = {name: value for name, value in before.items() if patch.get(name, value) is not None}
    for name, value in patch.items():
        if isinstance(value, dict):
            old = before.get(name)
            after[name] = patched(old if isinstance(old, dict) else {}, value)
        elif value is not None:
            after[name] = value
    return after
