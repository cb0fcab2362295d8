"""What both places of LMCache share: names of pages, copies to and from KV memory, and how LMCache is imported.

    PageKey ─▶ ObjectName(model "tandem-v1-<fingerprint>", chunk hash = block hash, salt = scope of a tail)
                 ├─▶ ObjectKey of lmcache.v1.distributed         └─▶ <model>@0x00000000@0@<hash>[@<salt>].data, its file

All names are hex digits of hashes: no string of a user is ever in one. LMCache splits names at `@`, which none of these
contains. Pages of other engines have the models' names in place of "tandem-v1-…", so that they can share a place.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError, to_install
from kv_transfer.page.format import Buffer
from kv_transfer.page.naming import PageKey
from kv_transfer.stores.base import BadValue

_MODEL = "tandem-v1-"
_TANDEM_MODEL = re.compile(_MODEL + "[0-9a-f]{16}")
_SALT = re.compile("[0-9a-f]{64}")
_HASH_BYTES = 32
_NO_TELEMETRY = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class ObjectName:
    """The parts of an LMCache ObjectKey that differ between pages; rank and object group are 0."""

    model_name: str
    chunk_hash: bytes
    cache_salt: str = ""

    @classmethod
    def of(cls, key: PageKey) -> ObjectName:
        return cls(_MODEL + key.fingerprint[:8].hex(), key.block_hash, key.scope.hex())

    @property
    def is_valid(self) -> bool:
        """It could be the name of a page: for a server, which receives names."""
        return (
            _TANDEM_MODEL.fullmatch(self.model_name) is not None
            and len(self.chunk_hash) == _HASH_BYTES
            and (not self.cache_salt or _SALT.fullmatch(self.cache_salt) is not None)
        )

    @property
    def native_key(self) -> str:
        """The key for LMCache's native clients."""
        return f"{self.model_name}@00000000@0@{self._rest}"

    @property
    def file_name(self) -> str:
        """The file that fs_native makes of it, relative to its folder."""
        return f"{self.model_name}@0x00000000@0@{self._rest}.data"

    @property
    def _rest(self) -> str:
        return f"{self.chunk_hash.hex()}@{self.cache_salt}" if self.cache_salt else self.chunk_hash.hex()


class LMCacheStore(ABC):
    """A BlockStore whose values lie whole in a buffer before they are copied to KV memory.

    LMCache cannot cancel a task: what it was given may be written to after the deadline, so it never gets KV memory.
    """

    name = "lmcache"

    def __init__(self, *, timeout_s: float = 1.0, min_bytes_per_s: float = 50e6) -> None:
        self._timeout_s = timeout_s
        self._min_bytes_per_s = min_bytes_per_s

    @abstractmethod
    def _value(self, name: ObjectName, num_bytes: int) -> contextlib.AbstractContextManager[memoryview | None]:
        """The value, None if there is none. Raises BadValue where its length is another one."""

    @abstractmethod
    def _exists(self, name: ObjectName, num_bytes: int) -> bool:
        """Whether there is a value; it counts as used now. Raises BadValue where its length is another one."""

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        with self._value(ObjectName.of(key), sum(map(len, buffers))) as value:
            if value is None:
                return False
            offset = 0
            for index, buffer in enumerate(buffers):
                memoryview(buffer).cast("B")[:] = value[offset : offset + len(buffer)]
                offset += len(buffer)
                if index == 0:
                    check()
        return True

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        try:
            return self._exists(ObjectName.of(key), num_bytes)
        except BadValue:
            return False

    def _limit_s(self, num_bytes: int) -> float:
        return self._timeout_s + num_bytes / self._min_bytes_per_s


def import_lmcache(module: str) -> Any:
    """A module of LMCache, without telemetry and with little logging. Raises EngineError without LMCache.

    Importing it warns about the logging handler that it installs for OpenTelemetry; the warning is suppressed.
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
                f"lmcache on a disk needs LMCache 0.5.6 or later, below 0.6: {to_install('lmcache')} ({error})"
            ) from error
        raise EngineError(f"LMCache cannot be imported: {error}") from error
