"""What a PromQL query asks for: just enough of the language for the chart's own, and an error for the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_GROUPING = re.compile(r"\b(?:by|without|on)\s*\(([^)]*)\)")
_WORDS = {
    *("sum", "max", "min", "rate", "increase", "histogram_quantile", "absent", "min_over_time", "time"),
    *("last_over_time", "max_over_time", "by", "or", "unless", "and"),
}
_RANGE = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")


@dataclass(frozen=True)
class Asked:
    """One series selector, and the labels that the query groups by."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    grouped_by: frozenset[str]


def selectors(query: str) -> list[Asked]:
    """Every selector. Raises ValueError for a word that is none of PromQL's that the chart uses, say a bare metric."""
    groups = frozenset(label.strip() for found in _GROUPING.findall(query) for label in found.split(","))
    asked = [Asked(metric, tuple(_MATCHER.findall(matchers)), groups) for metric, matchers in _SELECTOR.findall(query)]
    rest = _RANGE.sub("", _GROUPING.sub("", _SELECTOR.sub("", query)))
    if unknown := set(re.findall(r"[a-zA-Z_:][\w:]*", rest)) - _WORDS:
        raise ValueError(f"{query}: {', '.join(sorted(unknown))} is no selector and no known function")
    if not asked or query.count("(") != query.count(")"):
        raise ValueError(f"{query}: nothing is asked for, or a bracket is open")
    return asked
