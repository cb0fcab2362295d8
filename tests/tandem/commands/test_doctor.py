"""The doctor names what is wrong and what to do, and does not break when something it looks at does."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from click.testing import CliRunner

from engine.attention import compilation
from tandem.cli import main
from tandem.client.registry import RunningStack
from tandem.commands import doctor
from tandem.commands.doctor import Finding, check_connector
from tandem.connectors import ConnectorChoice, split_connectors
from tandem.demo import MODEL_DIR
from tandem.local_stack.pki import StackCa, write_stack_files
from tests.kv_transfer.stores.redis.redis_server import redis_server
from tests.tandem.bench.faulty_store import FAULTY
from tests.waiting import wait_until

SMALL_BYTES = 65536


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their size plays no part in what is found."""
    monkeypatch.setattr(doctor, "_BLOCK_BYTES", SMALL_BYTES)


class RpcFailed(grpc.RpcError):
    """As gRPC raises it: with its status."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code)
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code


def test_a_machine_that_runs_these_tests_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_EXTRAS", ())
    findings = [
        *doctor.check_system(), *doctor.check_python(), *doctor.check_packages(), *doctor.check_machine(),
        *doctor.check_processor(), *doctor.check_kernel(), *doctor.check_extras(),
    ]  # fmt: skip
    assert {finding.verdict for finding in findings} <= {"ok", "warn"}
    assert {finding.subject for finding in findings} >= {
        "system",
        "python",
        "packages",
        "cores",
        "memory",
        "death signal",
    }
    assert all(finding.remedy for finding in findings if finding.verdict != "ok")


def test_a_missing_extra_is_a_warning_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = {finding.subject: finding for finding in doctor.check_extras()}
    assert {finding.verdict for finding in found.values()} == {"warn"}
    assert found["nixl"].remedy == "pip install -c constraints.txt -e '.[nixl]' in the checkout"
    assert "'.[structured-output]'" in found["xgrammar"].remedy


def test_on_another_system_than_linux_the_doctor_names_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    result = CliRunner().invoke(main, ("doctor",))
    [failed] = [line for line in result.output.splitlines() if line.startswith("fail")]
    assert failed.split()[1] == "system"
    assert "this is macOS  → with Docker, in a checkout: docker build -t tandem:0.1.0 . && docker compose up" in failed
    assert result.exit_code == 1


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGTERM, signal.SIGHUP))]
)
def test_a_signal_ends_a_transfer_and_leaves_no_file_and_no_process(number: int, short_folder: Path) -> None:
    small = f"doctor._BLOCK_BYTES, doctor._NUM_ROUNDS = {SMALL_BYTES}, 10**6"  # it ends by the signal
    code = f"from tandem.commands import doctor; {small}; doctor.command()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(short_folder)},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        parent = psutil.Process(process.pid)
        wait_until(lambda: [*short_folder.glob("tandem-transfer-*")] and parent.children())
        children = parent.children(recursive=True)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "\nstopped; all files, keys and processes are removed\n")
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert not list(short_folder.iterdir())


def test_a_missing_package_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["click[some]>=8.1", "no-such-package<3,>=2", 'none-either; extra == "dev"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: required)
    first, second = doctor.check_packages()
    assert (first.verdict, first.text, first.remedy) == ("fail", "missing: no-such-package", "make install")
    assert second.text.startswith("click ")


def test_every_version_that_is_shown_is_of_a_required_package() -> None:
    [only] = doctor.check_packages()
    assert [one.split()[0] for one in only.text.split(", ")] == list(doctor._SHOWN_PACKAGES)


@pytest.mark.parametrize(("has_one", "verdict"), [(True, "ok"), (False, "warn")])
def test_a_processor_without_fma_is_a_warning(has_one: bool, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual machines often hide it."""
    monkeypatch.setattr(compilation, "has_fused_products", lambda: has_one)
    [finding] = doctor.check_processor()
    assert (finding.verdict, finding.subject) == (verdict, "processor")
    assert "FMA" in finding.text
    assert ("x86-64-v3" in finding.remedy) == (not has_one)


def test_low_disk_and_shared_memory_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1 << 20))
    found = {finding.subject: finding for finding in doctor.check_kernel()}
    assert found["/dev/shm"].verdict == found["temporary files"].verdict == "warn"
    assert "TMPDIR to a larger disk, by a path of at most 40 bytes" in found["temporary files"].remedy


