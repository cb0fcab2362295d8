"""What an installation gives: the packages, wherever Python runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "engine",
    "kv_transfer",
    "serving",
    "instance",
    "prefill_service",
    "decode_service",
    "vllm_engine",
    "router",
    "tandem",
    "protos",
)


def test_run_installs_what_serving_needs_and_the_other_targets_the_rest() -> None:
    def steps(target: str) -> str:
        return subprocess.run(
            ["make", "--dry-run", "--always-make", target], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout

    assert ".[hub,top]" in steps("run")
    assert ".[dev]" not in steps("run")
    for target in ("install", "test", "check", "chart"):
        assert steps(target).index(".[hub,top]") < steps(target).index(".[dev]"), target


def test_an_extra_is_added_to_a_checkout_without_replacing_its_editable_install() -> None:
    """As every message of the packages says it, and with the pins."""
    sources = [file.read_text() for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    found = [line for text in sources for line in re.findall(r".*'\.\[.*", text)]
    assert len(found) >= 2
    assert not [line for line in found if "-c constraints.txt -e '.[" not in line]
    named = [extra for text in sources for extra in re.findall(r"""to_install\(["']([^"']+)""", text)]
    assert len(named) >= 6
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(named) <= extras.keys()


def test_the_pins_fit_torchs_cuda_build() -> None:
    """It is PyPI's build for Linux. The CPU build, which the tests have, does not require Triton."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    required_triton = {"2.11.0": "3.6.0", "2.13.0": "3.7.1"}
    assert pins["triton"] == required_triton[pins["torch"]]


def test_torchs_build_can_be_chosen() -> None:
    def steps(*variables: str) -> str:
        make = ["make", "--dry-run", "--always-make", "install", *variables]
        environment = {name: os.environ[name] for name in os.environ if name not in ("MAKEFLAGS", "TORCH_INDEX")}
        return subprocess.run(make, cwd=ROOT, check=True, capture_output=True, text=True, env=environment).stdout

    assert "index-url" not in steps()
    assert steps("TORCH_INDEX=https://example.org/whl").count("--extra-index-url https://example.org/whl -") == 2


@pytest.mark.parametrize("system", ["Darwin", "Linux"])
def test_another_system_than_linux_is_named_before_anything_is_installed(tmp_path: Path, system: str) -> None:
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {system}\n")
    (tmp_path / "uname").chmod(0o755)
    environment = {name: os.environ[name] for name in os.environ if name != "MAKEFLAGS"}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    make = ["make", "run", f"VENV={tmp_path / 'venv'}", "PYTHON=false"]  # the next check ends there
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert ("A stack needs Linux, and this is Darwin." in done.stderr) == (system != "Linux")
    assert ("docker build -t tandem:0.1.0 . && docker compose up --wait" in done.stderr) == (system != "Linux")
    assert ("Tandem needs Python" in done.stderr) == (system == "Linux")
    assert not (tmp_path / "venv").exists()


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


def tracked_files() -> set[str]:
    """Those of the packages."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return {name for name in listed if name.startswith(tuple(f"{name}/" for name in PACKAGES))}


@pytest.fixture(scope="module")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in {*tracked_files(), "pyproject.toml", "README.md", "LICENSE"}:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "source", check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return path


_CALLER = """
from tandem import AsyncClient, Client, Completion

def ask(client: Client) -> str:
    answer: Completion = client.generate("hi", temperature=None, stop=["a"], max_tokens=3)
    reveal_type(client.model_info().model)
    client.generate("hi", max_tokens="many")
    return answer.text

async def ask_on_loop(client: AsyncClient) -> int:
    return [piece.text async for piece in client.stream("hi", tools=None)]
"""


def test_a_caller_of_an_installed_package_is_type_checked(built_wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    [site] = (tmp_path / "venv").glob("lib/*/site-packages")
    zipfile.ZipFile(built_wheel).extractall(site)
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (tmp_path / "caller.py").write_text(_CALLER)
    python = str(tmp_path / "venv/bin/python")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "caller.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = re.findall(r"caller\.py:(\d+): (?:error|note): (?:Revealed type is )?(.*)", checked.stdout)
    assert [(int(line), re.split(";|  ", text)[0].replace("builtins.", "")) for line, text in found] == [
        (6, '"str"'),
        (7, 'Argument "max_tokens" to "generate" of "Client" has incompatible type "str"'),
        (11, 'Incompatible return value type (got "list[str]", expected "int")'),
    ], checked.stdout + checked.stderr


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_packages_and_the_right_metadata(built_wheel: Path) -> None:
    tracked = tracked_files()
    with zipfile.ZipFile(built_wheel) as wheel:
        names = set(wheel.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        about = message_from_string(wheel.read(metadata).decode())
        scripts = wheel.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    assert tracked - names == set(), "files that pyproject.toml's package-data leaves out"
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, metadata.partition("/")[0]}
    assert (about["Name"], about["Requires-Python"], about["License-Expression"]) == (
        "tandem-llm",
        "<3.14,>=3.11",
        "Apache-2.0",
    )
    assert {"hub", "nixl", "top", "docs", "dev"} <= set(about.get_all("Provides-Extra", []))
    assert "tandem = tandem.cli:main" in scripts
