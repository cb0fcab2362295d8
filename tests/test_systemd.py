"""The systemd units: what systemd says of them, and that they fit the services."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from decode_service.config import DecodeSettings
from prefill_service.config import PrefillSettings
from router.config import RouterSettings
from serving.lifecycle import EXIT_CANNOT_START, EXIT_CUT_OFF
from serving.settings import Settings, load

ROOT = Path(__file__).parents[1]
UNITS = sorted((ROOT / "systemd").glob("*.service"))
TREES: dict[str, type[Settings]] = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}


def unit(name: str) -> configparser.SectionProxy:
    """The section [Service]; of a setting that is there twice, the last."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "systemd" / name)
    return parser["Service"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_finds_nothing_wrong(path: Path, tmp_path: Path) -> None:
    assert shutil.which("systemd-analyze"), "On Debian and Ubuntu: sudo apt-get install systemd"
    copy = tmp_path / path.name.replace("@", "@decode")
    copy.write_text(path.read_text().replace("/opt/tandem/bin/python", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if copy.name in line] == []


@pytest.mark.parametrize(
    ("name", "role"), [("tandem-router.service", "router"), ("tandem-instance@.service", "decode")]
)
def test_a_unit_waits_for_the_drain_and_knows_the_exit_statuses(name: str, role: str) -> None:
    service = unit(name)
    server = TREES[role].model_fields["server"].get_default()
    assert int(service["TimeoutStopSec"]) >= server.drain_accept_s + server.drain_grace_s + 10
    assert int(service["RestartPreventExitStatus"]) == EXIT_CANNOT_START
    assert int(service["SuccessExitStatus"]) == EXIT_CUT_OFF
    module = service["ExecStart"].split()[2].replace("%i", role)
    assert (ROOT / module / "__main__.py").is_file()


def test_the_pages_settings_are_settings_of_the_services(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/systemd.md").read_text(), re.DOTALL)
    for block in blocks:
        roles = ["router"] if "router" in yaml.safe_load(block) else ["prefill", "decode"]
        for role in roles:
            (tmp_path / "settings.yaml").write_text(block)
            load(TREES[role], config=tmp_path / "settings.yaml")
    assert len(blocks) == 2


def test_each_user_has_a_cache_folder_of_its_own() -> None:
    """At a start systemd makes the folder and all in it that unit's user's: others then compile at every start."""
    folders = {path.name: unit(path.name)["CacheDirectory"] for path in UNITS}
    assert len(set(folders.values())) == len(UNITS)
    for name, folder in folders.items():
        assert unit(name).get("User", name.partition("@")[0].removesuffix(".service")) == folder
        assert f"XDG_CACHE_HOME=/var/cache/{folder}" in unit(name)["Environment"].split()


def test_instances_keep_compiled_kernels() -> None:
    """Without its own variable Triton writes into HOME, which is the private /tmp of a start."""
    variables = dict(one.split("=", 1) for one in unit("tandem-instance@.service")["Environment"].split())
    for name in ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert variables[name].startswith("/var/cache/tandem-instance/")
