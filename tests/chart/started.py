"""A container of the chart as the kubelet would start it: variables filled in, its settings file in a folder here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helm.rendering import Manifest

Read = Callable[..., Any]
"""The fixture `read`: of rendered objects and a component, its settings and how it was started."""
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass(frozen=True)
class Started:
    """What a process is given."""

    command: list[str]
    args: list[str]
    environment: dict[str, str]
    mounts: dict[str, dict[str, Any]]
    """Volume by the path that it is mounted at."""

    def has(self, path: str) -> bool:
        """Whether it lies on a volume; where that has chosen files of a Secret or map, whether it is one of them."""
        for mount, volume in self.mounts.items():
            if f"{path}/".startswith(f"{mount}/"):
                items = volume.get("secret", volume.get("configMap", {})).get("items", [])
                files = [item["path"] for item in items]
                return not files or path.removeprefix(f"{mount}/") in files
        return False


def started(template: Manifest, objects: Sequence[Manifest], folder: Path, *, pod_ip: str = "10.1.2.3") -> Started:
    """The first container of a pod; what `objects` has of its maps, and its own annotations, are written to `folder`,
    where arguments then look."""
    spec = template["spec"]
    container = spec["containers"][0]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    environment: dict[str, str] = {}
    for variable in container["env"]:
        value = variable["value"] if "value" in variable else _by_downward_api(variable["valueFrom"], container, pod_ip)
        environment[variable["name"]] = _VARIABLE.sub(lambda found: environment[found[1]], value)
    args = list(container["args"])
    for path, volume in mounts.items():
        if _write(volume, template["metadata"], objects, folder):
            args = [arg.replace(f"{path}/", f"{folder}/") for arg in args]
    return Started(container["command"], args, environment, mounts)


def _by_downward_api(source: dict[str, Any], container: dict[str, Any], pod_ip: str) -> str:
    """The value."""
    if "fieldRef" in source:
        return {"status.podIP": pod_ip, "metadata.name": "on-tandem-pod"}[source["fieldRef"]["fieldPath"]]
    reference = source["resourceFieldRef"]
    assert reference["containerName"] == container["name"]
    which, _, what = reference["resource"].partition(".")
    amount = str(container["resources"][which][what])
    return str(-(-int(amount[:-1]) // 1000) if amount.endswith("m") else int(amount))


def _write(volume: dict[str, Any], metadata: dict[str, Any], objects: Sequence[Manifest], folder: Path) -> bool:
    """False for a volume that is neither a map of the release's own nor of annotations."""
    texts: dict[str, str] = {}
    if "configMap" in volume:
        name = volume["configMap"]["name"]
        found = [one for one in objects if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name]
        texts = {file: text for one in found for file, text in one["data"].items()}
    for item in volume.get("downwardAPI", {}).get("items", ()):
        name = item["fieldRef"]["fieldPath"].removeprefix("metadata.annotations['").removesuffix("']")
        texts[item["path"]] = metadata["annotations"][name]
    for file, text in texts.items():
        (folder / file).write_text(text)
    return bool(texts)
