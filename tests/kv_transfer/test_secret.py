"""The pages' key: made once, read by all, never seen half-written."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import EngineError
from kv_transfer.secret import ensure_secret, load_secret


def test_secret_is_made_for_its_owner_alone_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "run" / "kv.key"
    key = ensure_secret(path)
    assert len(key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_secret(path) == load_secret(path) == key
    assert [entry.name for entry in path.parent.iterdir()] == ["kv.key"]


def test_processes_that_start_at_once_get_the_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(ensure_secret, [tmp_path / "kv.key"] * 64))) == 1


def test_raw_bytes_are_a_secret_too(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(bytes(range(32)))
    assert load_secret(tmp_path / "raw") == bytes(range(32))


@pytest.mark.parametrize("content", [b"", b"abc", b"z" * 64, b"ab" * 31, bytes(33)])
def test_anything_else_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(EngineError, match="64 hex digits"):
        load_secret(tmp_path / "bad")


def test_missing_secret_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="openssl rand -hex 32"):
        load_secret(tmp_path / "none")
