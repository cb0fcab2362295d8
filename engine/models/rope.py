"""Rotary position embedding: cosines and sines of a step's tokens, equal to transformers' in float32.

There is no table by position: a step needs the angles of its own tokens, once for all layers.
"""

from __future__ import annotations

import math

import torch

from engine.models.config import RopeParameters


class RotaryEmbedding:
    """Rotates pair i of a head, elements (i, i + head_dim / 2), by position * inv_freq[i]."""

    def __init__(self, rope: RopeParameters, *, head_dim: int, device: torch.device) -> None:
        self.inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self.attention_factor = attention_factor(rope)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int [num_tokens] -> cos, sin float32 [num_tokens, head_dim / 2], attention factor included."""
        angles = positions.to(torch.float32)[:, None] * self.inv_freq
        if self.attention_factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2], radians per position of each pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return base / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, base)
    if rope.rope_type == "yarn":
        return _yarn(rope, rope.theta**exponents, head_dim)
    return base


def attention_factor(rope: RopeParameters) -> float:
    """Factor of cosines and sines for yarn (arXiv 2309.00071, section 3.4); 1 for other types."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(rope: RopeParameters, base: torch.Tensor) -> torch.Tensor:
    """Low frequencies are divided by `factor`, high ones kept, and those between blended."""
    turns = rope.original_max_position_embeddings / (2 * math.pi / base)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * base / rope.factor + blend * base
    slow = turns < rope.low_freq_factor
    fast = turns > rope.high_freq_factor
    return torch.where(slow, base / rope.factor, torch.where(fast, base, blended))


def _yarn(rope: RopeParameters, wave: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pairs with over beta_fast turns in the original length are kept, below beta_slow divided by `factor`."""

    def pair_turning(times: float) -> float:
        ratio = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    first, last = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = (last - first) or 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - first) / span).clamp(0, 1)
    kept = 1 - slowed
    return 1.0 / (rope.factor * wave) * (1 - kept) + 1.0 / wave * kept
