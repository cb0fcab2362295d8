"""The doctor names what is wrong and what to do, and does not break when something it looks at does."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tandem import checks
from tandem.checks import Finding
from tandem.cli import main
from tandem.commands import doctor
from tandem.store_check import move_blocks


def test_a_machine_that_runs_these_tests_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_EXTRAS", ())
    findings = [
        *checks.python(), *checks.packages(), *checks.machine(), *checks.kernel(), *checks.extras(),
    ]  # fmt: skip
    assert {finding.verdict for finding in findings} <= {"ok", "warn"}
    assert {finding.subject for finding in findings} >= {"python", "packages", "cores", "memory", "death signal"}
    assert all(finding.remedy for finding in findings if finding.verdict != "ok")


def test_a_missing_extra_is_a_warning_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = {finding.subject: finding for finding in checks.extras()}
    assert {finding.verdict for finding in found.values()} == {"warn"}
    assert found["nixl"].remedy == "pip install 'tandem-llm[nixl]'"


def test_a_missing_package_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_PACKAGES", ("click", "no-such-package"))
    first, _ = checks.packages()
    assert (first.verdict, first.remedy) == ("fail", "make install")
    assert "no-such-package" in first.what


def test_little_disk_and_shared_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1 << 20))
    found = {finding.subject: finding for finding in checks.kernel()}
    assert found["/dev/shm"].verdict == found["temporary files"].verdict == "warn"


def test_a_model_that_the_engine_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["CarrierPigeonForCausalLM"], "model_type": "pigeon"})
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    [finding] = checks.model(str(tmp_path))()
    assert finding.verdict == "fail"
    assert "igeon" in finding.what


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    [finding] = checks.model(str(tmp_path))()
    assert "no *.safetensors" in finding.what


def test_blocks_move_through_the_store_and_are_verified() -> None:
    speed = move_blocks(num_blocks=4, block_bytes=1 << 16)
    assert speed.write_gb_s > 0
    assert speed.read_gb_s > 0


def test_a_check_that_breaks_is_a_line_of_the_report_and_the_exit_status_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Iterator[Finding]:
        raise ImportError("libfoo.so is not there")
        yield

    monkeypatch.setattr(doctor, "kernel", broken)
    result = CliRunner().invoke(main, ["doctor", "--quick"])
    assert result.exit_code == 1
    assert "fail broken" in result.output.replace("  ", " ")
    assert "libfoo.so is not there" in result.output
    assert "running stack" in result.output, "the checks after it were made"
