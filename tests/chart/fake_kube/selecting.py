"""Label and field selectors."""

from __future__ import annotations

import re
from typing import Any

from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.refusal import Refused

_REQUIREMENTS = re.compile(r",(?![^(]*\))")
_SET = re.compile(r"([^\s!=]+)\s+(in|notin)\s+\(([^)]*)\)")
_EQUALITY = re.compile(r"([^!=]+)(==|!=|=)([^=]*)")


def matches_labels(labels: dict[str, str] | None, selector: str) -> bool:
    """Whether `labels` meet every requirement of `selector`; the empty one is met by all."""
    return all(_meets(labels or {}, part.strip()) for part in _REQUIREMENTS.split(selector) if part.strip())


def _meets(labels: dict[str, str], requirement: str) -> bool:
    if found := _SET.fullmatch(requirement):
        values = [value.strip() for value in found[3].split(",")]
        return (labels.get(found[1]) in values) is (found[2] == "in")
    if found := _EQUALITY.fullmatch(requirement):
        return (labels.get(found[1].strip()) == found[3].strip()) is (found[2] != "!=")
    return requirement in labels if not requirement.startswith("!") else requirement[1:] not in labels


def matches_fields(found: Object, selector: str) -> bool:
    """The same for fields, which have equality alone. Raises Refused for anything else."""
    for part in filter(None, selector.split(",")):
        equality = _EQUALITY.fullmatch(part)
        if equality is None:
            raise Refused(400, "BadRequest", f"invalid field selector {part!r}")
        if (_field(found, equality[1]) == equality[3]) is (equality[2] == "!="):
            return False
    return True


def _field(found: Object, path: str) -> str:
    value: Any = found
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def selector_text(selector: Object) -> str:
    """Of `matchLabels`."""
    return ",".join(f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items()))
