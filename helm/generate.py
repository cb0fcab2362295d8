"""`python -m helm.generate [--check]`: writes, or compares, all that is made and not written by hand.

values.yaml, constraints.yaml, the settings trees ─▶ helm/tandem/values.schema.json
values.yaml                                       ─▶ the table in helm/tandem/README.md
vllm_engine/supported.py                          ─▶ helm/tandem/vllm_arguments.yaml
dashboard.yaml                                    ─▶ helm/tandem/dashboards/tandem.json
the chart, kustomize/values.yaml                  ─▶ kustomize/base/
the chart, its ci/ values                         ─▶ tests/chart/golden/, the settings in it read by the services' trees
"""

from __future__ import annotations

from pathlib import Path

import click

from helm.dashboard import PANELS, dashboard
from helm.rendering import CHART, goldens, kustomize_base
from helm.values import values_schema, vllm_arguments, with_table

ROOT = CHART.parents[1]
BASE = ROOT / "kustomize" / "base"
GOLDEN = ROOT / "tests" / "chart" / "golden"


def chart_files() -> dict[Path, str]:
    """What belongs to the chart itself, and has to be right before it can be rendered."""
    values_text = (CHART / "values.yaml").read_text()
    readme = CHART / "README.md"
    return {
        CHART / "values.schema.json": values_schema(values_text, CHART.parent / "constraints.yaml"),
        readme: with_table(readme.read_text(), values_text),
        CHART / "vllm_arguments.yaml": vllm_arguments(),
        CHART / "dashboards" / "tandem.json": dashboard(PANELS.read_text()),
    }


def rendered_files() -> dict[Path, str]:
    base = {BASE / name: text for name, text in kustomize_base(BASE.parent / "values.yaml").items()}
    return {**base, **{GOLDEN / name: text for name, text in goldens().items()}}


def stale() -> list[Path]:
    """Files that are not what they would be made to; those too that nothing makes any more."""
    made = {**chart_files(), **rendered_files()}
    wrong = [path for path, text in made.items() if not path.is_file() or path.read_text() != text]
    return wrong + [path for folder in (BASE, GOLDEN) for path in folder.glob("*") if path not in made]


def write() -> None:
    """Makes every file, and removes what nothing makes any more."""
    for files in (chart_files, rendered_files):
        for path, text in files().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for path in stale():
        path.unlink()


@click.command(help="Make what is generated of the chart; see the module's docstring.")
@click.option("--check", is_flag=True, help="Write nothing; fail if a file is not what it would be made to.")
def main(check: bool) -> None:
    if not check:
        write()
    elif paths := stale():
        names = "\n".join(f"  {path.relative_to(ROOT)}" for path in paths)
        raise click.ClickException(f"not up to date:\n{names}\nRun: .venv/bin/python -m helm.generate")


if __name__ == "__main__":
    main()
