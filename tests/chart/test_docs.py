"""docs/kubernetes.md shows values that the chart takes, and names no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from helm.rendering import CHART, read_values, render

TEXT = (CHART.parents[1] / "docs" / "kubernetes.md").read_text()
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES = read_values(CHART / "values.yaml")
OTHERS = {"autoscaling.md", "metrics.md", "tls.crt", "tls.key", "discovery.k8s.io"}
"""Names of pages, of keys in a Secret, and of an API group."""


def shown() -> list[dict[str, Any]]:
    """Every values file of the page."""
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]
    return [block for block in blocks if block.keys() <= VALUES.keys()]


def named() -> set[str]:
    """Every path below one of the chart's values, in prose and in `--set`."""
    first = "|".join(VALUES)
    return set(re.findall(rf"(?<![\w./-])((?:{first})(?:\.[A-Za-z]\w*)+)", TEXT)) - OTHERS


def accepted(path: str) -> bool:
    """Whether the schema has such a value."""
    schema = SCHEMA
    for key in path.split("."):
        while "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        if key not in schema.get("properties", {}):
            return schema.get("type") == "object" and "properties" not in schema
        schema = schema["properties"][key]
    return True


def _paths(values: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{above}{key}.")


@pytest.mark.parametrize("number", range(len(shown())))
def test_values_that_are_shown_render(number: int) -> None:
    assert render(shown()[number])


def test_values_that_are_named_are_there() -> None:
    assert len(shown()) >= 2
    assert len(named()) > 40
    assert sorted(path for path in named() if not accepted(path)) == []


def test_a_value_that_is_not_there_is_seen() -> None:
    assert all(accepted(path) for path in _paths(VALUES))
    assert not accepted("tls.existingSecrets")
    assert not accepted("instance.settings.engine.kv_cache_byte")
