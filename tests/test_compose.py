"""compose.yaml: valid by Compose's schema, and its settings are those of the services."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from decode_service.service import DecodeSettings
from engine.config import KVConnectorConfig
from instance.settings import InstanceSettings, engine_config
from kv_transfer.secret import ensure_secret
from prefill_service.service import PrefillSettings
from router.settings import RouterSettings
from serving.server import ServerSettings
from serving.settings import Settings, load

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
TREES: dict[str, type[Settings]] = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def settings_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """As the service's process would load them, with the file's default variables."""
    for key, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(key, _VARIABLE.sub(r"\2", str(value)))
    flags: dict[tuple[str, ...], object] = {} if name == "router" else {("server", "listen"): "172.18.0.3:50051"}
    return load(TREES[name], flags=flags)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_instance_can_write_its_compiled_kernels(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert Path(service["environment"]["NUMBA_CACHE_DIR"]).parent in map(Path, service["tmpfs"])


def test_it_is_valid_by_composes_schema() -> None:
    jsonschema.validate(COMPOSE, get_builtin_schema("vendor.compose-spec"))


@pytest.mark.parametrize("name", TREES)
def test_its_settings_are_settings_of_the_services(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(name, monkeypatch)
    server: ServerSettings = settings.server  # type: ignore[attr-defined]
    grace_s = float(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= server.drain_accept_s + server.drain_grace_s + 10
    if isinstance(settings, InstanceSettings):
        settings.check_network()
        connector = engine_config(settings).kv_connector
        assert isinstance(connector, KVConnectorConfig)
        assert "redis" in connector.class_path


def command_line(name: str, folder: Path, addresses: str, redis: str | None) -> list[str]:
    """What the entrypoint of an instance runs in a container with these addresses, where Redis has that one; the
    programs are in `folder`."""
    lines = "\n".join(f"{one}  {kind}  {name}-1" for one in addresses.split() for kind in ("STREAM", "DGRAM", "RAW"))
    finds_redis = "exit 1" if redis is None else f'exec {sys.executable} -c "$(echo "$2" | sed s/redis/{redis}/)"'
    programs = {
        "hostname": f'[ "$1" = -i ] && echo "{addresses} fd00::3" || echo {name}-1',
        "getent": f'[ "$*" = "ahostsv4 {name}-1" ] && echo "{lines}"',
        "python": f'[ "$1" = -c ] || exec printf "%s\\n" "$@"\n{finds_redis}',
    }
    for program, script in programs.items():
        (folder / program).write_text(f"#!/bin/sh\n{script}\n")
        (folder / program).chmod(0o755)
    command = [one.replace("$$", "$") for one in (*SERVICES[name]["entrypoint"], *SERVICES[name]["command"])]
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([*command, "--flag"], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("addresses", ["172.18.0.3", "172.18.0.3 172.19.0.2"])
@pytest.mark.parametrize(("redis", "own"), [("127.0.0.2", "127.0.0.1"), (None, "172.18.0.3")])
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_instances_are_modules_that_listen_at_one_address_of_their_own(
    name: str, addresses: str, redis: str | None, own: str, tmp_path: Path
) -> None:
    """A container in several networks, or with IPv6, has several: that of Redis's network, if Redis runs."""
    listening = ["-m", f"{name}_service", "--listen", f"{own}:50051", "--flag"]
    assert command_line(name, tmp_path, addresses, redis) == listening
    assert f"dns:{name}:50051" in SERVICES["router"]["environment"].values()


def test_the_router_stops_before_its_instances() -> None:
    """Compose stops a service before those that it depends on."""
    assert set(SERVICES["router"]["depends_on"]) == {"prefill", "decode"}


class Health(BaseHTTPRequestHandler):
    """Answers GET /health, and with 404 all else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_request(self, *_: object) -> None:
        pass


def test_the_health_check_asks_the_router_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives containers the proxy of its own configuration."""
    _, python, flag, code = SERVICES["router"]["healthcheck"]["test"]
    assert (python, flag) == ("python", "-c")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        exec(code.replace(":8000", f":{server.server_port}"), {})
        with pytest.raises(HTTPError, match="404"):
            exec(code.replace(":8000/health", f":{server.server_port}/other"), {})
        server.shutdown()


def test_a_start_may_take_as_long_as_with_the_chart() -> None:
    values = yaml.safe_load((ROOT / "helm/tandem/values.yaml").read_text())
    assert SERVICES["router"]["healthcheck"]["start_period"] == f"{values['model']['startupSeconds']}s"


def test_published_ports_are_the_routers_and_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of("router", monkeypatch)
    assert isinstance(settings, RouterSettings)
    listening = {settings.router.listen, settings.router.admin_listen, settings.http.listen}
    published = {_VARIABLE.sub(r"\2", port) for port in SERVICES["router"]["ports"]}
    assert {address.rpartition(":")[2] for address in listening if address} == {one.split(":")[2] for one in published}
    assert all(one.startswith("127.0.0.1:") for one in published), "without tokens, this machine alone"
    assert not any("127.0.0.1" in str(address) for address in listening), "a published port leads to no loopback"
    assert "ports" not in SERVICES["prefill"].keys() | SERVICES["decode"].keys() | SERVICES["redis"].keys()


def test_the_keys_command_makes_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv_secret"
    owners: list[tuple[str, int, int]] = []
    monkeypatch.setattr("os.chown", lambda *args: owners.append(args))
    *_, code = SERVICES["key"]["command"]
    assert SERVICES["prefill"]["environment"]["TANDEM_TRANSFER__SECRET_FILE"] in code
    exec(code.replace("/run/tandem/kv_secret", str(path)), {})
    assert len(ensure_secret(path)) == 32
    assert owners == [(str(path), 65532, 65532)]
    assert "--uid 65532" in (ROOT / "Dockerfile").read_text()


def test_the_key_can_be_made_again_though_it_is_another_users_by_then() -> None:
    """`docker compose up` starts it each time: root without this capability cannot read a file of mode 0600."""
    assert SERVICES["key"]["cap_drop"] == ["ALL"]
    assert set(SERVICES["key"]["cap_add"]) == {"CHOWN", "DAC_READ_SEARCH"}


def test_the_monitoring_profile_scrapes_what_the_dashboard_shows() -> None:
    configs = {name: yaml.safe_load(one.get("content", "null")) for name, one in COMPOSE["configs"].items()}
    dashboard = json.loads((ROOT / COMPOSE["configs"]["dashboard"]["file"]).read_text())
    [job] = configs["prometheus"]["scrape_configs"]
    assert {"router", "prefill", "decode"} == set(job["dns_sd_configs"][0]["names"])
    assert {rule["target_label"] for rule in job["relabel_configs"]} == {"tandem", "component"}
    assert 'tandem=\\"$release\\"' in json.dumps(dashboard)
    for name in TREES:
        assert SERVICES[name]["environment"]["TANDEM_METRICS__LISTEN"] == f"0.0.0.0:{job['dns_sd_configs'][0]['port']}"
    for name in ("prometheus", "grafana"):
        assert SERVICES[name]["profiles"] == ["monitoring"]
        assert {one["source"] for one in SERVICES[name]["configs"]} <= configs.keys()


def test_its_redis_is_the_charts() -> None:
    values = yaml.safe_load((ROOT / "helm/tandem/values.yaml").read_text())
    assert SERVICES["redis"]["image"] == values["connector"]["redis"]["image"]