@pytest.mark.parametrize(("gpus", "verdict"), [(["0"], "warn"), ([], "ok")])
def test_a_missing_c_compiler_is_a_warning_where_there_is_a_gpu(
    gpus: list[str], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: gpus)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    [finding] = doctor.check_compiler()
    assert (finding.verdict, finding.subject) == (verdict, "C compiler")
    assert finding.text.startswith("neither gcc nor clang is installed")
    assert ("apt-get install gcc" in finding.remedy) == (verdict == "warn")
    (tmp_path / "mycc").touch(0o755)
    monkeypatch.setenv("CC", "mycc")
    [finding] = doctor.check_compiler()
    assert (finding.verdict, finding.text) == ("ok", f"{tmp_path}/mycc, for the kernels of GPUs")
    monkeypatch.setenv("CC", "no-such-compiler")
    [finding] = doctor.check_compiler()
    assert (finding.verdict, finding.text[:32]) == (verdict, "CC=no-such-compiler is not found")


def test_a_model_that_the_engine_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["CarrierPigeonForCausalLM"], "model_type": "pigeon"})
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    [finding] = doctor.check_model(str(tmp_path))
    assert finding.verdict == "fail"
    assert "igeon" in finding.text


def test_the_context_of_a_model_is_the_longest_that_an_instance_serves(tmp_path: Path) -> None:
    shutil.copytree(MODEL_DIR, tmp_path, dirs_exist_ok=True)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8192}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": yarn, "rope_scaling": None}))
    [finding] = doctor.check_model(str(tmp_path))
    assert (finding.verdict, finding.text.rpartition(" ")[2]) == ("ok", "32768")


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    shutil.copy(MODEL_DIR / "config.json", tmp_path)
    [finding] = doctor.check_model(str(tmp_path))
    assert "no *.safetensors" in finding.text


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        (None, "model.safetensors is not a complete safetensors file"),
        ({"a": "model-1.safetensors"}, "shard model-1.safetensors that model.safetensors.index.json names is missing"),
    ],
)
def test_a_checkpoint_that_is_copied_in_part_is_no_model(
    index: dict[str, str] | None, problem: str, tmp_path: Path
) -> None:
    shutil.copy(MODEL_DIR / "config.json", tmp_path)
    weights = (MODEL_DIR / "model.safetensors").read_bytes()[:100_000]
    (tmp_path / ("model.safetensors" if index is None else "model-2.safetensors")).write_bytes(weights)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    [finding] = doctor.check_model(str(tmp_path))
    assert (finding.verdict, problem in finding.text) == ("fail", True), finding


def findings(connector: str, **named: Any) -> list[Finding]:
    """What the doctor says of a connector."""
    return list(check_connector(ConnectorChoice(connector, **named)))


def test_a_connector_that_is_slower_than_it_should_be_gets_a_warning() -> None:
    [finding] = doctor._check_speed("redis", 0.13, 0.55)
    assert (finding.verdict, finding.text[:3]) == ("warn", "13%")
    assert "55%" in finding.text
    assert "tandem bench transfer --connector redis" in finding.remedy
    for share, goal in ((0.6, 0.55), (None, 0.55), (0.1, None)):
        assert not list(doctor._check_speed("redis", share, goal))


def test_blocks_move_through_the_folder_that_is_configured_and_nothing_is_left_there(tmp_path: Path) -> None:
    finding, *_ = findings("shared_storage", kv_folder=tmp_path)
    assert finding.verdict == "ok", finding.text
    assert f"over {tmp_path}" in finding.text
    assert "read and verified at" in finding.text
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # as `test_nixl_is_measured_next_to_a_bare_loop_and_names_its_transport` shows of the bench
def test_nixl_reports_the_transport_that_ucx_chose() -> None:
    finding, *_ = findings("nixl", options={"ucx_tls": "tcp", "digest": False, "load_timeout_s": 60.0})
    assert finding.verdict == "ok", finding.text
    assert "over UCX by TCP [" in finding.text
    assert "compared (digests off)" in finding.text


