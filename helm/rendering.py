"""The chart rendered by Helm itself (its SDK, no binary and no cluster), as objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

CHART = Path(__file__).resolve().parent / "tandem"
NOTES = "NOTES.txt"

Manifest = dict[str, Any]


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
    return [one for name, text in texts.items() if name != NOTES for one in yaml.safe_load_all(text) if one]
