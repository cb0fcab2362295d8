"""KV of one spread reaches another, byte for byte, by whole pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.kv_layout import KVLayout
from engine.partition import Parallelism
from kv_transfer.page.shards import Shard, ShardError, ShardMap, map_shards, page_offset

KV = NDArray[np.float32]
ONE = Parallelism()


def layout_of(num_layers: int, num_kv_heads: int) -> KVLayout:
    return KVLayout(num_layers, num_kv_heads, head_dim=2, block_size=3, dtype="float32")


def block_of(model: KVLayout) -> KV:
    """One block of the whole model, every number in it another one."""
    return np.arange(np.prod(model.page_shape), dtype=np.float32).reshape(model.page_shape)


def slice_of(kv: KV, side: Parallelism, rank: int) -> KV:
    """What a rank has of the whole model's KV: the oracle, by looking at layers and heads one at a time."""
    num_layers, num_heads = kv.shape[0], kv.shape[2]
    tp, pp = side.tensor_parallel_size, side.pipeline_parallel_size
    stages = [num_layers // pp] * pp
    for stage in range(num_layers % pp):
        stages[pp - 2 - stage] += 1
    layer_owner = [stage for stage, size in enumerate(stages) for _ in range(size)]
    layers = [layer for layer in range(num_layers) if layer_owner[layer] == rank // tp]
    # Rank and head as parts of one line: the rank has the heads that its part touches.
    tensor_rank = rank % tp
    heads = [head for head in range(num_heads) if head * tp < (tensor_rank + 1) * num_heads]
    heads = [head for head in heads if tensor_rank * num_heads < (head + 1) * tp]
    return kv[layers][:, :, heads]


def memory_of(kv: KV, shards: tuple[Shard, ...]) -> bytes:
    """The block of a rank that holds these."""
    return b"".join(np.ascontiguousarray(_cut(kv, shard)).tobytes() for shard in shards)


def _cut(kv: KV, shard: Shard) -> KV:
    return kv[
        shard.first_layer : shard.first_layer + shard.num_layers,
        :,
        shard.first_head : shard.first_head + shard.num_heads,
    ]


def moved(shard_map: ShardMap, model: KVLayout, memories: list[bytes], reader_rank: int) -> KV:
    """What a rank of the reader has once it has read its list, page by page, into a block of its own."""
    held = shard_map.reader[reader_rank]
    by_id = {shard.shard_id: shard for shard in held}
    memory = bytearray(sum(shard.layout(model).bytes_per_block for shard in held))
    for read in shard_map.reads[reader_rank]:
        num_bytes = by_id[read.shard_id].layout(model).bytes_per_block
        source = page_offset(shard_map.producer[read.producer_rank], read.shard_id, model)
        target = page_offset(held, read.shard_id, model)
        memory[target : target + num_bytes] = memories[read.producer_rank][source : source + num_bytes]
    first_layer, first_head = held[0].first_layer, held[0].first_head
    num_layers = held[-1].first_layer + held[-1].num_layers - first_layer
    num_heads = held[-1].first_head + held[-1].num_heads - first_head
    shape = dataclasses.replace(model, num_layers=num_layers, num_kv_heads=num_heads).page_shape
    kv = np.full(shape, -1, np.float32)
    for shard in held:
        page_shape = shard.layout(model).page_shape
        page = np.frombuffer(memory, np.float32, int(np.prod(page_shape)), page_offset(held, shard.shard_id, model))
        local = dataclasses.replace(
            shard, first_layer=shard.first_layer - first_layer, first_head=shard.first_head - first_head
        )
        _cut(kv, local)[...] = page.reshape(page_shape)
    return kv


def check(num_layers: int, num_kv_heads: int, producer: Parallelism, reader: Parallelism) -> ShardMap:
    """Moves one block and compares every rank of the reader with the oracle."""
    model = layout_of(num_layers, num_kv_heads)
    kv = block_of(model)
    shard_map = map_shards(num_layers=num_layers, num_kv_heads=num_kv_heads, producer=producer, reader=reader)
    memories = [memory_of(kv, held) for held in shard_map.producer]
    for rank, memory in enumerate(memories):  # a rank has its own KV and nothing else
        assert len(memory) == slice_of(kv, producer, rank).nbytes
    for rank in range(reader.num_ranks):
        np.testing.assert_array_equal(moved(shard_map, model, memories, rank), slice_of(kv, reader, rank))
    saved = [shard for rank in range(producer.num_ranks) for shard in shard_map.saves(rank)]
    assert sorted(saved, key=lambda shard: shard.shard_id) == list(shard_map.shards)
    return shard_map


@pytest.mark.parametrize(
    ("producer", "reader", "num_shards"),
    [
        ((2, 1), (1, 1), 2),
        ((1, 1), (2, 1), 2),
        ((4, 1), (2, 1), 4),
        ((2, 1), (4, 1), 4),
        ((4, 1), (4, 1), 4),
        ((1, 1), (1, 2), 2),
        ((1, 2), (1, 1), 2),
        ((2, 2), (4, 1), 8),
        ((1, 3), (2, 2), 8),
        ((16, 1), (1, 1), 8),
        ((2, 1), (16, 2), 16),
        ((16, 1), (32, 1), 8),
    ],
)
def test_a_block_arrives_whole_however_both_sides_are_spread(
    producer: tuple[int, int], reader: tuple[int, int], num_shards: int
) -> None:
    assert len(check(6, 8, Parallelism(*producer), Parallelism(*reader)).shards) == num_shards


@st.composite
def spreads(draw: st.DrawFn) -> tuple[int, int, Parallelism, Parallelism]:
    num_layers, num_kv_heads = draw(st.integers(1, 7)), draw(st.integers(1, 12))
    sizes = [size for size in range(1, 25) if num_kv_heads % size == 0 or size % num_kv_heads == 0]
    sides = [Parallelism(draw(st.sampled_from(sizes)), draw(st.integers(1, num_layers))) for _ in range(2)]
    return num_layers, num_kv_heads, sides[0], sides[1]


@settings(max_examples=60)
@given(spreads())
def test_any_two_spreads_that_are_possible_can_be_mapped(spread: tuple[int, int, Parallelism, Parallelism]) -> None:
    check(*spread)


def test_equal_spreads_exchange_one_page_a_rank_and_each_rank_with_its_like() -> None:
    shard_map = check(4, 8, Parallelism(4, 2), Parallelism(4, 2))
    assert [len(held) for held in shard_map.producer] == [1] * 8
    assert [[read.producer_rank for read in reads] for reads in shard_map.reads] == [[rank] for rank in range(8)]


def test_without_parallelism_the_one_page_is_todays() -> None:
    shard_map, model = check(4, 8, ONE, ONE), layout_of(4, 8)
    (shard,) = shard_map.shards
    assert shard.shard_id == 0
    assert shard.layout(model) == model
    assert shard.layout(model).digest == model.digest


def test_replicas_share_the_reading_and_the_first_of_them_alone_saves() -> None:
    # Four ranks hold each of two heads twice; eight readers want each of them four times.
    shard_map = check(1, 2, Parallelism(4), Parallelism(8))
    assert [reads[0].producer_rank for reads in shard_map.reads] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [len(shard_map.saves(rank)) for rank in range(4)] == [1, 0, 1, 0]


@settings(max_examples=40)
@given(st.lists(spreads(), min_size=2, max_size=2))
def test_id_and_layout_name_the_same_part_of_a_model_in_every_division(spread: Any) -> None:
    """Pages of different divisions meet in one store; what looks alike must be the same."""
    (num_layers, num_kv_heads, *first), (_, _, *second) = spread
    model, seen = layout_of(num_layers, num_kv_heads), {}
    for sides in (first, second, (second[0], first[1])):
        try:
            shard_map = map_shards(num_layers=num_layers, num_kv_heads=num_kv_heads, producer=sides[0], reader=sides[1])
        except ShardError:
            continue
        for shard in shard_map.shards:
            assert seen.setdefault((shard.shard_id, shard.layout(model).digest), shard) == shard


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"producer": Parallelism(3)}, "producer.tensor_parallel_size is 3, which cannot split 8 KV heads"),
        ({"reader": Parallelism(12)}, "reader.tensor_parallel_size is 12.*must divide 8 or be a multiple of it"),
        (
            {"reader": Parallelism(1, 5)},
            "reader.pipeline_parallel_size is 5, but every stage needs one of the 4 layers",
        ),
        ({"producer": Parallelism(0)}, "producer.tensor_parallel_size is 0; it must be at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
    ],
)
def test_what_cannot_be_mapped_is_rejected_by_the_name_of_the_field(fields: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"num_layers": 4, "num_kv_heads": 8, "producer": ONE, "reader": ONE}
    with pytest.raises(ShardError, match=message):
        map_shards(**sizes | fields)


def test_a_shard_that_a_rank_does_not_hold_has_no_place_in_its_block() -> None:
    shard_map = check(4, 8, Parallelism(2), ONE)
    with pytest.raises(KeyError):
        page_offset(shard_map.producer[0], shard_map.producer[1][0].shard_id, layout_of(4, 8))
