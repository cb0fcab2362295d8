"""The chart rendered by Helm itself (its SDK, no binary and no cluster), as objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

CHART = Path(__file__).resolve().parent / "tandem"
NOTES = "NOTES.txt"

Manifest = dict[str, Any]


class _UniqueKeys(yaml.CSafeLoader):
    """Raises ValueError for a key that is there twice, which YAML's libraries read in different ways."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(f"{sorted(twice)} twice in one object, at{node.start_mark}")
        return super().construct_mapping(node, deep)


def read_values(path: Path) -> dict[str, Any]:
    """A values file; empty is no values."""
    values = yaml.safe_load(path.read_text())
    return values if isinstance(values, dict) else {}


def render_text(values: dict[str, Any], *, release: str, namespace: str) -> dict[str, str]:
    """What each template gives, by its path. Raises helm_python.HelmError, also where the schema refuses."""
    with Chart.load(CHART) as chart:
        rendered = chart.render(values, name=release, namespace=namespace)
    return {name.removeprefix("tandem/templates/"): text for name, text in sorted(rendered.items())}


def render(values: dict[str, Any], *, release: str = "on", namespace: str = "default") -> list[Manifest]:
    """Every object, in the order of the templates' names, hooks included."""
    texts = render_text(values, release=release, namespace=namespace)
    documents = (yaml.load_all(text, _UniqueKeys) for name, text in texts.items() if name != NOTES)
    return [one for objects in documents for one in objects if one]
