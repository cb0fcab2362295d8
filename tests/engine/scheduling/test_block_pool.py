"""The pool against a model that keeps sets: references, the order of reuse, what can be found."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.kv_cache_manager import BlockPool, KVBlock

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Tables come and go at random; the pool must agree with plain sets after every move."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[KVBlock]] = []
        self.findable: dict[bytes, int] = {}

    @rule(count=st.integers(0, 5))
    def take_a_table(self, count: int) -> None:
        if count > self.pool.num_available:
            return
        blocks = self.pool.take(count)
        assert len({block.block_id for block in blocks}) == count
        for block in blocks:
            self.findable = {key: value for key, value in self.findable.items() if value != block.block_id}
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release_a_table(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), content=st.integers(0, 6))
    def publish_a_block(self, data: st.DataObject, content: int) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        block = data.draw(st.sampled_from(table))
        block_hash = bytes([content])
        fresh = block.block_id not in self.findable.values() and block_hash not in self.findable
        self.pool.publish(block, block_hash)
        if fresh:
            self.findable[block_hash] = block.block_id

    @precondition(lambda self: self.findable)
    @rule(data=st.data())
    def share_a_found_block(self, data: st.DataObject) -> None:
        block = self.pool.find(data.draw(st.sampled_from(sorted(self.findable))))
        assert block is not None
        self.pool.touch([block])
        self.tables.append([block])

    @invariant()
    def every_block_is_free_or_referenced(self) -> None:
        references: dict[int, int] = {}
        for table in self.tables:
            for block in table:
                references[block.block_id] = references.get(block.block_id, 0) + 1
        assert all(block.ref_count == references.get(block.block_id, 0) for block in self.pool.blocks)
        assert self.pool.num_available == NUM_BLOCKS - len(references)
        assert self.pool.num_cached == sum(block_id not in references for block_id in self.findable.values())

    @invariant()
    def exactly_the_published_blocks_are_found(self) -> None:
        for block_hash, block_id in self.findable.items():
            found = self.pool.find(block_hash)
            assert found is not None
            assert found.block_id == block_id
            assert found.block_hash == block_hash


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_pool_agrees_with_plain_sets = PoolMachine.TestCase


def test_least_recently_freed_content_is_forgotten_first() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block in blocks:
        pool.publish(block, bytes([block.block_id]))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release([block])
    assert [block.block_id for block in pool.take(3)] == [1, 0, 2]


def test_blocks_without_content_are_taken_before_cached_ones() -> None:
    pool = BlockPool(2)
    cached, plain = pool.take(2)
    pool.publish(cached, b"x")
    pool.release([cached])
    pool.release([plain])
    assert pool.take(1) == [plain]
    assert pool.find(b"x") is cached


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning() -> None:
    pool = BlockPool(3)
    table = pool.take(3)
    for block in table:
        pool.publish(block, bytes([block.block_id]))
    pool.release(table)
    pool.take(1)
    assert pool.find(b"\0") is not None
    assert pool.find(b"\2") is None
