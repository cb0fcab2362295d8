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

from decode_service.service import DecodeSettings
from prefill_service.service import PrefillSettings
from router.settings import RouterSettings
from serving.lifecycle import EXIT_CANNOT_START, EXIT_CUT_OFF
from serving.settings import Settings, SettingsError, leaves, load

ROOT = Path(__file__).parents[1]
UNITS = sorted((ROOT / "systemd").glob("*.service"))
TREES: dict[str, type[Settings]] = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}


def unit(name: str, section: str = "Service") -> configparser.SectionProxy:
    """A section of it; of a setting that is there twice, the last."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "systemd" / name)
    return parser[section]


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


def test_a_variable_of_one_service_stops_no_other_since_all_units_read_one_file_of_variables() -> None:
    """But server.listen: an instance's address, for which the router has router.listen, and both cannot have it."""
    paths = {role: {path for path, _ in leaves(tree)} for role, tree in TREES.items()}
    for role, tree in TREES.items():
        of_others = set().union(*paths.values()) - paths[role] - {("server", "listen")}
        assert tree.of_other_programs == {path for path in of_others if path[0] in tree.model_fields}


def test_the_routers_address_is_not_that_of_an_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SERVER__LISTEN", "127.0.0.1:50051")
    with pytest.raises(SettingsError, match="unknown setting TANDEM_SERVER__LISTEN"):
        load(RouterSettings, flags={("router", "model"): "any"})


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


def test_units_start_after_the_file_systems_of_the_network() -> None:
    """A checkpoint that is not there yet ends a start with EXIT_CANNOT_START, after which systemd tries no other."""
    for path in UNITS:
        assert {"network-online.target", "remote-fs.target"} <= set(unit(path.name, "Unit")["After"].split())


def test_a_shutdown_stops_the_router_before_its_instances() -> None:
    """systemd stops units in the opposite order of their starts."""
    instances = {f"tandem-instance@{role}.service" for role in ("prefill", "decode")}
    assert instances <= set(unit("tandem-router.service", "Unit")["After"].split())


def test_the_key_is_found_by_the_oldest_systemd_that_has_credentials() -> None:
    """247; the specifier %d came later."""
    service = unit("tandem-instance@.service")
    name, _, _ = service["LoadCredential"].partition(":")
    assert service["ExecStart"].endswith(f" --kv-secret-file ${{CREDENTIALS_DIRECTORY}}/{name}")
    assert not [path.name for path in UNITS if "%d" in path.read_text()]
    assert "systemd 247" in (ROOT / "docs/systemd.md").read_text()


def test_the_pages_kv_folder_is_one_that_all_instances_of_a_machine_can_write_to() -> None:
    """The rest of the machine is read-only to them, and each has a /tmp of its own."""
    state = f"/var/lib/{unit('tandem-instance@.service')['StateDirectory']}"
    [folder] = re.findall(r"transfer: \{[^}]*folder: ([^,}]+)", (ROOT / "docs/systemd.md").read_text())
    assert Path(state) in Path(folder).parents
