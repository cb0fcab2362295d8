"""Values of one's own over the chart's, and a pool's over those of all instances."""

from __future__ import annotations

from typing import Any

import pytest

from helm.rendering import Manifest, render
from tests.chart.rendered import COMPONENTS, deployment
from tests.chart.started import Read


def container(objects: list[Manifest], component: str) -> dict[str, Any]:
    (one,) = deployment(objects, component)["spec"]["template"]["spec"]["containers"]
    return dict(one)


# Variables


def test_variables_of_ones_own_replace_the_charts() -> None:
    own = [{"name": "XDG_CACHE_HOME", "value": "/cache"}, {"name": "GRPC_VERBOSITY", "value": "info"}]
    env = container(render({"instance": {"extraEnv": own}}), "decode")["env"]
    names = [one["name"] for one in env]
    assert len(set(names)) == len(names)
    assert [one for one in env if one["name"] in ("XDG_CACHE_HOME", "GRPC_VERBOSITY")] == own


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("address", ["10.9.8.7", "$(NODE_IP)"])
def test_a_variable_of_ones_own_is_set_before_the_charts_that_contain_it(
    address: str, component: str, read: Read
) -> None:
    """Kubernetes expands $(NAME) only below the variable itself."""
    own = [
        {"name": "NODE_IP", "value": "10.9.8.7"},
        {"name": "OWN", "value": "$(TANDEM_METRICS__LISTEN)"},
        {"name": "POD_IP", "value": address},
        {"name": "XDG_CACHE_HOME", "value": "$(HOME)/cache"},
    ]
    objects = render({"router" if component == "router" else "instance": {"extraEnv": own}})
    settings, process = read(objects, component)
    assert settings.metrics.listen == process.environment["OWN"] == "[10.9.8.7]:9090"
    assert process.environment["XDG_CACHE_HOME"] == "/tmp/cache"
    names = [one["name"] for one in container(objects, component)["env"]]
    assert len(set(names)) == len(names)
