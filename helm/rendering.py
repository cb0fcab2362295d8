"""The chart rendered by Helm itself (its SDK, no binary and no cluster): as objects, goldens and the kustomize base."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart
from pydantic import ValidationError

from decode_service.service import DecodeSettings
from prefill_service.service import PrefillSettings
from router.settings import RouterSettings
from serving.settings import Settings
from serving.yaml_file import UniqueKeys

CHART = Path(__file__).resolve().parent / "tandem"
NOTES = "NOTES.txt"
TREES: dict[str, type[Settings]] = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}
SETTINGS_ANNOTATION = "tandem/settings"
_DEFAULT = "default"
_CONTEXT_LINES = 2
_KUSTOMIZE_RELEASE = "tandem"
_ONLY_HELMS = ("helm.sh/chart", "app.kubernetes.io/managed-by")
_HOOK = "helm.sh/hook"

Manifest = dict[str, Any]


class _UniqueKeyLoader(UniqueKeys, yaml.CSafeLoader):
    """By libyaml, which is ten times as fast. YAML's libraries read a key that is there twice in different ways."""


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
    documents = (yaml.load_all(text, _UniqueKeyLoader) for name, text in texts.items() if name != NOTES)
    return [one for objects in documents for one in objects if one]


def check_settings(objects: Sequence[Manifest]) -> None:
    """Raises ValueError, which names the Deployment and the setting, where a service would not start with its settings.

    The schema refuses wrong settings of a user; this sees wrong ones of the chart, before a pod does.
    """
    for one in objects:
        text = settings_text(one) if one["kind"] == "Deployment" else None
        if text is None:
            continue
        name = one["metadata"]["name"]
        try:
            TREES[name.rpartition("-")[2]](**yaml.safe_load(text))
        except ValidationError as error:
            raise ValueError(f"Deployment {name}: {error}") from error


def settings_text(deployment: Manifest) -> str | None:
    """The settings file of its pods; None: they have none."""
    annotations: dict[str, str] = deployment["spec"]["template"]["metadata"].get("annotations", {})
    return annotations.get(SETTINGS_ANNOTATION)


def ci_files() -> dict[str, Path]:
    """ci/NAME-values.yaml by NAME."""
    return {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}


def goldens() -> dict[str, str]:
    """File name → text: the default install whole, and for every other ci/ values file what it changes in that.

    So the review of a change shows it once where it is the same everywhere, and each option's file shows what the
    option does. The release is called `on`, since an unquoted label would show that. Random bytes are covered; the
    dashboard, which is a file of its own, is left out. Raises ValueError where a service would not start with the
    settings that are rendered.
    """
    rendered = {name: render(read_values(path), namespace="golden") for name, path in ci_files().items()}
    for objects in rendered.values():
        check_settings(objects)
    texts = {name: _text(objects) for name, objects in rendered.items()}
    default = texts.pop(_DEFAULT)
    return {
        f"{_DEFAULT}.yaml": default,
        **{f"{name}.diff": _changes(default, text) for name, text in texts.items()},
    }


def _text(manifests: list[Manifest]) -> str:
    for manifest in manifests:
        if manifest["kind"] == "Secret":
            manifest["data"] = dict.fromkeys(manifest["data"], "(random)")
        if "tandem.json" in manifest.get("data", {}):
            manifest["data"]["tandem.json"] = "(dashboards/tandem.json)"
    return "".join(
        f"# {one['kind']} {one['metadata']['name']}\n{yaml.safe_dump(one, sort_keys=False, width=1000)}\n"
        for one in manifests
    )


def _changes(default: str, text: str) -> str:
    """A unified diff without line numbers, which every change above would move; before each part its object's name."""
    lines = text.splitlines()
    lines_out: list[str] = []
    for line in difflib.unified_diff(default.splitlines(), lines, lineterm="", n=_CONTEXT_LINES):
        if line.startswith("@@"):
            start = int(line.split("+")[1].split(",")[0].split(" ")[0])
            lines_out.append(f"@@ {next((one for one in reversed(lines[:start]) if one.startswith('# ')), '')}")
        elif not line.startswith(("---", "+++")):
            lines_out.append(line)
    return "\n".join(lines_out) + "\n"


def kustomize_base(values_path: Path) -> dict[str, str]:
    """File name → text of every file of the base: the chart rendered once, without what only Helm reads.

    The base has no namespace and no Secret. An overlay sets the namespace and creates the key of the page digests in
    the other; docs/kubernetes/install.md says how.
    """
    files: dict[str, list[Manifest]] = {}
    for manifest in render(read_values(values_path), release=_KUSTOMIZE_RELEASE):
        if manifest["kind"] == "Secret" or _HOOK in manifest["metadata"].get("annotations", {}):
            continue
        component = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        files.setdefault(f"{component}.yaml", []).append(_without_helm(manifest))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(files),
    }
    texts = {name: yaml.safe_dump_all(manifests, sort_keys=False, width=1000) for name, manifests in files.items()}
    return {"kustomization.yaml": yaml.safe_dump(kustomization, sort_keys=False), **texts}


def _without_helm(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_helm(item) for key, item in value.items() if key not in _ONLY_HELMS}
    return [_without_helm(item) for item in value] if isinstance(value, list) else value
