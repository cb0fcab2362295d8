"""What values.yaml says of itself: for each key its default, and the `# -- ` line above it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

_MARK = "# -- "
_KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z][\w]*):")


@dataclass(frozen=True, slots=True)
class Value:
    """One documented key, by its path with dots."""

    path: str
    default: Any
    doc: str


def documented(text: str) -> Iterator[Value]:
    """Every key that has a line above it, in the order of the file. Indentation is two spaces a level."""
    values = yaml.safe_load(text)
    above: list[str] = []
    doc = ""
    for line in text.splitlines():
        if line.strip().startswith(_MARK):
            doc = line.strip().removeprefix(_MARK)
        elif matched := _KEY.match(line):
            above = [*above[: len(matched["indent"]) // 2], matched["key"]]
            if doc:
                yield Value(".".join(above), _at(values, above), doc)
            doc = ""


def _at(values: Any, keys: list[str]) -> Any:
    for key in keys:
        values = values[key]
    return values
