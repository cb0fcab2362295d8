"""How the KV of a model on several ranks maps onto pages, when producer and reader are partitioned differently.

    rank of the producer ─holds▶ canonical shards ◀holds─ rank of the reader        reads: (producer rank, shard) …

A tensor-parallel rank holds some of the KV heads of some layers, a pipeline stage all heads of its own layers: every
rank holds a rectangle of (layer, head) cells. The *canonical shards* are the coarsest rectangles that cut along every
border of both sides, so each is held whole by some rank of either side, and a reader loads a list of whole shards.

A page is one block of one canonical shard, `[num_layers, 2, num_heads, block_size, head_dim]` of that shard,
described by a `KVLayout` of its own (`Shard.layout`), whose digest and size go into `PageSpec.layout_digest` and
`.payload_bytes`; `Shard.shard_id` is `PageSpec.shard`. The id is the index of the shard's first cell in the whole
model's grid, so id and layout together identify the rectangle under any partition: a page of another partition is a
counted miss, never another rank's KV. In a rank's memory a block is the pages of its shards one after another, by id
(`page_offset`), so every page is one contiguous span. Where both sides are partitioned alike a rank has one shard, and
without parallelism there is one in all, with id 0: the pages of a single rank, byte for byte. A producer that writes to
a store cuts for readers of one partition; others find nothing.

No product code uses this yet: the ranks of an engine share one KV memory, whose pages are the whole model's
(docs/decisions/0011-ranks-share-host-memory.md). It is for ranks with a memory each, as on several GPUs. Pure; free
of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from engine.kv_layout import KVLayout
from engine.partition import Parallelism


class ShardError(ValueError):
    """KV cannot be mapped between producer and reader. The message names the side, the field and what is allowed."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of the model's grid: `num_layers` layers from `first_layer` on, of `num_heads` KV heads from
    `first_head` on."""

    shard_id: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int

    def layout(self, model: KVLayout) -> KVLayout:
        """Layout of a page of this shard; `model` is the layout of the whole model."""
        return replace(model, num_layers=self.num_layers, num_kv_heads=self.num_heads)


@dataclass(frozen=True, slots=True)
class Read:
    """One shard's pages come from this rank of the producer."""

    producer_rank: int
    shard_id: int


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Which rank holds and reads which shard. Ranks are in rank order, shards in order of their ids."""

    shards: tuple[Shard, ...]
    """All shards: together they cover each (layer, head) once."""
    producer: tuple[tuple[Shard, ...], ...]
    """Shards held, by rank."""
    reader: tuple[tuple[Shard, ...], ...]
    reads: tuple[tuple[Read, ...], ...]
    """By rank of the reader: one read for each shard that it holds; replicas of the producer take turns."""

    def saves(self, producer_rank: int) -> tuple[Shard, ...]:
        """Shards that this rank writes to a store: of replicas only the first writes, so every page is written once."""
        earlier = {shard.shard_id for held in self.producer[:producer_rank] for shard in held}
        return tuple(shard for shard in self.producer[producer_rank] if shard.shard_id not in earlier)


def map_shards(*, num_layers: int, num_kv_heads: int, producer: Parallelism, reader: Parallelism) -> ShardMap:
    """The canonical shards of a model between two instances, and what each rank reads. Raises ShardError."""
    _check_size("num_layers", num_layers)
    _check_size("num_kv_heads", num_kv_heads)
    _check_partition("producer", producer, num_layers, num_kv_heads)
    _check_partition("reader", reader, num_layers, num_kv_heads)
    held = [
        [_Rectangle(side.layers(rank, num_layers), side.kv_heads(rank, num_kv_heads)) for rank in range(side.num_ranks)]
        for side in (producer, reader)
    ]
    layer_cuts = sorted({cut for side in held for rank in side for cut in (rank.layers.start, rank.layers.stop)})
    head_cuts = sorted({cut for side in held for rank in side for cut in (rank.heads.start, rank.heads.stop)})
    shards = tuple(
        Shard(layer * num_kv_heads + head, layer, next_layer - layer, head, next_head - head)
        for layer, next_layer in pairwise(layer_cuts)
        for head, next_head in pairwise(head_cuts)
    )
    by_producer, by_reader = (tuple(rank.pick(shards) for rank in side) for side in held)
    return ShardMap(shards, by_producer, by_reader, tuple(_reads(by_producer, by_reader)))


def page_offset(held: Sequence[Shard], shard_id: int, model: KVLayout) -> int:
    """Offset of a shard's page in a rank's block, bytes. `held`: the rank's shards; `model`: the layout of the whole
    model. Raises KeyError where the rank does not hold it."""
    offset = 0
    for shard in held:
        if shard.shard_id == shard_id:
            return offset
        offset += shard.layout(model).bytes_per_block
    raise KeyError(shard_id)


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """The cells of a rank."""

    layers: range
    heads: range

    def pick(self, shards: Sequence[Shard]) -> tuple[Shard, ...]:
        """The shards inside; none crosses the border."""
        return tuple(shard for shard in shards if shard.first_layer in self.layers and shard.first_head in self.heads)


def _reads(producer: Sequence[Sequence[Shard]], reader: Sequence[Sequence[Shard]]) -> Iterator[tuple[Read, ...]]:
    """By rank of the reader. The readers of a shard take the ranks that hold it in turn."""
    ranks_of: dict[int, list[int]] = {}
    for rank, shards in enumerate(producer):
        for shard in shards:
            ranks_of.setdefault(shard.shard_id, []).append(rank)
    num_readers = dict.fromkeys(ranks_of, 0)
    for shards in reader:
        reads = []
        for shard in shards:
            ranks = ranks_of[shard.shard_id]
            reads.append(Read(ranks[num_readers[shard.shard_id] % len(ranks)], shard.shard_id))
            num_readers[shard.shard_id] += 1
        yield tuple(reads)


def _check_partition(name: str, side: Parallelism, num_layers: int, num_kv_heads: int) -> None:
    """Raises ShardError where the model cannot be partitioned like this."""
    tensor_parallel_size, pipeline_parallel_size = side.tensor_parallel_size, side.pipeline_parallel_size
    _check_size(f"{name}.tensor_parallel_size", tensor_parallel_size)
    _check_size(f"{name}.pipeline_parallel_size", pipeline_parallel_size)
    if num_kv_heads % tensor_parallel_size and tensor_parallel_size % num_kv_heads:
        raise ShardError(
            f"{name}.tensor_parallel_size is {tensor_parallel_size}, which cannot split {num_kv_heads} KV heads"
            f" (num_kv_heads): it must divide {num_kv_heads} or be a multiple of it"
        )
    if pipeline_parallel_size > num_layers:
        raise ShardError(
            f"{name}.pipeline_parallel_size is {pipeline_parallel_size}, but every stage needs one of the"
            f" {num_layers} layers (num_layers)"
        )


def _check_size(name: str, value: int) -> None:
    if value < 1:
        raise ShardError(f"{name} is {value}; it must be at least 1")
