"""What is made and not written is what it would be made to now; and the kustomize base is one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from helm import generate
from helm.rendering import CHART, goldens, kustomize_base, render
from helm.values import with_table
from tests.chart.rendered import NAMES, deployment, released

ROOT = CHART.parents[1]
HOW = "run: .venv/bin/python -m helm.generate"


def test_schema_readme_dashboard_base_and_goldens_are_up_to_date() -> None:
    assert [str(path.relative_to(ROOT)) for path in generate.stale()] == [], HOW


def test_a_stale_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = shutil.copytree(generate.GOLDEN, tmp_path / "golden")
    (copied / "default.yaml").write_text("changed")
    (copied / "gone.diff").write_text("of a values file that is no more")
    monkeypatch.setattr(generate, "GOLDEN", copied)
    assert [path.name for path in generate.stale()] == ["default.yaml", "gone.diff"]


def test_every_ci_file_has_a_golden() -> None:
    assert {name.rpartition(".")[0] for name in goldens()} == set(NAMES)


def test_table_has_every_documented_value_with_its_default() -> None:
    table = with_table(
        "<!-- values: begin --><!-- values: end -->", "# -- How | many.\nsize: 3\nbox:\n  # -- In.\n  a: x\n"
    )
    assert '| `size` | `3` | How \\| many. |\n| `box.a` | `"x"` | In. |' in table
    with pytest.raises(ValueError, match="has no <!-- values"):
        with_table("nothing", "a: 1\n")


def test_kustomize_base_is_the_chart_without_helm_and_secrets() -> None:
    files = kustomize_base(ROOT / "kustomize" / "values.yaml")
    kustomization = yaml.safe_load(files.pop("kustomization.yaml"))
    assert kustomization["resources"] == sorted(files)
    text = "".join(files.values())
    assert "helm.sh/" not in text
    assert "managed-by" not in text
    assert "kind: Secret\n" not in text
    base = [one for file in files.values() for one in yaml.safe_load_all(file)]
    chart = render({}, release="tandem")
    assert len(base) == len([one for one in released(chart) if one["kind"] != "Secret"])
    for role in ("prefill", "decode"):
        assert deployment(base, role)["spec"]["template"]["spec"] == deployment(chart, role)["spec"]["template"]["spec"]
