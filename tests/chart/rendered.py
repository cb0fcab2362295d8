"""What the tests of the chart look at: every ci/ values file, rendered once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from helm.rendering import CHART, Manifest, ci_files, read_values, render, settings_text

NAMES = tuple(ci_files())
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
NAMESPACE = "a-namespace-whose-name-is-exactly-as-long-as-names-may-be-in-dns"[:63]
COMPONENTS = ("router", "prefill", "decode")
SCALING = frozenset({"autoscaling", "secure"})
"""ci/ files with an autoscaler."""
ASKING = SCALING | {"endpoints"}
"""ci/ files whose router asks Kubernetes."""
ENCRYPTED = frozenset({"secure", "tls"})
"""ci/ files with TLS."""


@cache
def manifests(name: str) -> tuple[Manifest, ...]:
    """The objects of ci/NAME-values.yaml or examples/NAME.yaml, for a release called `on`. Not to be changed."""
    return tuple(render(read_values({**ci_files(), **EXAMPLES}[name]), release="on", namespace=NAMESPACE))


def of_kind(objects: tuple[Manifest, ...] | list[Manifest], kind: str) -> list[Manifest]:
    """Those of one kind."""
    return [one for one in objects if one["kind"] == kind]


def released(objects: tuple[Manifest, ...] | list[Manifest]) -> list[Manifest]:
    """Without hooks, which come and go."""
    return [one for one in objects if "helm.sh/hook" not in one["metadata"].get("annotations", {})]


def component_of(manifest: Manifest) -> str:
    """What its label says."""
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def deployment(objects: tuple[Manifest, ...] | list[Manifest], component: str) -> Manifest:
    """The Deployment of one component."""
    (found,) = (one for one in of_kind(objects, "Deployment") if component_of(one) == component)
    return found


def settings_of_pods(objects: tuple[Manifest, ...] | list[Manifest], component: str) -> str:
    """The settings file of one component."""
    text = settings_text(deployment(objects, component))
    assert text is not None
    return text


@dataclass(frozen=True)
class Pod:
    """A pod that the chart makes, by itself, by a Deployment or by a Job."""

    owner: Manifest
    metadata: dict[str, Any]
    spec: dict[str, Any]

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def pods(objects: tuple[Manifest, ...] | list[Manifest]) -> Iterator[Pod]:
    """Every one, those of hooks included."""
    for manifest in objects:
        if manifest["kind"] == "Pod":
            yield Pod(manifest, manifest["metadata"], manifest["spec"])
        elif manifest["kind"] in ("Deployment", "Job"):
            template = manifest["spec"]["template"]
            yield Pod(manifest, template["metadata"], template["spec"])
