"""The kustomize base: the chart rendered once with kustomize/values.yaml, without what only Helm reads.

The base has no namespace and no Secret. An overlay sets the namespace and creates the key of the page digests in the
other; docs/kubernetes/install.md says how.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from helm.rendering import Manifest, read_values, render

_RELEASE = "tandem"
_ONLY_HELMS = ("helm.sh/chart", "app.kubernetes.io/managed-by")
_HOOK = "helm.sh/hook"


def kustomize_base(values_path: Path) -> dict[str, str]:
    """File name → text of every file of the base."""
    files: dict[str, list[Manifest]] = {}
    for manifest in render(read_values(values_path), release=_RELEASE):
        if _HOOK in manifest["metadata"].get("annotations", {}):
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
