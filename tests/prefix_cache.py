"""What tests do to a prefix cache."""

from __future__ import annotations

from engine.scheduling.kv_cache_manager import BlockPool


def forget_all(pool: BlockPool) -> None:
    """Empty it. Blocks in use stay valid but are no longer found."""
    for block in list(pool._by_hash.values()):
        pool._forget(block)
    pool.num_cached = 0