def test_redis_is_surveyed_and_blocks_move_through_it(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru") as server:
        answers, warning, moved, *_ = findings("redis", kv_url=server.url)
        assert not server.names()
    assert answers.verdict == moved.verdict == "ok"
    assert "allkeys-lru" in warning.text
    assert warning.verdict == "warn"
    assert "noeviction" in warning.remedy


def test_blocks_move_through_redis_by_an_account_with_the_permissions_that_the_remedy_names(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("s3cret")
    with redis_server(tmp_path, "--maxmemory", "1gb", "--maxmemory-policy", "volatile-lru", password="admin") as server:
        permissions = re.findall(r"\+\S+", doctor._REMEDIES["noperm"])
        server.run("ACL", "SETUSER", "kv", "on", ">s3cret", "~tandem:*", *permissions)
        options: dict[str, str | int | float | bool] = {
            "username": "kv",
            "password_file": str(tmp_path / "password"),
        }
        found = findings("redis", kv_url=server.url, options=options)
    assert [finding.text for finding in found if finding.verdict == "fail"] == []


@pytest.mark.parametrize(
    ("url", "what", "remedy"),
    [
        ("redis://127.0.0.1:1/0", "refused", "redis-server --port 6379"),
        ("redis://anna:hunter2@127.0.0.1:1/0", "no login in it", "tandem doctor"),
        ("http://127.0.0.1", "redis://host:port/db", "tandem doctor"),
    ],
)
def test_an_unreachable_redis_is_a_failure_with_a_remedy(url: str, what: str, remedy: str) -> None:
    [finding] = findings("redis", kv_url=url)
    assert finding.verdict == "fail"
    assert what in finding.text
    assert remedy in finding.remedy
    assert "hunter2" not in finding.text + finding.remedy


def test_a_redis_with_a_password_names_the_option_and_never_shows_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_REDIS_PASSWORD", "wrong-one")
    with redis_server(tmp_path, password="s3cret") as server:
        [finding] = findings("redis", kv_url=server.url)
    assert finding.verdict == "fail"
    assert "auth" in finding.text
    assert "TANDEM_REDIS_PASSWORD" in finding.remedy
    assert "wrong-one" not in finding.text + finding.remedy


def test_a_folder_that_is_not_there_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    [finding] = findings("shared_storage", kv_folder=tmp_path / "nowhere")
    assert finding.verdict == "fail"
    assert f"mkdir -p {tmp_path / 'nowhere'}" in finding.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(
            "kv_transfer.stores.files:SharedStorageConnector", " read and compared at ", marks=pytest.mark.slow
        ),
        ("shared_storage", " read and compared (digests off) at "),
    ],
)
def test_digests_are_reported_where_they_are_known(tmp_path: Path, name: str, text: str) -> None:
    options: dict[str, str | int | float | bool] = {"digest": False}
    finding = findings(name, options=options if name == "shared_storage" else {**options, "path": str(tmp_path)})[0]
    assert finding.verdict == "ok"
    assert text in finding.text


def test_options_that_are_secrets_are_not_repeated() -> None:
    choice = ConnectorChoice("no.such:Thing", options={"api_token": "t0ps3cret", "password_file": "/run/pw"})
    assert (
        choice.redacted("bad t0ps3cret at redis://anna:x@h:1, see /run/pw") == "bad *** at redis://***@h:1, see /run/pw"
    )


def test_a_fault_of_a_users_own_store_is_shown_in_one_line_without_secrets() -> None:
    [finding] = findings(FAULTY, options={"method": "put", "token": "t0ps3cret"})
    assert finding.verdict == "fail"
    expected = r"store_lookuperror (LookupError: no bucket for ***\x1b[31m at\nhttps://***@host, sorry"
    assert finding.text.startswith(f"blocks did not arrive: {expected}")
    assert finding.text.endswith("...")


