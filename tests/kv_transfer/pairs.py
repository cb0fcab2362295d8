"""A core that saves and one that loads, over one store: what the connector's tests begin with."""

from __future__ import annotations

from engine.request import Request
from kv_transfer.store import BlockStore
from tests.kv_transfer.harness import BLOCK_SIZE, Core, make_request

PROMPT = list(range(100, 100 + 5 * BLOCK_SIZE + 3))  # five full blocks and a tail of three tokens
NUM_FULL, NUM_PAGES = 5, 6


def pair(store: BlockStore) -> tuple[Core, Core]:
    """The one that saves, and the one that loads."""
    return Core(store), Core(store)


def reader_of(prompt: list[int] = PROMPT, **names: str) -> Request:
    return make_request(prompt, remote=True, **names)


def writer_of(prompt: list[int] = PROMPT, **names: str) -> Request:
    return make_request(prompt, hold=True, **names)
