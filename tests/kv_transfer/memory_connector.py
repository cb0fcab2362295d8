"""A connector over a store in this process that several cores find by its name, for lists of connectors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kv_transfer.stores.base import BlockStore
from kv_transfer.stores.connector import StoreConnector, StoreOptions

STORES: dict[str, BlockStore] = {}


class NamedStoreConnector(StoreConnector):
    """`store` names one of STORES."""

    def __init__(
        self, *, wake: Callable[[], None], store: str, clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> None:
        super().__init__(STORES[store], StoreOptions(digest=False, **options), wake=wake, clock=clock)
