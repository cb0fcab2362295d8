"""Identity of the model that an engine computes with, which must be equal for two instances to exchange KV.

It consists of the engine's version and digests of all that shapes the computation (weights, config, tokenizer, dtype,
page layout); the fingerprint is the digest of them all and part of every block hash and page. Free of torch.

Digests of weights are cached per user by real path, size, mtime, ctime and inode, so that a start does not read 140
GB again. A cache that is missing, damaged or not trusted is ignored, and the digests are computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from engine.adapter_config import CONFIG as ADAPTER_CONFIG
from engine.adapter_config import adapters_digest
from engine.config import LoadFormat
from engine.errors import CheckpointChanged, EngineError, shown
from engine.kv_layout import LAYOUT_VERSION, PageLayout

COMPUTATION_VERSION = 2
"""Of what this engine makes of a checkpoint: KV, logits, sampled ids. Raised by each change of them beyond rounding, so
that stores and peers of a release that computed something else are not read, and no answer continues there."""
ENGINE = f"tandem/{COMPUTATION_VERSION}"

# Keys of config.json that do not change the computation. dtype is a field of the identity.
_IGNORED_KEYS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "dtype",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_CACHED = 4096
_MAX_CACHE_BYTES = 4 << 20
_SETTLED_NS = 2_000_000_000
"""A file changed more recently than this may change again within one tick of its ctime: its digest is not cached."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for KV to be exchanged; the fields of the proto's Identity. Digests are SHA-256 in hex."""

    engine: str = ENGINE
    """This engine with its COMPUTATION_VERSION, and transformers' version where that computes; or another's name,
    version and whatever else decides its numerics."""
    weights_digest: str
    config_digest: str
    tokenizer_digest: str
    dtype: str
    """Of weights and KV, as bfloat16; with weights of codes bfloat16+int8."""
    block_size: int
    layout_version: int
    layout_digest: str
    fingerprint: str = ""
    """Digest of all the above; computed when not given."""

    def __post_init__(self) -> None:
        if not self.fingerprint:
            parts = (str(getattr(self, name)).encode() for name in self.__struct_fields__ if name != "fingerprint")
            msgspec.structs.force_setattr(self, "fingerprint", _digest_parts(parts))

    def with_adapters(self, folders: Mapping[str, str]) -> ModelIdentity:
        """Of the same model with LoRA adapters, folders by name. Their names and tensors are part of its weights:
        a request gives the name, and its KV depends on the tensors."""
        if not folders:
            return self
        digest = _digest_parts((self.weights_digest.encode(), adapters_digest(folders).encode()))
        return msgspec.structs.replace(self, weights_digest=digest, fingerprint="")

    def mismatches(self, other: ModelIdentity) -> list[tuple[str, str, str]]:
        """(field, mine, theirs) for every field that differs."""
        pairs = ((name, str(getattr(self, name)), str(getattr(other, name))) for name in self.__struct_fields__)
        return [(name, mine, theirs) for name, mine, theirs in pairs if mine != theirs]


def compute_identity(
    folder: str | Path,
    *,
    dtype: str,
    layout: PageLayout,
    load_format: LoadFormat,
    seed: int,
    engine: str = ENGINE,
    backend: str = "native",
    quantization: str = "none",
) -> ModelIdentity:
    """The identity of the checkpoint in `folder`. `seed` matters for dummy weights alone. transformers is part of
    `engine` where it is the `backend`, with its version, on which the numerics depend.

    Reads every weight file without a cached digest, at about 2 GB/s. Raises EngineError naming what is missing.
    """
    folder = Path(folder)
    weights = _digest_parts((b"dummy", str(seed).encode())) if load_format == "dummy" else weights_digest(folder)
    return ModelIdentity(
        engine=engine if backend == "native" else f"{engine}, {backend} {metadata.version(backend)}",
        weights_digest=weights,
        config_digest=config_digest(folder),
        tokenizer_digest=tokenizer_digest(folder),
        dtype=dtype if quantization == "none" else f"{dtype}+{quantization}",
        block_size=layout.block_size,
        layout_version=LAYOUT_VERSION,
        layout_digest=layout.digest.hex(),
    )


