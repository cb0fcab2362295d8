"""What an installation gives: the packages, wherever Python runs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_run_installs_what_serving_needs_and_the_other_targets_the_rest() -> None:
    def steps(target: str) -> str:
        return subprocess.run(
            ["make", "--dry-run", "--always-make", target], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout

    assert ".[hub]" in steps("run")
    assert ".[dev]" not in steps("run")
    for target in ("install", "test", "check", "chart"):
        assert steps(target).index(".[hub]") < steps(target).index(".[dev]"), target


def test_a_checkout_is_imported_beside_its_own_folder(tmp_path: Path) -> None:
    """As in `cd parent; tandem/.venv/bin/python script.py`, where the folder `tandem` is the checkout."""
    build = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "parent/tandem").mkdir(parents=True)
    script = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import tandem; print(tandem.Client.__module__)"
    # Isolated, so that neither PYTHONPATH nor the environment's own installation counts; its packages do.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    script = f"import sys; sys.path[:0] = ['']; sys.path += {packages!r}; {script}"
    done = subprocess.run(
        [sys.executable, "-IS", "-c", script], cwd=tmp_path / "parent", capture_output=True, text=True
    )
    assert done.stdout.strip() == "tandem.client.client", done.stderr
