"""Golden renders: the default install whole, and for every other ci/ values file what it changes in that.

So the review of a change shows it once where it is the same everywhere, and each option's file shows what the option
does. The release is called `on`, since an unquoted label would show that. Random bytes are covered; the
dashboard, which is a file of its own, is left out.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml

from helm.component_settings import check_settings
from helm.rendering import CHART, Manifest, read_values, render

CI = CHART / "ci"
_DEFAULT = "default"
_CONTEXT_LINES = 2


def ci_files() -> dict[str, Path]:
    """ci/NAME-values.yaml by NAME."""
    return {path.name.removesuffix("-values.yaml"): path for path in sorted(CI.glob("*-values.yaml"))}


def goldens() -> dict[str, str]:
    """File name → text. Raises ValueError where a service would not start with the settings that are rendered."""
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