def weights_digest(folder: Path) -> str:
    """SHA-256 over names and digests of the folder's *.safetensors files."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise EngineError(f"no *.safetensors in {folder}; load_format 'dummy' needs none")
    cached = _read_cache()
    found: dict[str, str] = {}
    parts: list[bytes] = []
    for path in paths:
        key = _cache_key(path)
        digest = cached.get(key) or _file_digest(path)
        if key == _cache_key(path):  # unchanged while it was read
            found[key] = digest
        parts += [path.name.encode(), digest.encode()]
    if any(key not in cached for key in found):
        _write_cache({**cached, **found})
    return _digest_parts(parts)


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What tells whether a checkpoint's weights and config are still those that an engine began to load."""

    folder: Path
    files: Mapping[str, str | bytes]

    @classmethod
    def of(cls, folder: str | Path) -> CheckpointState:
        """As it is now. A file that cannot be read is left out: the load has an error for it."""
        folder, files = Path(folder), dict[str, str | bytes]()
        for path in folder.glob("*.safetensors"):
            with contextlib.suppress(OSError):
                files[path.name] = _cache_key(path)
        for name in ("config.json", ADAPTER_CONFIG):
            with contextlib.suppress(OSError):
                files[name] = (folder / name).read_bytes()
        return cls(folder, files)

    def check(self) -> None:
        """Raises CheckpointChanged: the identity of the files is not that of what was loaded."""
        now = CheckpointState.of(self.folder).files
        changed = sorted(name for name in {*self.files, *now} if self.files.get(name) != now.get(name))
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise CheckpointChanged(
                f"{shown(changed[0])}{more} of {self.folder} changed while the engine loaded it; start it again"
            )


def config_digest(folder: Path) -> str:
    """SHA-256 over the canonical JSON of the keys of config.json that shape the computation."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read as JSON: {error}") from error
    canonical = json.dumps(_without_ignored(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the tokenizer files that exist."""
    parts: list[bytes] = []
    for name in _TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            parts += [name.encode(), path.read_bytes()]
    return _digest_parts(parts)


def _without_ignored(value: object) -> object:
    """`value` without the ignored keys, at every depth."""
    if isinstance(value, dict):
        return {key: _without_ignored(item) for key, item in value.items() if key not in _IGNORED_KEYS}
    if isinstance(value, list):
        return [_without_ignored(item) for item in value]
    return value


def _digest_parts(parts: Iterable[bytes]) -> str:
    """SHA-256 over length-prefixed parts, so that no two lists of parts collide."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# The cache of weight digests: {"<real path>|<size>|<mtime_ns>|<inode>|<ctime_ns>": "<sha256 hex>"}


def _cache_key(path: Path) -> str:
    real = path.resolve()
    status = real.stat()
    # `cp -p` over a file keeps all but its ctime, which no program can set.
    return f"{real}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}|{status.st_ctime_ns}"


def _ctime_ns(key: str) -> int:
    """The ctime in a key; a malformed key counts as too recent to be kept."""
    parts = key.rsplit("|", 4)
    return int(parts[4]) if len(parts) == 5 and parts[4].isdecimal() else time.time_ns()


def _cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tandem" / "weight_digests.json"


def _read_cache() -> dict[str, str]:
    """Empty if the file is missing, damaged, or writable by others."""
    try:
        descriptor = os.open(_cache_path(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            trusted = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
            if not trusted or status.st_size > _MAX_CACHE_BYTES:
                return {}
            entries = json.loads(file.read(_MAX_CACHE_BYTES))
    except (OSError, ValueError, RecursionError, RuntimeError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: value for key, value in entries.items() if isinstance(value, str) and _HEX_DIGEST.fullmatch(value)}


def _write_cache(entries: dict[str, str]) -> None:
    """Replaces the file atomically. A failure is ignored: the next start reads the weights again."""
    now_ns = time.time_ns()
    settled = {key: value for key, value in entries.items() if now_ns - _ctime_ns(key) > _SETTLED_NS}
    newest = dict(list(settled.items())[-_MAX_CACHED:])
    with contextlib.suppress(OSError, RuntimeError):
        path = _cache_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(newest, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
