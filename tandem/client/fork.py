"""Clients and fork(): gRPC's threads end in the child, while its locks stay as they are and its connections are shared.

A client's call in the child would wait forever, or write into the parent's connection. So a client belongs to the
process that created it. Where one was open at the fork, the child's own clients would wait as well, unless gRPC has
prepared for the fork (`GRPC_ENABLE_FORK_SUPPORT=1`). After a `close` gRPC's threads end within a fraction of a second.
"""

from __future__ import annotations

import os
from weakref import WeakSet, ref

from tandem.client.errors import TandemError

_REMEDY = (
    "start the process by spawn (multiprocessing.get_context('spawn')), or close every client well before the fork, "
    "and create a client in it"
)
_open = WeakSet[object]()
_kept: list[object] = []
"""In a fork: the parent's clients and calls, since what gRPC frees it ends, in the parent's connection."""


class Owner:
    """The process that created a client, while the client is open."""

    def __init__(self, client: object) -> None:
        """`client` is what holds gRPC's objects. Raises TandemError where gRPC cannot work since a fork."""
        if _kept and not _is_prepared():
            raise TandemError(
                "FAILED_PRECONDITION",
                f"a client was open when this process was forked; gRPC does not allow it: {_REMEDY}",
            )
        self._pid = os.getpid()
        self._client = ref(client)
        _open.add(client)

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises TandemError in another process."""
        if not self.is_here:
            problem = f"the client belongs to process {self._pid}, of which this one is a fork"
            raise TandemError("FAILED_PRECONDITION", f"{problem}: {_REMEDY}")

    def closed(self) -> None:
        _open.discard(self._client())

    def keep(self, call: object) -> None:
        """In another process: a call that must not end there."""
        _kept.append(call)


def _is_prepared() -> bool:
    """As gRPC reads it."""
    return os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in ("1", "t", "true", "y", "yes")


def _keep_inherited() -> None:
    _kept.extend(_open)


os.register_at_fork(after_in_child=_keep_inherited)
