"""Properties that the packages of both roles share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import decode_service
import prefill_service
from decode_service.__main__ import main as decode_main
from decode_service.service import DecodeSettings
from prefill_service.__main__ import main as prefill_main
from prefill_service.service import PrefillSettings

MAINS = {"prefill": prefill_main, "decode": decode_main}


def test_both_roles_have_the_same_files() -> None:
    """So that `diff -r prefill_service decode_service` is the definition of disaggregation."""
    names = [
        sorted(path.name for path in Path(package.__path__[0]).glob("*.py"))
        for package in (prefill_service, decode_service)
    ]
    assert names[0] == names[1] == ["__init__.py", "__main__.py", "service.py"]


def test_both_roles_have_the_same_settings() -> None:
    assert list(PrefillSettings.model_fields) == list(DecodeSettings.model_fields)
    engines = PrefillSettings.model_fields["engine"].default, DecodeSettings.model_fields["engine"].default
    assert list(type(engines[0]).model_fields) == list(type(engines[1]).model_fields)
    assert engines[0].max_num_batched_tokens > engines[1].max_num_batched_tokens
    assert engines[0].max_num_seqs < engines[1].max_num_seqs


@pytest.mark.parametrize("role", MAINS)
def test_help_names_every_setting_with_its_default_and_variable(role: str) -> None:
    shown = CliRunner().invoke(MAINS[role], ["--help"])
    assert shown.exit_code == 0
    text = " ".join(shown.output.split())
    for flag in ("--model", "--listen", "--advertise", "--kv-folder", "--kv-secret-file", "--lease-s", "--ready-file"):
        assert flag in text
    assert "TANDEM_ENGINE__MAX_NUM_BATCHED_TOKENS" in text
    assert f"default: {2048 if role == 'prefill' else 512};" in text
    assert "SIGTERM drains" in text
    assert "3 stopped and calls or KV in use were cut off" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "model.folder is required"),
        (["--model", "m", "--kv-connector", "carrier pigeon"], "must be one of"),
        (["--model", "m", "--listen", "nonsense"], "must be host:port"),
        (["--model", "m", "--block-sise", "8"], "--block-size"),
    ],
)
def test_a_wrong_setting_is_named(flags: list[str], message: str) -> None:
    shown = CliRunner().invoke(prefill_main, flags)
    assert shown.exit_code == 2
    assert message in shown.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "nowhere"], "model.folder: nowhere has no config.json"),
        (["--model", "m"], "transfer.folder (--kv-folder) is required"),
    ],
)
def test_what_cannot_start_says_why_at_once(tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    argv = [sys.executable, "-m", "prefill_service", *flags]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert ended.returncode == 2
    assert message in ended.stderr
