"""Settings as the service itself would read them in a pod of the chart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from helm.rendering import TREES, Manifest
from serving.settings import Settings, settings_options
from tests.chart.rendered import deployment
from tests.chart.started import Read, Started, started


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Settings of a component, and how it was started. Raises click.UsageError as `python -m …` would."""

    def read_one(objects: tuple[Manifest, ...] | list[Manifest], component: str, **pod: str) -> tuple[Any, Started]:
        process = started(deployment(objects, component)["spec"]["template"], objects, tmp_path, **pod)
        for name in [name for name in os.environ if name.startswith("TANDEM_")]:
            monkeypatch.delenv(name)
        for name, value in process.environment.items():
            monkeypatch.setenv(name, value)
        parsed: list[Settings] = []
        settings_options(TREES[component])(parsed.append).main(process.args, standalone_mode=False)
        (settings,) = parsed
        return settings, process

    return read_one
