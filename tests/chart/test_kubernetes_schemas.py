"""Every object is what Kubernetes' own schemas say, in the oldest and the newest version, with no field they lack."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from helm.rendering import CHART, Manifest
from tests.chart.rendered import NAMES, deployment, manifests
from tests.chart.schemas import validate

OLDEST, NEWEST = "1.27", "1.37"
SINCE = {"devices": "1.34", "oci": "1.31"}
"""ci/ files that use what is newer than the oldest version."""
CRDS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "crds.yaml").read_text())


def check(manifest: Manifest, version: str) -> None:
    """Raises a ValidationError of either library."""
    if manifest["kind"] in CRDS:
        jsonschema.validate(manifest, {**CRDS[manifest["kind"]], "definitions": CRDS["definitions"]})
    else:
        validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_objects_are_valid(name: str) -> None:
    for version in (SINCE.get(name, OLDEST), NEWEST):
        for manifest in manifests(name):
            check(manifest, version)


def test_oldest_version_is_the_one_that_the_chart_names() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={OLDEST}.0-0"


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_misspelt_field_is_seen(version: str) -> None:
    """Or the check proves nothing."""
    wrong = copy.deepcopy(deployment(manifests("default"), "decode"))
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(kubernetes_validate.ValidationError):
        check(wrong, version)


def test_misspelt_field_of_a_monitor_is_seen() -> None:
    (monitor,) = (copy.deepcopy(one) for one in manifests("monitoring") if one["kind"] == "PodMonitor")
    monitor["spec"]["podMetricsEndpoint"] = monitor["spec"].pop("podMetricsEndpoints")
    with pytest.raises(jsonschema.ValidationError):
        check(monitor, NEWEST)
