"""The Dockerfile's steps, performed in a clean folder, give a Tandem that works from anywhere.

Not proven without a Docker engine: the base image, the libraries that it has, and downloads. Packages are linked in
from the environment that runs the tests, and pip checks them against pins and extras as it would there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from helm.rendering import CHART, read_values
from tests.chart.dockerfile import Build, Step, context_files, steps
from tests.chart.rendered import deployment, manifests
from vllm_engine.supported import TESTED

ROOT = CHART.parents[1]
STEPS = list(steps((ROOT / "Dockerfile").read_text()))
OURS = re.compile(r"(tandem_llm|__editable__)")


def link_installed(site: Path, linked: Path) -> None:
    """Makes the packages of this environment visible in a venv, all but Tandem itself."""
    linked.mkdir()
    for own in site.glob("setuptools*"):  # the interpreter's, older than torch wants
        shutil.rmtree(own)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        is_there = entry.name in ("pip", "_distutils_hack") and (site / entry.name).exists()  # with Python's own venv
        if not (OURS.match(entry.name) or is_there or entry.suffix == ".pth"):
            (linked / entry.name).symlink_to(entry)
    (site / "installed.pth").write_text(f"{linked}\n")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The image's folder after every step that needs no root."""
    root = tmp_path_factory.mktemp("image")
    bare = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    offline = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    build = Build(root=root, context=ROOT, environment={**bare, **offline})
    for step in STEPS:
        build.perform(step)
        if step == Step("RUN", "python -m venv /opt/tandem"):
            (site,) = (root / "opt" / "tandem").glob("lib/python*/site-packages")
            link_installed(site, tmp_path_factory.mktemp("linked") / "site-packages")
    return build


def run(built: Build, *command: str) -> str:
    done = subprocess.run(
        command, cwd="/", env=built.environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_only_the_users_and_the_systems_packages_are_not_made(built: Build) -> None:
    users, packages = built.skipped
    assert re.findall(r"--(?:uid|gid) (\d+)", users) == ["65532", "65532", "65532"]
    assert packages.startswith("apt-get update && apt-get install ")


def test_gpus_image_has_the_c_compiler_that_triton_calls() -> None:
    own = [step for step in STEPS if step.word in ("FROM", "USER", "RUN")]
    start = own.index(Step("FROM", "runtime AS cuda"))
    as_root, install, back = own[start + 1 : own.index(Step("FROM", "runtime AS cpu"))]
    assert (as_root.rest, back) == ("root", Step("USER", "65532:65532"))
    packages = re.findall(r"apt-get install -y --no-install-recommends ([^&]+) &&", install.rest)
    assert [one.split() for one in packages] == [["gcc", "libc6-dev"]]


@pytest.mark.parametrize("component", ["router", "prefill", "decode"])
def test_containers_commands_are_in_the_image(component: str, built: Build) -> None:
    (container,) = deployment(manifests("default"), component)["spec"]["template"]["spec"]["containers"]
    assert "--config FILE" in run(built, *container["command"], "--help")


def test_image_generates_with_the_model_that_the_chart_names(built: Build) -> None:
    folder = built.root / "models" / "demo"
    printed = run(
        built,
        "python",
        "-c",
        "import tandem; from engine import LLM, SamplingParams; print(tandem.__file__);"
        f"print(LLM(model={str(folder)!r}, num_blocks=64)"
        ".generate(['Once upon a time'], SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].text)",
    )
    origin, _, text = printed.partition("\n")
    assert origin.startswith(str(built.root))
    assert len(text.split()) > 3


def test_image_runs_as_the_charts_user_and_has_its_ports(built: Build) -> None:
    pod = deployment(manifests("default"), "router")["spec"]["template"]["spec"]
    context = pod["securityContext"]
    assert built.settings["USER"] == f"{context['runAsUser']}:{context['runAsGroup']}"
    ports = [port["containerPort"] for port in pod["containers"][0]["ports"]]
    assert built.settings["EXPOSE"].split() == [str(port) for port in ports]


def test_context_is_what_the_wheel_is_made_of() -> None:
    files = context_files(ROOT, (ROOT / ".dockerignore").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert {path.parts[0] for path in files} == packages | {"pyproject.toml", "README.md", "constraints.txt"}
    assert not any("__pycache__" in path.parts for path in files)


def test_base_is_pinned_and_the_last_stage_is_the_cpus() -> None:
    base = next(step.rest for step in STEPS if step.word == "ARG")
    assert re.fullmatch(r"BASE=docker\.io/library/python:\d+\.\d+\.\d+-slim-\w+", base)
    stages = [step.rest.rpartition(" AS ")[2] for step in STEPS if step.word == "FROM"]
    assert stages == ["build", "runtime", "cuda", "cpu"]


def test_extras_are_the_projects_and_a_router_can_ask_kubernetes() -> None:
    arguments = dict(step.rest.split("=", 1) for step in STEPS if step.word == "ARG")
    extras = arguments["EXTRAS"].split(",")
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= optional.keys()
    assert "kubernetes" in extras
    assert set(optional["kubernetes"]) <= set(optional["dev"])


def test_vllms_image_is_tandems_on_top_of_the_tested_vllm() -> None:
    """Not performed: it needs vLLM's image."""
    arguments, own = {}, {word: [] for word in ("RUN", "ENV", "USER", "FROM")}
    for step in steps((ROOT / "vllm.Dockerfile").read_text()):
        if step.word == "ARG":
            name, value = step.rest.split("=", 1)
            arguments[name] = value
        own.setdefault(step.word, []).append(step.rest)
    assert re.fullmatch(rf"docker\.io/vllm/vllm-openai:v{re.escape(TESTED)}\.\d+", arguments["BASE"])
    assert own["USER"] == [step.rest for step in STEPS if step.word == "USER"][:1]
    performed = [step.rest for step in STEPS if step.word == "RUN"]
    others = [rest for rest in own["RUN"] if rest.replace("python3 -m venv", "python -m venv") not in performed]
    into_vllm = "${VLLM_PYTHON} -m pip install --no-deps --constraint constraints.txt /wheels/tandem_llm-*.whl "
    assert others == [f"{into_vllm}redis hiredis nixl ${{NIXL}}"]
    default_model = read_values(CHART / "values.yaml")["model"]["image"]["path"]
    assert any(rest.endswith(f" {default_model}") for rest in own["RUN"])
    assert f"redis hiredis nixl {arguments['NIXL']}" in (ROOT / "Makefile").read_text()
    engine = (CHART / "templates" / "_engine.tpl").read_text()
    assert f"\npython: {arguments['VLLM_PYTHON']}\n" in engine


def test_a_step_that_cannot_work_is_seen(built: Build) -> None:
    """Or the fixture above proves nothing."""
    with pytest.raises(subprocess.CalledProcessError):
        built.perform(Step("RUN", "/opt/tandem/bin/pip install --constraint constraints.txt no-such-package-here"))
    with pytest.raises(AssertionError, match="leaves nothing of it"):
        built.perform(Step("COPY", "Makefile ./"))
