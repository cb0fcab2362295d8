"""From a name to a checkpoint, with an answer for every wrong one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from engine.checkpoint import ModelNotFound, resolve, resolve_adapter

SHARD = "model-00001-of-00002.safetensors"
TEMPLATE = "additional_chat_templates/tool_use.jinja"
IN_REPOSITORY = [
    "config.json", SHARD, TEMPLATE, "adapter/adapter_model.safetensors", "advanced/config.json",
    "consolidated.safetensors", "original/params.json", "pytorch_model.bin",
]  # fmt: skip


def test_a_local_folder_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


def test_a_folder_without_a_checkpoint_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """Links without a target, since root may read all others."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").symlink_to(tmp_path / "gone")
    assert resolve(str(tmp_path)) == tmp_path
    (weights := tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelNotFound, match=f"this user cannot read {weights}; .* chmod -R a.rX {tmp_path}"):
        resolve(str(tmp_path))


def test_a_name_that_is_neither_folder_nor_hub_id_lists_valid_forms() -> None:
    for name in ("./nowhere", "nowhere", "/no/such/folder", "~no_such_user/model"):
        with pytest.raises(ModelNotFound, match="Qwen/Qwen3-0"):
            resolve(name)


def test_a_hub_id_without_the_hub_package_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match=r"pip install .* -e '\.\[hub\]'"):
        resolve("owner/name")


def test_a_hub_id_fetches_safetensors_and_never_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    requested: list[Any] = []

    class Hub:
        @staticmethod
        def snapshot_download(
            name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
        ) -> str:
            requested.append((name, revision, allow_patterns))
            found = filter_repo_objects(IN_REPOSITORY, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
            assert list(found) == ["config.json", SHARD, TEMPLATE]
            return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    assert resolve("owner/name", "v1") == tmp_path
    [(name, revision, patterns)] = requested
    assert (name, revision) == ("owner/name", "v1")
    assert "*.safetensors" in patterns
    assert not {"*.bin", "*.pt", "*"} & set(patterns)


def test_an_error_of_the_hub_without_a_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        @staticmethod
        def snapshot_download(*_: object, **__: object) -> None:
            raise TimeoutError

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    with pytest.raises(ModelNotFound, match="from the Hugging Face hub: TimeoutError; check the name"):
        resolve("owner/name")


def test_an_adapter_is_a_folder_or_fetched_without_anything_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = ["README.md", "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "optimizer.pt"]

    class Hub:
        @staticmethod
        def snapshot_download(name: str, *, allow_patterns: list[str], **others: Any) -> str:
            del others
            assert name == "owner/sql"
            assert list(filter_repo_objects(files, allow_patterns=allow_patterns)) == files[1:3]
            return str(tmp_path / "fetched")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    assert resolve_adapter("owner/sql") == tmp_path / "fetched"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/sql").mkdir(parents=True)
    assert resolve_adapter("owner/sql") == tmp_path / "owner/sql"
    assert resolve_adapter("./absent") == tmp_path / "absent"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match="adapter 'owner/other': there is no such folder here, and fetching it"):
        resolve_adapter("owner/other")
