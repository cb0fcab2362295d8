"""`tandem bench transfer` measures what moves, compares every byte, and leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import torch
from click.testing import CliRunner

from engine.config import KVConnectorConfig
from kv_transfer.nixl.connector import NixlOptions
from kv_transfer.secret import ensure_secret
from kv_transfer.stores.files import SharedStorageOptions
from kv_transfer.stores.lmcache.connector import LMCacheOptions
from kv_transfer.stores.redis.connector import RedisOptions
from kv_transfer.transfer.connector import TransferOptions, parse_options
from tandem.bench.transfer.endpoint import Shape, SourceEndpoint, TransferEndpoint, TransferFailed, as_bytes
from tandem.bench.transfer.measure import Figures, Result, measure, table
from tandem.bench.transfer.media import Medium, SharedStorageMedium, medium_of, transport
from tandem.cli import main
from tandem.commands.bench.transfer import _ProgressLine
from tandem.commands.options import interruptible
from tandem.connectors import ConnectorChoice
from tests.kv_transfer.stores.redis.redis_server import redis_server
from tests.process_logs import ProcessLogs
from tests.tandem.bench.faulty_store import FAULTY
from tests.waiting import wait_until

SMALL = ["--blocks", "4", "--block-bytes", "65536", "--rounds", "3"]
FINGERPRINT = bytes(range(32))


def bench(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["bench", "transfer", *SMALL, *args])
    return result.exit_code, result.output


def test_shared_storage_is_measured_next_to_reading_its_files_also_beside_a_connector_that_fails(
    tmp_path: Path,
) -> None:
    connectors = ("--connector", "no.such:Thing", "--connector", "shared_storage")
    status, output = bench(*connectors, "--kv-folder", str(tmp_path), "--json", str(tmp_path / "j"))
    assert status == 1, output
    assert "no.such:Thing: failed: kv_connector: cannot import" in output
    for part in ("digests off", "digests on", "raw: read the files", "of raw", "80%", "50%"):
        assert part in output
    written = json.loads((tmp_path / "j").read_text())
    assert written["partial"]
    (result,) = written["results"]
    assert [way["way"] for way in result["ways"]] == ["off", "on", "raw: read the files"]
    assert all(len(way["all_blocks_s"]) == 3 for way in result["ways"])
    assert result["ways"][2]["share_of_raw"] == 1.0
    assert not list(tmp_path.glob("tandem-transfer-*"))


def test_nixl_is_measured_next_to_a_bare_loop_and_names_its_transport() -> None:
    status, output = bench("--connector", "nixl", "--tls", "tcp", "--digest", "on")
    assert status == 0, output
    assert "nixl/tcp, 4 blocks of 0.07 MB, 3 rounds, over UCX by TCP [" in output
    assert "raw: bare nixl read" in output
    assert "digests off" not in output


@pytest.mark.parametrize("connector", [("shared_storage",), ("nixl", "--tls", "tcp")])
def test_a_single_block_is_measured_too(connector: tuple[str, ...], tmp_path: Path) -> None:
    status, output = bench("--connector", *connector, "--blocks", "1", "--json", str(tmp_path / "j"))
    assert status == 0, output
    results = json.loads((tmp_path / "j").read_text())["results"]
    assert [result["num_blocks"] for result in results] == [4, 1]
    assert all(len(way["one_block_s"]) == 3 * 8 for result in results for way in result["ways"])


def test_blocks_without_room_in_memory_are_an_error() -> None:
    with pytest.raises(TransferFailed, match="there is no memory for 65536 blocks of 1099511627776 bytes"):
        Shape(num_blocks=65536, block_bytes=1 << 40).memory()


@pytest.mark.parametrize(
    ("connector", "options", "url"),
    [
        ("shared_storage", SharedStorageOptions, None),
        ("redis", RedisOptions, "redis://127.0.0.1:1"),
        ("lmcache", LMCacheOptions, None),
        ("lmcache", LMCacheOptions, "tcp://127.0.0.1:1"),
        ("nixl", NixlOptions, None),
    ],
)
def test_options_are_those_of_the_connector(
    tmp_path: Path, connector: str, options: type[TransferOptions], url: str | None
) -> None:
    folder = None if url or connector == "nixl" else tmp_path
    medium = medium_of(ConnectorChoice(connector, kv_folder=folder, kv_url=url))
    with medium.opened(Shape(num_blocks=1, block_bytes=65536)):
        for digest in (False, True):
            assert parse_options(options, connector, medium.config(digest).options).digest == digest


def test_given_options_replace_those_of_a_measurement(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "ttl_s": 900.0,
        "timeout_s": 2.0,
        "shutdown_timeout_s": 3.0,
        "kv_secret_file": str(tmp_path / "mine"),
    }
    medium = medium_of(ConnectorChoice("redis", kv_url="redis://127.0.0.1:1", options=given))
    with medium.opened(Shape(num_blocks=1, block_bytes=65536)):
        options = medium.config(True).options
    assert given.items() <= options.items()
    assert (options["digest"], options["url"], options["tail_ttl_s"]) == (True, "redis://127.0.0.1:1", 300.0)


@pytest.mark.slow
def test_redis_gets_a_server_of_its_own_that_ends_with_the_measurement() -> None:
    status, output = bench("--connector", "redis")
    assert status == 0, output
    assert "raw: GET, recv_into" in output
    assert not [child for child in psutil.Process().children(recursive=True) if "redis" in child.name()]


@pytest.mark.parametrize("digest", ["off", pytest.param("on", marks=pytest.mark.slow)])
def test_a_redis_of_the_users_own_has_no_key_more_than_before(tmp_path: Path, digest: str) -> None:
    with redis_server(tmp_path) as server:
        server.run("SET", "mine", "1")
        status, output = bench("--connector", "redis", "--kv-url", server.url, "--digest", digest)
        assert status == 0, output
        assert server.names() == [b"mine"]


def test_without_a_redis_it_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    status, output = bench("--connector", "redis")
    assert status == 1
    assert "redis: skipped" in output
    assert "--kv-url redis://host:port/0" in output


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["--block-bytes", "100"], "64 is"),
        (["--connector", "nixl", "--kv-url", "redis://h"], "--kv-url goes with"),
        (["--digest", "maybe"], "allowed: both, on, off"),
        (["--kv-options", "["], "a map in YAML"),
        (["--kv-options", "{digest: false}"], "give digest by --digest"),
        (["--connector", "my.pages:Store", "--digest", "on"], "if my.pages:Store has such an option, give it in"),
        (
            ["--connector", "nixl", "--connector", "my.pages:Store", "--digest", "both"],
            "--digest is for shared_storage",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(args: list[str], hint: str) -> None:
    status, output = bench(*args)
    assert status == 2
    assert hint in " ".join(output.split())


def test_help_teaches() -> None:
    result = CliRunner().invoke(main, ["bench", "transfer", "--help"])
    assert result.output.count("tandem bench transfer") >= 5


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_whatever_ends_it_leaves_no_process_and_ctrl_c_no_file_either(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "tandem.cli", "bench", "transfer", "--connector", "redis", *SMALL]
    process = subprocess.Popen(
        [*command, "--rounds", "1000", "--digest", "off"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        # STEP wait until server and holder are there, and rounds pass
        parent = psutil.Process(process.pid)
        wait_until(lambda: len(parent.children()) >= 2, within_s=90)
        [its_redis] = [child for child in parent.children() if "redis" in child.name()]
        [listening] = [one for one in its_redis.net_connections() if one.status == psutil.CONN_LISTEN]
        with redis.Redis(port=listening.laddr.port) as server:
            wait_until(lambda: server.info("stats")["keyspace_hits"] > 100)
        children = parent.children(recursive=True)
        # STEP end it
        process.send_signal(number)
        process.wait(60)
        gone, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
        assert len(gone) >= 2
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert not list(tmp_path.iterdir())
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("interrupted_at", [4, 2])
def test_ctrl_c_keeps_the_results_before_it_and_without_any_the_earlier_file(
    interrupted_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(medium: Medium, shape: Shape, **options: Any) -> Result:
        if shape.num_blocks == interrupted_at:
            signal.raise_signal(signal.SIGINT)
        return measure(medium, shape, **options)

    monkeypatch.setattr("tandem.bench.transfer.measure.measure", interrupted)
    file = tmp_path / "j"
    file.write_text("earlier")
    storage = ("--connector", "shared_storage", "--kv-folder", str(tmp_path), "--digest", "off")
    status, output = bench(*storage, "--blocks", "2", "--json", str(file))
    assert status == 130, output
    if interrupted_at == 4:
        assert file.read_text() == "earlier"
    else:
        written = json.loads(file.read_text())
        assert written["partial"]
        assert [result["num_blocks"] for result in written["results"]] == [4]


def test_ctrl_c_ends_it_even_where_python_drops_the_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def clear(medium: SharedStorageMedium, keys: object) -> None:
        rounds.append(keys)
        if len(rounds) == 1:
            Interrupted()

    rounds: list[object] = []
    monkeypatch.setattr(SharedStorageMedium, "clear", clear)
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)
    storage = ("--connector", "shared_storage", "--kv-folder", str(tmp_path), "--digest", "off")
    status, output = bench(*storage)
    assert (status, len(rounds)) == (130, 2), output  # the second is the cleanup
    assert "stopped" in output
    assert not list(tmp_path.iterdir())


def test_a_hangup_that_is_ignored_stays_ignored(ignored_hangup: signal.Handlers) -> None:
    with interruptible():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is ignored_hangup


def test_other_bytes_than_were_lent_are_noticed_without_any_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = TransferEndpoint.load

    def damaged(endpoint: TransferEndpoint, *args: object) -> float:
        seconds = load(endpoint, *args)  # type: ignore[arg-type]
        as_bytes(memories[0])[5] ^= 1
        return seconds

    def noted(shape: Shape) -> torch.Tensor:
        memories.append(memory(shape))
        return memories[0]

    memories: list[torch.Tensor] = []
    memory = Shape.memory
    monkeypatch.setattr(Shape, "memory", noted)
    monkeypatch.setattr(TransferEndpoint, "load", damaged)
    with pytest.raises(TransferFailed, match="the bytes read differ from the bytes offered"):
        measure(SharedStorageMedium(parent=tmp_path), Shape(2, 4096), digests=["off"], num_rounds=1, progress=print)
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_down_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    ensure_secret(tmp_path / "secret")
    options: dict[str, str | int | float | bool] = {"url": "redis://127.0.0.1:1", "digest": False}
    config = KVConnectorConfig(class_path="kv_transfer.stores.redis.connector:RedisConnector", options=options)
    shape = Shape(2, 4096)
    endpoint = TransferEndpoint(shape, config, FINGERPRINT, shape.memory())
    with pytest.raises(TransferFailed, match="store_"):
        endpoint.offer(1, 2)
    endpoint.shutdown()


@pytest.mark.parametrize("method", ["get_into", pytest.param("put", marks=pytest.mark.slow)])
def test_a_fault_of_a_users_own_store_is_shown_in_one_line_without_secrets(
    method: str, process_logs: ProcessLogs
) -> None:
    with process_logs.expected("has a fault, counted as store_lookuperror"):
        status, output = bench("--connector", FAULTY, "--kv-options", f"{{method: {method}, token: t0ps3cret}}")
    assert status == 1
    [line] = [line for line in output.splitlines() if line.startswith(FAULTY)]
    expected = r"store_lookuperror (LookupError: no bucket for ***\x1b[31m at\nhttps://***@host, sorry"
    assert line.startswith(f"{FAULTY}: failed: {expected}")
    assert line.endswith("...; run tandem doctor for details")
    assert "Traceback" not in output
    assert not logging.getLogger("kv_transfer.stores.page_io").handlers


def test_an_error_of_a_users_own_connector_is_a_failure_and_no_traceback() -> None:
    status, output = bench("--connector", FAULTY, "--kv-options", "{method: shutdown, token: none}")
    assert status == 1
    assert f"{FAULTY}: failed: LookupError: already closed; run tandem doctor" in output


def test_a_third_partys_connector_is_measured_without_a_ceiling(tmp_path: Path) -> None:
    medium = Medium(
        "kv_transfer.stores.files:SharedStorageConnector",
        options={"path": str(tmp_path), "digest": False},
    )
    result = measure(medium, Shape(2, 4096), digests=["off", "on"], num_rounds=2, progress=print)
    (figures,) = result.figures
    assert (figures.way, len(figures.all_blocks_s)) == ("connector", 2)
    assert result.share(figures) is None
    assert "digests" not in "\n".join(table(result))


def test_a_source_that_does_not_take_its_settings_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(endpoint: SourceEndpoint, message: dict[str, Any]) -> None:
        raise TransferFailed("the source process has ended")

    monkeypatch.setattr(SourceEndpoint, "_write", ended)
    before = psutil.Process().children()
    with pytest.raises(TransferFailed):
        SourceEndpoint(Shape(2, 64), KVConnectorConfig(class_path="mine:Mine"), FINGERPRINT, seed=1)
    assert psutil.Process().children() == before


def test_a_closed_standard_error_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    progress = _ProgressLine("nixl", lambda: None)
    progress.show("round 1")
    progress.clear()


def test_shares_are_ratios_of_medians() -> None:
    ours, raw = Figures("off", [0.3, 0.1, 0.2], [0.001, 0.002]), Figures("raw", [0.1, 0.2, 0.1], [0.001])
    result = Result("x", "", Shape(10, 100_000), [ours, raw], {"off": 0.8})
    assert result.share(ours) == 0.5
    assert result.gb_s(ours) == pytest.approx(0.005)
    assert ours.one_ms(0.99) == 2.0


def test_names_of_places() -> None:
    assert transport("intra-node am(tcp/lo  cma/memory)").startswith("CMA [")
    assert transport("inter-node rma(rc_mlx5/mlx5_0:1)").startswith("RDMA [")
