"""What a page is called in LMCache, and the one way by which LMCache is imported.

    PageKey ─▶ ObjectName(model "tandem-v1-<fingerprint>", chunk hash = block hash, salt = scope of a tail)
                 ├─▶ ObjectKey of lmcache.v1.distributed         └─▶ <model>@0x00000000@0@<hash>[@<salt>].data, its file

All is hex digits of hashes: no string of a user's is ever in a name. LMCache splits names at `@`, which none of ours
holds. Its own pages (of vLLM, of SGLang) have the models' names in place of ours, so the two can share a place.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import warnings
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from kv_transfer.store import PageKey

_MODEL = "tandem-v1-"
_OUR_MODEL = re.compile(_MODEL + "([0-9a-f]{16})")
_SALT = re.compile("[0-9a-f]{64}")
_HASH_BYTES = 32
_NO_TELEMETRY = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class ObjectName:
    """The parts of an LMCache ObjectKey that differ between our pages; rank and object group are 0."""

    model_name: str
    chunk_hash: bytes
    cache_salt: str = ""

    @classmethod
    def of(cls, key: PageKey) -> ObjectName:
        """The name of a page."""
        return cls(_MODEL + key.fingerprint[:8].hex(), key.block_hash, key.scope.hex())

    @property
    def is_ours(self) -> bool:
        """It could be the name of a page: for a server, which takes names from others."""
        return (
            _OUR_MODEL.fullmatch(self.model_name) is not None
            and len(self.chunk_hash) == _HASH_BYTES
            and (not self.cache_salt or _SALT.fullmatch(self.cache_salt) is not None)
        )

    @property
    def native_key(self) -> str:
        """As LMCache's native clients want it."""
        return f"{self.model_name}@00000000@0@{self._rest}"

    @property
    def file_name(self) -> str:
        """The file that fs_native makes of it, relative to its folder."""
        return f"{self.model_name}@0x00000000@0@{self._rest}.data"

    @property
    def _rest(self) -> str:
        return f"{self.chunk_hash.hex()}@{self.cache_salt}" if self.cache_salt else self.chunk_hash.hex()


def page_key(model_name: str, kv_rank: int, object_group_id: int, chunk_hash: bytes, cache_salt: str) -> PageKey:
    """A PageKey for any ObjectKey: of ours, the one that it was made of; of others', one of hashes of its parts."""
    ours = _OUR_MODEL.fullmatch(model_name)
    if ours is not None and (kv_rank, object_group_id) == (0, 0) and (not cache_salt or _SALT.fullmatch(cache_salt)):
        return PageKey(bytes.fromhex(ours[1]), chunk_hash, bytes.fromhex(cache_salt))
    space = f"{model_name}@{kv_rank:x}@{object_group_id:x}@{cache_salt}".encode()
    return PageKey(hashlib.sha256(space).digest(), chunk_hash)


def import_lmcache(module: str) -> Any:
    """A module of LMCache's, or of ours over it: no telemetry, few words. Raises EngineError without LMCache.

    The logger that it would hang into ours, for OpenTelemetry, warns of itself; that is nobody's concern here.
    """
    os.environ.update(_NO_TELEMETRY)
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] == "lmcache":
            raise EngineError(
                "this backend of the lmcache connector needs LMCache 0.5.6 or later, below 0.6:"
                f" pip install '.[lmcache]' ({error})"
            ) from error
        raise EngineError(f"LMCache cannot be imported: {error}") from error
