"""Which rotary embedding a config.json asks for. Free of torch; the tables themselves are made in `rope`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import UnsupportedModel, shown
from engine.models.config_fields import ConfigFields

RopeType = Literal["default", "linear", "llama3", "yarn"]
SUPPORTED_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary embedding: which frequencies the pairs of a head turn with. Fields of other types keep their defaults."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """llama3 and yarn: the length the model was trained at before it was stretched."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def parse_rope(fields: ConfigFields, max_position_embeddings: int) -> RopeParameters:
    """Reads `rope_parameters`, or `rope_scaling` with `rope_theta` beside it; absent: plain RoPE, theta 10000."""
    scaling = fields.section("rope_scaling") or fields.section("rope_parameters") or ConfigFields({})
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    rope_type = _rope_type(scaling)
    if rope_type == "default":
        return RopeParameters(rope_type, theta)
    if rope_type == "linear":
        return RopeParameters(rope_type, theta, factor=scaling.number("factor"))
    # transformers lets a length at the top of config.json win over the one beside the factor.
    original = scaling.integer("original_max_position_embeddings", max_position_embeddings)
    original = fields.integer("original_max_position_embeddings", original)
    if rope_type == "llama3":
        return RopeParameters(
            rope_type,
            theta,
            factor=scaling.number("factor"),
            original_max_position_embeddings=original,
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
        )
    return RopeParameters(
        rope_type,
        theta,
        factor=scaling.number("factor", max_position_embeddings / original),
        original_max_position_embeddings=original,
        attention_factor=scaling.optional_number("attention_factor"),
        beta_fast=scaling.optional_number("beta_fast") or 32.0,
        beta_slow=scaling.optional_number("beta_slow") or 1.0,
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        truncate=scaling.flag("truncate", True),
    )


def _rope_type(scaling: ConfigFields) -> RopeType:
    name = scaling.raw("rope_type") or scaling.raw("type") or "default"
    for rope_type in SUPPORTED_ROPE_TYPES:
        if name == rope_type:
            return rope_type
    raise UnsupportedModel(f"RoPE type {shown(name)} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