def test_each_connector_of_a_list_is_looked_at_with_what_is_its_own(tmp_path: Path) -> None:
    options: dict[str, str | int | float | bool] = {"redis.ttl_s": 600, "nixl.ucx_tls": "tcp"}
    nixl, redis = split_connectors("nixl,redis", "redis://h:1/0", None, options)
    assert (nixl.name, nixl.kv_url, nixl.options) == ("nixl", None, {"ucx_tls": "tcp"})
    assert (redis.name, redis.kv_url, redis.options) == ("redis", "redis://h:1/0", {"ttl_s": 600})
    with pytest.raises(ValueError, match=r"shared_storage\.ttl_s"):
        split_connectors("nixl,shared_storage", None, tmp_path, {"ttl_s": 600})
    _, own = split_connectors("nixl,my.pages:Store", "h:1", tmp_path, {})
    assert (own.kv_url, own.kv_folder) == ("h:1", tmp_path), "as an instance gives them to it"


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["--connector", "nixl,redis"], "--kv-url redis://host:port/0"),
        (["--connector", "redis"], "--kv-url redis://host:port/0"),
        (["--connector", "carrier-pigeon"], "shared_storage"),
        (["--connector", "nixl", "--kv-folder", "/tmp"], "--kv-folder goes with"),
        (["--connector", "nixl,redis", "--kv-url", "redis://h", "--kv-folder", "/tmp"], "--kv-folder goes with"),
        (["--connector", "nixl,shared_storage", "--kv-url", "redis://h"], "--kv-url goes with"),
        (["--kv-options", "nonsense"], "a map in YAML"),
        (["--kv-options", "{a: 1, a: 2}"], "'a' is there twice"),
    ],
)
def test_a_mistyped_doctor_is_answered_with_what_to_type(args: list[str], hint: str) -> None:
    result = CliRunner().invoke(main, ["doctor", *args])
    assert result.exit_code == 2
    assert hint in result.output


def test_an_instance_that_ends_while_it_is_asked_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(address: str, **credentials: object) -> None:
        raise RpcFailed(grpc.StatusCode.UNAVAILABLE)

    stack = RunningStack("h:1", "/no-such-folder", 1, "demo", {"decode-0": "h:2", "decode-1": "h:3"}, 0.0)
    monkeypatch.setattr("tandem.client.registry.running_stacks", lambda: [stack])
    monkeypatch.setattr("tandem.client.health.health", lambda address, service, **credentials: "ready")
    monkeypatch.setattr("tandem.client.health.load", gone)
    router, *instances = doctor.check_running_stacks()
    assert router.verdict == "ok"
    assert [(one.subject, one.text) for one in instances] == [
        ("decode-0", "silent (UNAVAILABLE) at h:2"),
        ("decode-1", "silent (UNAVAILABLE) at h:3"),
    ]
    assert all("see its log" in one.remedy for one in instances)


@pytest.fixture
def stack_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of its files. A server without any service is its router; another stack's router is gone."""
    own = tmp_path / "tls"
    write_stack_files(own, "127.0.0.1")
    pair = (own / "router.key").read_bytes(), (own / "router.crt").read_bytes()
    credentials = grpc.ssl_server_credentials([pair], (own / "ca.crt").read_bytes(), require_client_auth=True)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    stacks = [
        RunningStack(address, str(tmp_path), 1, "demo", {}, 0.0) for address in (f"127.0.0.1:{port}", "127.0.0.1:1")
    ]
    monkeypatch.setattr("tandem.client.registry.running_stacks", lambda: stacks)
    yield own
    server.stop(None).wait()


def test_tls_files_of_another_stack_are_named_as_the_problem(stack_with_tls: Path) -> None:
    (stack_with_tls / "ca.crt").write_bytes(StackCa().certificate)
    router, gone = doctor.check_running_stacks()
    assert gone.text == "silent (UNAVAILABLE) at 127.0.0.1:1"
    assert (router.verdict, router.subject) == ("fail", "router")
    assert "is not trusted" in router.text
    assert str(stack_with_tls / "ca.crt") in router.text
    assert "start it again" in router.remedy


def test_a_tls_file_that_is_missing_is_named_and_ends_no_check(stack_with_tls: Path) -> None:
    (stack_with_tls / "operator.key").unlink()
    routers = list(doctor.check_running_stacks())
    assert [one.text.partition(": ")[2].partition(" ")[0] for one in routers] == ["tls.key_file:"] * 2
    assert all("start it again" in one.remedy for one in routers)


def test_a_check_that_raises_is_a_failed_line_of_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Iterator[Finding]:
        yield unloadable()

    def unloadable() -> Finding:
        raise ImportError("libfoo.so is not there")

    monkeypatch.setattr(doctor, "check_kernel", broken)
    result = CliRunner().invoke(main, ["doctor", "--quick"])
    assert result.exit_code == 1
    assert "fail broken" in result.output.replace("  ", " ")
    assert "libfoo.so is not there" in result.output
    assert "running stack" in result.output, "the checks after it were made"


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_no_color_is_respected_on_a_terminal(no_color: str, is_coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_running_stacks", lambda: iter(()))
    result = CliRunner().invoke(main, ["doctor", "--quick"], env={"NO_COLOR": no_color}, color=True)
    assert "python" in result.output
    assert ("\x1b[" in result.output) == is_coloured
