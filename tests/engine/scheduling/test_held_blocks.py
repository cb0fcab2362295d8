"""Blocks that the connector still needs, and what they leave to requests."""

from __future__ import annotations

import pytest

from engine.scheduling.kv_cache_manager import HeldBlocks, KVCacheManager

NUM_BLOCKS, BLOCK_SIZE = 16, 4


def holding(num_blocks: int, window: int | None = None) -> HeldBlocks:
    """Blocks are held for a finished request "r"."""
    kv = KVCacheManager(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        max_num_seqs=2,
        enable_prefix_caching=True,
        window=window,
    )
    held = HeldBlocks(kv)
    held["r"] = kv.pool.take(num_blocks)
    return held


def test_blocks_that_are_not_needed_any_more_are_free() -> None:
    held = holding(5)
    pool, needed = held._kv.pool, held["r"][1:3]
    for _ in range(2):  # what is reported again changes nothing
        held.narrow("r", {block.block_id for block in needed})
        assert (held["r"], pool.num_available) == (needed, NUM_BLOCKS - 2)
    held.narrow("unknown", {0})
    held.free("r")
    held.free("r")
    assert (dict(held), held.abandoned, pool.num_available) == ({}, set(), NUM_BLOCKS)


def test_abandoned_io_takes_nothing_from_the_share_of_transfers() -> None:
    held, two_blocks = holding(4), 2 * BLOCK_SIZE
    assert not held.may_hold(two_blocks, (), 0.25)
    held.narrow("r", {block.block_id for block in held["r"]})
    assert held.may_hold(two_blocks, (), 0.25)
    held.abandon("late", held._kv.pool.take(3))
    assert held.may_hold(two_blocks, (), 0.25)
    assert len(held.ids) == 7


@pytest.mark.parametrize("window", [None, 2 * BLOCK_SIZE])
def test_room_is_what_abandoned_io_leaves(window: int | None) -> None:
    held, most = holding(3, window), NUM_BLOCKS - 3
    assert held.leave_room(NUM_BLOCKS * BLOCK_SIZE, is_whole=True), "a transfer ends"
    held.narrow("r", {block.block_id for block in held["r"]})
    assert held.leave_room(most * BLOCK_SIZE, is_whole=True)
    assert not held.leave_room(most * BLOCK_SIZE + 1, is_whole=True)
    assert held.leave_room(NUM_BLOCKS * BLOCK_SIZE, is_whole=False) == (window is not None)
