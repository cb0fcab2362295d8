"""The MLPs of a mixture of experts: a router chooses some of them for each token, whose outputs are added.

On CPU the rows of all tokens and experts are computed together, in one product for all experts; a step reads no number
on the host, so that it can be recorded. Elsewhere each expert that was chosen computes its rows by itself. In both the
bits of a token depend on that token alone: a row of a product does not depend on the other rows, and a token's experts
are added in ascending order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.attention.cpu import is_compiled_for
from engine.attention.openmp import launch, launcher, num_threads_for
from engine.attention.simd import WIDTH
from engine.models import experts_kernels as kernels
from engine.models.elementwise import to_float32

_ChooseArguments = ctypes.c_int64 * 8
_PlaceArguments = ctypes.c_int64 * 9
_SpreadArguments = ctypes.c_int64 * 7
_CombineArguments = ctypes.c_int64 * 8


class GroupedLinear(Protocol):
    """The same linear layer of each expert, for rows of its own."""

    def __call__(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype; expert i has the rows from starts[i] to starts[i +
        1]. starts: int64 [experts + 1]."""


class Experts(Protocol):
    """The experts of a layer."""

    @staticmethod
    def choose(logits: torch.Tensor, num_per_token: int, *, normalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable experts of each token. logits [tokens, experts] -> probabilities (float32), which
        `normalises` divides by their sum, and experts (int64), [tokens, num_per_token]."""

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], weights (floating-point) and chosen (int64) [tokens, experts of a token] -> [tokens,
        hidden], dtype of x."""


class SeparateExperts:
    """One after the other, on any device."""

    def __init__(self, experts: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        """Each: [tokens, hidden] -> [tokens, hidden]."""
        self._experts = experts

    @staticmethod
    def choose(logits: torch.Tensor, num_per_token: int, *, normalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Experts.choose`."""
        weights, chosen = logits.softmax(dim=-1, dtype=torch.float32).topk(num_per_token, dim=-1)
        if normalises:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights, chosen

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert // chosen.shape[1]
        inputs, weight_of = x[tokens].split(counts), weights.flatten()[by_expert, None].split(counts)
        output = torch.zeros_like(x)
        for expert, rows, part, weight in zip(self._experts, tokens.split(counts), inputs, weight_of, strict=True):
            if len(rows):
                output.index_add_(0, rows, (expert(part) * weight).to(x.dtype))
        return output


class CompiledExperts:
    """All at once, on CPU. The hidden size is a multiple of the kernels' vectors (WIDTH)."""

    def __init__(
        self,
        up: GroupedLinear,
        activation: Callable[[torch.Tensor], torch.Tensor],
        down: GroupedLinear,
        *,
        num_experts: int,
    ) -> None:
        """`activation`: of each row of `up`'s output."""
        self._up, self._activation, self._down = up, activation, down
        self._num_experts = num_experts

    @staticmethod
    def choose(logits: torch.Tensor, num_per_token: int, *, normalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Experts.choose`. One launch."""
        numbers, shape = to_float32(logits), (len(logits), num_per_token)
        weights = torch.empty(shape, dtype=torch.float32, device="cpu")
        chosen = torch.empty(shape, dtype=torch.int64, device="cpu")
        addresses = (numbers.data_ptr(), int(normalises), weights.data_ptr(), chosen.data_ptr())
        arguments = _ChooseArguments(0, *shape, logits.shape[1], *addresses)
        launcher(kernels.choose_address())(num_threads_for(numbers.numel()), arguments)
        return weights, chosen

    @staticmethod
    def supports(dtype: torch.dtype, hidden_size: int) -> bool:
        """On CPU."""
        return is_compiled_for(dtype) and hidden_size % WIDTH == 0

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See `Experts`."""
        places, starts, weights = self._placed(chosen.contiguous(), weights.float().contiguous())
        rows = self._down(self._activation(self._up(_spread(x.contiguous(), places), starts)), starts)
        output = torch.empty_like(x)
        arguments = _CombineArguments(
            0,
            *places.shape,
            x.shape[1],
            places.data_ptr(),
            rows.data_ptr(),
            output.data_ptr(),
            weights.data_ptr(),
        )
        launch(kernels.combine_address, x.dtype, rows.numel(), arguments)
        return output

    def _placed(self, chosen: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Places of the assignments (see the kernels), ascending in each token; first row of each expert and the end;
        weights in the order of the places."""
        places, placed_weights = torch.empty_like(chosen), torch.empty_like(weights)
        starts = torch.empty(self._num_experts + 1, dtype=torch.int64, device="cpu")
        arguments = _PlaceArguments(
            0,
            *chosen.shape,
            self._num_experts,
            chosen.data_ptr(),
            weights.data_ptr(),
            starts.data_ptr(),
            places.data_ptr(),
            placed_weights.data_ptr(),
        )
        launcher(kernels.place_address())(None, arguments)
        return places, starts, placed_weights


def _spread(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The row of each assignment, at its place: [assignments, hidden]."""
    rows = x.new_empty((places.numel(), x.shape[1]))
    arguments = _SpreadArguments(0, *places.shape, x.shape[1], places.data_ptr(), x.data_ptr(), rows.data_ptr())
    launch(kernels.spread_address, x.dtype, rows.numel(), arguments)
    return rows
