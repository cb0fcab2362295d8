"""JSON merge patches (RFC 7396): how the live page's state changes, as JSON. Null means: the member is gone.

So a state has no nulls, and a list is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""A JSON object without nulls."""


def patch_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> Json:
    """What makes `after` of `before`."""
    patch: Json = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if old is value or old == value:
            continue
        patch[name] = patch_of(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return patch


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
