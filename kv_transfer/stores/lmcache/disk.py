"""Pages as files of LMCache's fs_native: the same that an `lmcache server` with that adapter reads and writes.

    <path>/v1/pages/<model>@0x00000000@0@<hash>.data                                  full blocks
    <path>/v1/transfers/<SHA-256 of transfer>/<model>@0x00000000@0@<hash>@<salt>.data tails, removed by their owner

Only the names are LMCache's. Its client is not used: it cannot cancel a read or write, reports a file that is too long
as a hit, hangs on a FIFO, and leaves a file that is there (a torn one, a link) unchanged when it should write.
LMCache's cap (`max_capacity_gb`) counts what one process has written since its start; the sweeper counts the folder.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.page.naming import PageKey
from kv_transfer.stores.files import SharedStorage
from kv_transfer.stores.lmcache.names import ObjectName


class LMCacheDisk(SharedStorage):
    """Implements kv_transfer.stores.base.BlockStore."""

    name = "lmcache"

    def _place(self, key: PageKey) -> tuple[Sequence[str], str]:
        folders = ("v1", "transfers", key.scope.hex()) if key.scope else ("v1", "pages")
        return folders, ObjectName.of(key).file_name
