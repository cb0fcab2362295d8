"""Parts of a model: together they are all of it, and what cannot be divided is rejected by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.errors import UnsupportedModel
from engine.partition import Parallelism


@dataclass(frozen=True)
class Shape:
    intermediate_sizes: tuple[int, ...] = (96,)
    num_layers: int = 7
    num_heads: int = 8
    num_kv_heads: int = 4


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 3), (2, 2), (4, 7)])
def test_parts_cover_the_model(tensor: int, pipeline: int) -> None:
    shape, parallelism = Shape(), Parallelism(tensor, pipeline)
    parallelism.check(shape)
    parts = [parallelism.part(rank, shape) for rank in range(parallelism.num_ranks)]
    core = parts[parallelism.core_rank]
    assert (core.is_last_stage, core.tensor_rank, core.layers.stop) == (True, 0, shape.num_layers)
    assert [part.is_first_stage for part in parts] == [part.layers.start == 0 for part in parts]
    cells = [(layer, head) for part in parts for layer in part.layers for head in part.kv_heads]
    num_replicas = max(1, tensor // shape.num_kv_heads)
    assert sorted(cells) == sorted([(layer, head) for layer in range(7) for head in range(4)] * num_replicas)
    for part in parts:  # the queries of a rank are those of its KV heads
        assert {head * shape.num_kv_heads // shape.num_heads for head in part.share(8)} == set(part.kv_heads)
    for size in (1000, 96, 8):
        assert [index for part in parts[:tensor] for index in part.share(size)] == list(range(size))


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        (Parallelism(3), "tensor_parallel_size is 3, which cannot split 4 KV heads.*must divide 4 or be a multiple"),
        (Parallelism(12), "tensor_parallel_size is 12; it must divide num_attention_heads 8"),
        (Parallelism(1, 8), "pipeline_parallel_size is 8, but every stage needs one of the 7 layers .*at most 7"),
    ],
)
def test_what_cannot_be_divided_is_rejected_by_name(parallelism: Parallelism, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parallelism.check(Shape())


def test_features_must_divide_evenly() -> None:
    with pytest.raises(UnsupportedModel, match="must divide intermediate_size 98"):
        Parallelism(4).check(Shape(intermediate_sizes=(96, 98)))
