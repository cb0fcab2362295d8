"""The experts of models of transformers, on CPU, as those of the native decoders: quantised, and row by row.

transformers has the matrices of a layer's experts in one tensor, in a module of which all architectures with
interchangeable implementations have the same attributes. Here such modules get another `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.config import Quantization
from engine.models.experts import CompiledExperts, Experts, SeparateExperts
from engine.models.linear import Linear, PanelLinear, make_grouped_linear, make_linear

_Rows = Callable[[torch.Tensor], torch.Tensor]


def pack_experts(model: torch.nn.Module, quantization: Quantization) -> None:
    """Packs the experts' matrices in place, layer by layer."""
    for module in model.modules():
        if hasattr(module, "has_post_expert_norm"):
            module.forward = _forward(_packed(module, quantization))


def _forward(experts: Experts) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return experts(hidden_states, top_k_weights, top_k_index)

    return forward


def _packed(module: Any, quantization: Quantization) -> Experts:
    up = _take(module, "gate_up_proj" if module.has_gate else "up_proj")
    down = _take(module, "down_proj")
    activation: _Rows = module._apply_gate if module.has_gate else module.act_fn
    norm: _Rows = module.post_expert_norm if module.has_post_expert_norm else torch.nn.Identity()
    is_compiled = quantization != "none" or all(PanelLinear.supports(matrices[0]) for matrices, _ in (up, down))
    if is_compiled and CompiledExperts.supports(down[0].dtype, down[0].shape[1]):
        first, last = (make_grouped_linear(*taken, quantization) for taken in (up, down))
        return CompiledExperts(first, activation, lambda x, starts: norm(last(x, starts)), num_experts=len(up[0]))
    first_of_each, last_of_each = (_separate(*taken, quantization) for taken in (up, down))
    return SeparateExperts(
        [_expert(*linears, activation, norm) for linears in zip(first_of_each, last_of_each, strict=True)]
    )


def _take(module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Matrices [experts, out_features, in_features], which the module keeps no longer, and biases [experts,
    out_features]."""
    matrices = getattr(module, name).detach()
    setattr(module, name, torch.nn.Parameter(matrices.new_empty(0), requires_grad=False))
    bias = getattr(module, f"{name}_bias").detach() if module.has_bias else None
    return matrices.transpose(1, 2) if module.is_transposed else matrices, bias


def _separate(matrices: torch.Tensor, biases: torch.Tensor | None, quantization: Quantization) -> list[Linear]:
    return [
        make_linear(matrix.contiguous(), bias, quantization)
        for matrix, bias in zip(matrices, [None] * len(matrices) if biases is None else biases, strict=True)
    ]


def _expert(up: Linear, down: Linear, activation: _Rows, norm: _Rows) -> _Rows:
    return lambda x: norm(down(activation(up(x))))
