"""The MLP of a layer: one for all tokens, or a mixture of experts of which a router chooses some for each token.

Experts compute their tokens together, in ascending order of the experts. A token's bits depend on that token alone: a
linear layer's row does not depend on the other rows, and a token's experts are added in the same order in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.models.config import ModelConfig
from engine.models.elementwise import Elementwise
from engine.models.linear import Linear, LinearSource, make_linear


class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, elementwise: Elementwise) -> None:
        self._gate_up = gate_up
        self._down = down
        self._elementwise = elementwise

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._down(self._elementwise.silu_and_mul(self._gate_up(x)))


class SparseMLP:
    """The sum of a token's experts, weighted by the router's softmax over all experts."""

    def __init__(self, router: Linear, experts: list[GatedMLP], *, num_per_token: int, normalises: bool) -> None:
        self._router = router
        self._experts = experts
        self._num_per_token = num_per_token
        self._normalises = normalises

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        weights, chosen = self._route(x)
        counts = torch.bincount(chosen, minlength=len(self._experts)).tolist()
        by_expert = chosen.argsort(stable=True)
        tokens = by_expert // self._num_per_token
        inputs, weights = x[tokens].split(counts), weights[by_expert, None].split(counts)
        output = torch.zeros_like(x)
        for expert, rows, part, weight in zip(self._experts, tokens.split(counts), inputs, weights, strict=True):
            if len(rows):
                output.index_add_(0, rows, expert(part) * weight)
        return output

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight (dtype of x) and expert of every choice, [tokens * num_per_token], token after token."""
        probabilities = self._router(x).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self._num_per_token, dim=-1)
        if self._normalises:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype).flatten(), chosen.flatten()


@dataclass(frozen=True, slots=True)
class _Source:
    """Where MLPs are taken from."""

    linears: LinearSource
    elementwise: Elementwise
    hidden_size: int

    def router(self, name: str, num_experts: int) -> Linear:
        """Never quantised: it decides which experts compute."""
        return make_linear(self.linears.weights.take(f"{name}.weight", (num_experts, self.hidden_size)))

    def gated(self, names: tuple[str, str, str], size: int, *, has_bias: bool) -> GatedMLP:
        """`names` of the gate, up and down projections; `size`: between them."""
        gate, up, down = names
        gate_up = self.linears.take({gate: size, up: size}, self.hidden_size, has_bias=has_bias)
        return GatedMLP(
            gate_up,
            self.linears.take({down: self.hidden_size}, size, has_bias=has_bias),
            self.elementwise,
        )


def take_mlp(config: ModelConfig, linears: LinearSource, elementwise: Elementwise, layer: int) -> GatedMLP | SparseMLP:
    """The MLP of `layer`."""
    source, experts = _Source(linears, elementwise, config.hidden_size), config.experts
    prefix = f"model.layers.{layer}.mlp"
    if experts is None or not experts.layers[layer]:
        return source.gated(_projections(prefix), config.intermediate_size, has_bias=config.mlp_bias)
    if experts.names == "mixtral":
        prefix = f"model.layers.{layer}.block_sparse_moe"
    names = _mixtral_projections if experts.names == "mixtral" else _projections
    return SparseMLP(
        source.router(f"{prefix}.gate", experts.num_experts),
        [
            source.gated(names(f"{prefix}.experts.{expert}"), experts.intermediate_size, has_bias=False)
            for expert in range(experts.num_experts)
        ],
        num_per_token=experts.num_per_token,
        normalises=experts.normalises,
    )


def _projections(prefix: str) -> tuple[str, str, str]:
    return (f"{prefix}.gate_proj", f"{prefix}.up_proj", f"{prefix}.down_proj")


def _mixtral_projections(prefix: str) -> tuple[str, str, str]:
    return (f"{prefix}.w1", f"{prefix}.w3", f"{prefix}.w2")
