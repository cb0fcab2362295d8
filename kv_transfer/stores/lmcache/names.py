"""Names of pages in LMCache.

    PageKey ─▶ ObjectName(model "tandem-v1-<space>", chunk hash = block hash, salt = scope of a tail)
                 ├─▶ ObjectKey of lmcache.v1.distributed         └─▶ <model>@0x00000000@0@<hash>[@<salt>].data, its file

All names are hex digits of hashes: no string of a user is ever in one. LMCache splits names at `@`, which none of these
contains. Pages of other engines have the models' names in place of "tandem-v1-…", so that they can share a place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kv_transfer.page.naming import PageKey

_MODEL = "tandem-v1-"
_TANDEM_MODEL = re.compile(_MODEL + "[0-9a-f]{16}")
_SALT = re.compile("[0-9a-f]{64}")
_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class ObjectName:
    """The parts of an LMCache ObjectKey that differ between pages; rank and object group are 0."""

    model_name: str
    chunk_hash: bytes
    cache_salt: str = ""

    @classmethod
    def of(cls, key: PageKey) -> ObjectName:
        return cls(_MODEL + key.space[:8].hex(), key.block_hash, key.scope.hex())

    @property
    def is_valid(self) -> bool:
        """It could be the name of a page: for a server, which receives names."""
        return (
            _TANDEM_MODEL.fullmatch(self.model_name) is not None
            and len(self.chunk_hash) == _HASH_BYTES
            and (not self.cache_salt or _SALT.fullmatch(self.cache_salt) is not None)
        )

    @property
    def file_name(self) -> str:
        """The file that fs_native makes of it, relative to its folder."""
        salt = f"@{self.cache_salt}" if self.cache_salt else ""
        return f"{self.model_name}@0x00000000@0@{self.chunk_hash.hex()}{salt}.data"
