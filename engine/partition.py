"""How a model is divided among ranks: the part of each. Pure; free of torch.

Tensor parallelism divides heads, the features between an MLP's matrices and the vocabulary; pipeline parallelism
divides layers. Ranks are numbered pipeline_rank * tensor_parallel_size + tensor_rank. KV heads are divided evenly, or
replicated where there are more tensor ranks than heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.errors import UnsupportedModel


class DecoderShape(Protocol):
    """Sizes of a whole model."""

    @property
    def intermediate_sizes(self) -> tuple[int, ...]: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The number of ranks in each direction."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Processes that compute and hold KV."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def name(self) -> str:
        """Of a size above 1."""
        return "tensor_parallel_size" if self.tensor_parallel_size > 1 else "pipeline_parallel_size"

    @property
    def core_rank(self) -> int:
        """The rank in the engine core's process: the first of the last stage, which has the logits."""
        return self.num_ranks - self.tensor_parallel_size

    def check(self, model: DecoderShape) -> None:
        """Raises UnsupportedModel, naming the field and what is allowed, where the model cannot be divided."""
        size, num_stages, num_kv_heads = self.tensor_parallel_size, self.pipeline_parallel_size, model.num_kv_heads
        if num_kv_heads % size and size % num_kv_heads:
            raise UnsupportedModel(
                f"tensor_parallel_size is {size}, which cannot split {num_kv_heads} KV heads (num_key_value_heads): "
                f"it must divide {num_kv_heads} or be a multiple of it"
            )
        features = [("intermediate_size", value) for value in model.intermediate_sizes]
        for name, value in (("num_attention_heads", model.num_heads), *features):
            if value % size:
                raise UnsupportedModel(f"tensor_parallel_size is {size}; it must divide {name} {value}")
        if num_stages > model.num_layers:
            raise UnsupportedModel(
                f"pipeline_parallel_size is {num_stages}, but every stage needs one of the {model.num_layers} layers "
                f"(num_hidden_layers): it must be at most {model.num_layers}"
            )

    def part(self, rank: int, model: DecoderShape) -> Part:
        """What `rank` computes of `model`."""
        return Part(
            rank,
            self,
            layers=self.layers(rank, model.num_layers),
            kv_heads=self.kv_heads(rank, model.num_kv_heads),
        )

    def layers(self, rank: int, num_layers: int) -> range:
        """Those of `rank`. The remainder goes to the stages before the last (vLLM, get_pp_indices)."""
        num_stages = self.pipeline_parallel_size
        sizes = [num_layers // num_stages] * num_stages
        for back in range(2, num_layers % num_stages + 2):
            sizes[-back] += 1
        stage = rank // self.tensor_parallel_size
        return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))

    def kv_heads(self, rank: int, num_kv_heads: int) -> range:
        """Those of `rank`, by their numbers in the whole model."""
        num_replicas = max(1, self.tensor_parallel_size // num_kv_heads)
        num_heads = max(1, num_kv_heads // self.tensor_parallel_size)
        first = rank % self.tensor_parallel_size // num_replicas * num_heads
        return range(first, first + num_heads)


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a model: numbers of layers and heads of the whole model."""

    rank: int
    parallelism: Parallelism
    layers: range
    kv_heads: range

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.parallelism.tensor_parallel_size

    @property
    def stage(self) -> int:
        return self.rank // self.parallelism.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        """Whether it has the embeddings."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the final norm and the output layer."""
        return self.stage == self.parallelism.pipeline_parallel_size - 1

    def share(self, size: int) -> range:
        """The rank's part of `size` query heads, features between an MLP's matrices, or token ids. Parts differ by at
        most one."""
        num_parts = self.parallelism.tensor_parallel_size
        return range(size * self.tensor_rank // num_parts, size * (self.tensor_rank + 1) // num_parts)
