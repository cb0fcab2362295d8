"""A connector of a user's own whose store has a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_transfer.page.format import Buffer, PageKey
from kv_transfer.stores.connector import StoreConnector, StoreOptions

FAULTY = f"{__name__}:FaultyConnector"


class FaultyStore:
    """Implements kv_transfer.stores.base.BlockStore. The method `method` raises an error that the seam does not name,
    with a secret, a control character and a second line."""

    name = "faulty"

    def __init__(self, method: str, token: str) -> None:
        self._method = method
        self._token = token

    def _enter(self, method: str) -> None:
        if method == self._method:
            raise LookupError(f"no bucket for {self._token}\x1b[31m at\nhttps://me:pw@host" + ", sorry" * 200)

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        self._enter("put")

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        self._enter("get_into")
        return False

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        return False

    def delete(self, key: PageKey) -> None:
        pass

    def close(self) -> None:
        pass


class FaultyConnector(StoreConnector):
    def __init__(self, *, wake: Callable[[], None], method: str, token: str) -> None:
        super().__init__(FaultyStore(method, token), StoreOptions(digest=False, num_io_threads=1), wake=wake)
        if method == "shutdown":
            self.name = "faulty at its end"

    def shutdown(self) -> None:
        super().shutdown()
        if self.name != FaultyStore.name:
            raise LookupError("already closed")
