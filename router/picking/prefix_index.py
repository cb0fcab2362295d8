"""Which instance is believed to have a prompt's KV: block hashes per instance, bounded, least recently used out first.

A belief, never a promise: an instance evicts without telling, and a lost block costs a recomputation, not a token. The
chain of hashes is the engine's (`engine/block_hash.py`), rooted here at the salt alone: the index compares its own
hashes with nobody else's, and the filters keep instances of another identity apart.

Every instance's blocks are closed under "the block before": `record` brings a prompt's blocks from the first one on and
touches them from the last to the first, so a block always goes before the blocks that it continues. Hence the leading
blocks that an instance has are found by bisection.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from engine.block_hash import extend_block_hashes, root_hash
from router.pools.instances import InstanceKey

Hashes = tuple[bytes, ...]
"""Of a prompt's full blocks, in order, each chained to the one before."""


class PrefixIndex:
    """At most `max_blocks` blocks over all instances together; about 200 bytes each. Belongs to one event loop."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._blocks: dict[InstanceKey, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        """Blocks remembered, all instances together."""
        return self._num_blocks

    def instances(self) -> set[InstanceKey]:
        """Those that something is remembered of."""
        return set(self._blocks)

    @staticmethod
    def hashes(prompt_token_ids: Sequence[int], block_size: int, salt: str) -> Hashes:
        """The chained hashes of the full blocks; about 1 µs a block. Prompts of unequal salt share none."""
        return PrefixIndex.extended((), prompt_token_ids, block_size, salt)

    @staticmethod
    def extended(hashes: Sequence[bytes], token_ids: Sequence[int], block_size: int, salt: str) -> Hashes:
        """The hashes of `token_ids`, which begin with the tokens of `hashes`: those are not computed again."""
        if block_size < 1:
            return ()
        chain = list(hashes)
        extend_block_hashes(chain, root_hash("", cache_salt=salt), array("q", token_ids), block_size)
        return tuple(chain)

    def num_blocks(self, key: InstanceKey, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of `hashes` the instance is believed to have."""
        blocks = self._blocks.get(key)
        if not blocks or not hashes or hashes[0] not in blocks:
            return 0
        if hashes[-1] in blocks:
            return len(hashes)
        known, unknown = 1, len(hashes)  # the first `known` are there; not the first `unknown`
        while unknown - known > 1:
            middle = (known + unknown) // 2
            if hashes[middle - 1] in blocks:
                known = middle
            else:
                unknown = middle
        return known

    def record(self, key: InstanceKey, hashes: Sequence[bytes]) -> None:
        """The instance has computed or loaded these blocks, from the first one on."""
        hashes = hashes[: self._max_blocks]
        blocks = self._blocks.setdefault(key, OrderedDict())
        num_before = len(blocks)
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        self._num_blocks += len(blocks) - num_before
        while self._num_blocks > self._max_blocks:
            largest = max(self._blocks.values(), key=len)
            largest.popitem(last=False)
            self._num_blocks -= 1

    def forget(self, key: InstanceKey) -> None:
        """The process is gone, and its KV with it. Idempotent."""
        self._num_blocks -= len(self._blocks.pop(key, ()))
