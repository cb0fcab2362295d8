"""Equal models have equal identities in any folder; every change of the computation changes the identity."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from engine import identity
from engine.errors import EngineError
from engine.identity import COMPUTATION_VERSION, ENGINE, ModelIdentity, compute_identity
from engine.kv_layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="float32")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a user who has none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "_SETTLED_NS", 0)  # the tests' files are all new
    return tmp_path / "cache" / "tandem" / "weight_digests.json"


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(b"weights one")
    (folder / "model-2.safetensors").write_bytes(b"weights two")
    config = {
        "hidden_size": 64,
        "text_config": {"rope_theta": 1e4, "transformers_version": "5.0"},
        "_name_or_path": "a",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def identify(folder: Path, **changes: object) -> ModelIdentity:
    arguments = {"dtype": "float32", "layout": LAYOUT, "load_format": "auto", "seed": 0, **changes}
    return compute_identity(folder, **arguments)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2))


def test_copies_have_equal_identities(folder: Path, tmp_path: Path) -> None:
    assert identify(folder) == identify(make_checkpoint(tmp_path / "copy"))
    assert identify(folder).mismatches(identify(folder)) == []


def test_another_backend_is_another_identity(folder: Path) -> None:
    mismatches = identify(folder).mismatches(identify(folder, backend="transformers"))
    assert mismatches[0] == ("engine", ENGINE, f"{ENGINE}, transformers {metadata.version('transformers')}")
    assert {name for name, _, _ in mismatches} == {"engine", "fingerprint"}


def test_the_version_of_the_computation_is_part_of_the_identity(folder: Path) -> None:
    """Of both backends: transformers' attention, KV and sampler are this engine's."""
    assert identify(folder).engine == f"tandem/{COMPUTATION_VERSION}"
    assert identify(folder, backend="transformers").engine.startswith(f"tandem/{COMPUTATION_VERSION}, ")
    later = identify(folder, engine=f"tandem/{COMPUTATION_VERSION + 1}")
    assert {name for name, _, _ in identify(folder).mismatches(later)} == {"engine", "fingerprint"}


def test_another_version_of_the_backend_is_another_identity(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identify(folder, backend="transformers")
    monkeypatch.setattr(metadata, "version", lambda name: "0.1")
    assert {name for name, _, _ in before.mismatches(identify(folder, backend="transformers"))} == {
        "engine",
        "fingerprint",
    }


def test_quantised_weights_are_another_identity(folder: Path) -> None:
    plain, of_8_bits, of_4_bits = (identify(folder, quantization=method) for method in ("none", "int8", "int4"))
    assert plain == identify(folder)
    assert plain.mismatches(of_8_bits)[0] == ("dtype", "float32", "float32+int8")
    assert {name for name, _, _ in of_8_bits.mismatches(of_4_bits)} == {"dtype", "fingerprint"}


def test_names_and_dates_in_the_config_do_not_count(folder: Path) -> None:
    before = identify(folder)
    edit_config(folder, _name_or_path="b", transformers_version="5.23.0", torch_dtype="bfloat16", use_cache=False)
    edit_config(folder, text_config={"transformers_version": "6.0", "rope_theta": 1e4})
    assert identify(folder) == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda folder: edit_config(folder, hidden_size=65), "config_digest"),
        (lambda folder: edit_config(folder, text_config={"rope_theta": 1e6}), "config_digest"),
        (lambda folder: (folder / "model-2.safetensors").write_bytes(b"weights tow"), "weights_digest"),
        (lambda folder: (folder / "model-3.safetensors").write_bytes(b""), "weights_digest"),
        (lambda folder: (folder / "tokenizer.json").write_text("{ }"), "tokenizer_digest"),
        (lambda folder: (folder / "merges.txt").write_text(""), "tokenizer_digest"),
    ],
)
def test_what_shapes_the_computation_counts(folder: Path, change: Callable[[Path], object], field: str) -> None:
    before = identify(folder)
    change(folder)
    after = identify(folder)
    assert [name for name, _, _ in before.mismatches(after)] == [field, "fingerprint"]


def test_mismatch_names_the_field_and_both_values(folder: Path) -> None:
    other = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=32, dtype="float32")
    mismatches = identify(folder).mismatches(identify(folder, layout=other))
    assert mismatches[0] == ("block_size", "16", "32")
    assert {name for name, _, _ in mismatches} == {"block_size", "layout_digest", "fingerprint"}


def test_dummy_weights_are_their_seed(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    dummy = [identify(folder, load_format="dummy", seed=seed).weights_digest for seed in (0, 0, 1)]
    assert dummy[0] == dummy[1] != dummy[2]
    with pytest.raises(EngineError, match=r"no \*\.safetensors"):
        identify(folder)


def test_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(EngineError, match=r"config\.json"):
        identify(folder)


# What is remembered


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reads: list[str] = []
    real = identity._file_digest

    def counted(path: Path) -> str:
        reads.append(path.name)
        return real(path)

    monkeypatch.setattr(identity, "_file_digest", counted)
    return reads


def test_weights_are_read_once(folder: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = count_reads(monkeypatch)
    first = identify(folder)
    assert reads == ["model-1.safetensors", "model-2.safetensors"]
    assert stat.S_IMODE(memory.stat().st_mode) == 0o600
    assert identify(folder) == first
    assert len(reads) == 2
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert identify(link) == first
    assert len(reads) == 2, "by real path"


def test_changed_file_of_the_same_size_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identify(folder)
    reads = count_reads(monkeypatch)
    path = folder / "model-1.safetensors"
    path.write_bytes(b"weights 1ne")
    os.utime(path, (1e9 + 1, 1e9 + 1))
    assert identify(folder) != before
    assert reads == ["model-1.safetensors"]


def test_file_that_keeps_its_size_its_inode_and_its_date_is_read_again(folder: Path, tmp_path: Path) -> None:
    path, other = folder / "model-1.safetensors", tmp_path / "other"
    other.write_bytes(b"weights 1ne")
    shutil.copystat(path, other)
    old, before = path.stat(), identify(folder)
    while path.stat().st_ctime_ns == old.st_ctime_ns:  # the clock of files may tick each 10 ms only
        shutil.copy2(other, path)  # as `cp -p` does
    new = path.stat()
    assert (new.st_size, new.st_ino, new.st_mtime_ns) == (old.st_size, old.st_ino, old.st_mtime_ns)
    assert identify(folder) != before


def test_file_that_was_changed_a_moment_ago_is_not_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(folder / "model-1.safetensors", (1e9, 1e9))  # the date says nothing: `cp -p` sets it
    monkeypatch.setattr(identity, "_SETTLED_NS", 3600 * 10**9)
    reads = count_reads(monkeypatch)
    identify(folder)
    identify(folder)
    assert reads == 2 * ["model-1.safetensors", "model-2.safetensors"]


def _garbage(memory: Path) -> None:
    memory.write_bytes(b"\x80\x00 not JSON")


def _wrong_shape(memory: Path) -> None:
    memory.write_text("[1, 2]")


def _wrong_values(memory: Path) -> None:
    memory.write_text(json.dumps(dict.fromkeys(json.loads(memory.read_text()), 5)))


def _truncated(memory: Path) -> None:
    os.truncate(memory, 20)


def _writable_by_all(memory: Path) -> None:
    memory.write_text(json.dumps(dict.fromkeys(json.loads(memory.read_text()), "f" * 64)))
    memory.chmod(0o666)


def _fifo(memory: Path) -> None:
    memory.unlink()
    os.mkfifo(memory)


def _folder_instead(memory: Path) -> None:
    memory.unlink()
    memory.mkdir()


@pytest.mark.parametrize(
    "damage", [_garbage, _wrong_shape, _wrong_values, _truncated, _writable_by_all, _fifo, _folder_instead]
)
def test_damaged_memory_costs_a_recompute_and_nothing_else(
    folder: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    before = identify(folder)
    damage(memory)
    reads = count_reads(monkeypatch)
    assert identify(folder) == before
    assert len(reads) == 2


def test_without_a_home_there_is_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert identify(folder) == identify(folder)
