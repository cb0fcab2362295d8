"""The model's shape from a checkpoint's config.json. Free of torch and of transformers.

Reads the old field names (`rope_theta`, `rope_scaling`, `torch_dtype`) and those of transformers 5 (`rope_parameters`,
`dtype`, `layer_types`). Features that the native decoder does not compute exactly are rejected by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal

from engine.config import Dtype
from engine.errors import InvalidCheckpoint, UnsupportedModel, shown
from engine.kv_layout import KVLayout, PageOrder


class ConfigFields:
    """Typed access to config.json; a field of the wrong type is rejected by name."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self._raw = raw
        self._where = where

    def has(self, name: str) -> bool:
        return name in self._raw

    def raw(self, name: str) -> Any:
        return self._raw.get(name)

    def section(self, name: str) -> ConfigFields | None:
        if self._raw.get(name) is None:
            return None
        return ConfigFields(self._typed(name, None, dict, "an object"), f"{self._where}{name}.")

    def sections(self) -> list[str]:
        """Names of fields that are objects."""
        return [name for name, value in self._raw.items() if isinstance(value, dict)]

    def integer(self, name: str, default: int | None = None) -> int:
        return int(self._typed(name, default, int, "an integer"))

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._typed(name, default, int | float, "a number"))

    def optional_number(self, name: str) -> float | None:
        return None if self._raw.get(name) is None else self.number(name)

    def items(self, name: str) -> list[Any]:
        """Of a list; none where there is none."""
        return list(self._typed(name, [], list, "a list"))

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._typed(name, default, bool, "true or false"))

    def _typed(self, name: str, default: object, kind: type | UnionType, wanted: str) -> Any:
        value = self._raw.get(name)
        value = default if value is None else value
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UnsupportedModel(f"config.json: {self._where}{name} is {shown(value)}; it must be {wanted}")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the checkpoint folder; raises InvalidCheckpoint."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {path.name} of the checkpoint: {error.strerror}") from error
    except ValueError as error:
        raise InvalidCheckpoint(f"{path.name} of the checkpoint is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"{path.name} of the checkpoint is not a JSON object")
    return value


WeightDtype = Literal["float32", "bfloat16", "float16"]

Backend = Literal["native", "transformers"]
ExpertNames = Literal["mixtral", "qwen", "gpt-oss"]
SUPPORTED_DTYPES: tuple[WeightDtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class _Family:
    """Defaults of an architecture for missing fields, as in transformers."""

    model_type: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    window: Literal["", "all", "by_type", "alternating", "optional", "by_layer"] = ""
    """Layers with a sliding window: none; all; all or those that `layer_types` chooses; every other one or those; all
    if `use_sliding_window`; if so, those that `max_window_layers` or `layer_types` chooses."""
    sliding_window: int | None = 4096
    qkv_bias: bool | None = None
    """None: `attention_bias` decides, for the output projection too."""
    attention_bias: bool = False
    qk_norm: bool = False
    mlp_bias: bool = False
    """Whether `mlp_bias` is read."""
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    experts: ExpertNames | None = None
    """Whose names the fields and tensors of experts have; None: no experts."""
    has_sinks: bool = False
    rope: Mapping[str, Any] | None = None
    """In place of missing `rope_parameters`; None: plain RoPE."""
    torch_dtype: WeightDtype = "float32"


_FAMILIES = {
    "GptOssForCausalLM": _Family(
        "gpt_oss",
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        window="alternating",
        sliding_window=128,
        attention_bias=True,
        rope_theta=150000.0,
        rms_norm_eps=1e-5,
        experts="gpt-oss",
        has_sinks=True,
        rope={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        torch_dtype="bfloat16",  # the published config.json names none
    ),
    "LlamaForCausalLM": _Family("llama", max_position_embeddings=2048, mlp_bias=True),
    "MistralForCausalLM": _Family(
        "mistral", num_kv_heads=8, max_position_embeddings=131072, window="by_type", qkv_bias=False
    ),
    "MixtralForCausalLM": _Family(
        "mixtral",
        num_kv_heads=8,
        max_position_embeddings=131072,
        window="all",
        sliding_window=None,
        qkv_bias=False,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        experts="mixtral",
    ),
    "Qwen2ForCausalLM": _Family("qwen2", num_kv_heads=32, window="by_layer", qkv_bias=True),
    "Qwen3ForCausalLM": _Family("qwen3", num_kv_heads=32, head_dim=128, window="by_layer", qk_norm=True),
    "Qwen3MoeForCausalLM": _Family("qwen3_moe", num_kv_heads=4, window="optional", qk_norm=True, experts="qwen"),
}
SUPPORTED_ARCHITECTURES = tuple(sorted(_FAMILIES))
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What the engine must know of a decoder, whatever computes it. Sizes are elements, layers, heads or tokens."""

    backend: ClassVar[Backend] = "transformers"
    """What computes it."""
    architecture: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    """One per layer: with w, position p sees (p - w, p]; None: all positions before it."""
    torch_dtype: WeightDtype
    """The checkpoint's own."""
    softcap: float | None = None
    """With c, an attention score s becomes c * tanh(s / c)."""
    has_sinks: bool = False
    """Whether attention heads have a learned score beside those of the keys."""

    @property
    def max_model_len(self) -> int:
        """Maximum prompt + output in tokens of the position embeddings."""
        return self.max_position_embeddings

    def resolve_dtype(self, dtype: Dtype) -> WeightDtype:
        """The engine's `dtype` setting resolved: `auto` is the checkpoint's own."""
        return self.torch_dtype if dtype == "auto" else dtype

    def kv_layout(self, *, dtype: Dtype, block_size: int, order: PageOrder = "tokens") -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=self.resolve_dtype(dtype),
            order=order,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """The shape of a native decoder, of the Llama, Qwen, Mistral, Mixtral or gpt-oss family."""

    backend: ClassVar[Backend] = "native"
    hidden_size: int
    intermediate_size: int
    num_heads: int
    rms_norm_eps: float
    rope: RopeParameters
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: ExpertsConfig | None = None
    """Of the layers whose MLP is a mixture of experts."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise UnsupportedModel(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"{self.num_heads} attention heads do not divide evenly among {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd; rotary embedding rotates pairs")
        if len(self.sliding_windows) != self.num_layers:
            raise UnsupportedModel(f"layer_types names {len(self.sliding_windows)} layers of {self.num_layers}")

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelConfig:
        """Reads config.json. Raises UnsupportedModel, naming the field, for what the decoder does not support."""
        return _parse(ConfigFields(read_json(Path(folder) / "config.json")))

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        """Of the MLPs and of the experts, as far as there are such layers."""
        if self.experts is None:
            return (self.intermediate_size,)
        dense = () if all(self.experts.layers) else (self.intermediate_size,)
        return (*dense, self.experts.intermediate_size)

    @property
    def max_model_len(self) -> int:
        """As `DecoderConfig.max_model_len`; yarn scales the original length."""
        if self.rope.rope_type != "yarn":
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * self.rope.factor))


def _parse(fields: ConfigFields) -> ModelConfig:
    architecture, family = _architecture(fields)
    if (model_type := fields.raw("model_type") or family.model_type) != family.model_type:
        raise UnsupportedModel(  # transformers builds a model by its model_type
            f"model_type {shown(model_type)} is not supported for {architecture}; supported: {family.model_type}"
        )
    if (activation := fields.raw("hidden_act") or "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {shown(activation)} is not supported; supported: silu")
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    attention_bias = fields.flag("attention_bias", family.attention_bias)
    max_position = fields.integer("max_position_embeddings", family.max_position_embeddings)
    # As in transformers: null is one for each head, and only a missing field has the family's default.
    num_kv_heads = num_heads if fields.has("num_key_value_heads") else family.num_kv_heads or num_heads
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_kv_heads),
        head_dim=fields.integer("head_dim", family.head_dim or hidden_size // max(num_heads, 1)),
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        rope=parse_rope(fields, max_position, family.rope_theta, family.rope),
        max_position_embeddings=max_position,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=fields.flag("mlp_bias") if family.mlp_bias else False,
        qk_norm=family.qk_norm,
        sliding_windows=_sliding_windows(fields, family),
        torch_dtype=_torch_dtype(fields, family),
        experts=_experts(fields, family),
        has_sinks=family.has_sinks,
    )


def _architecture(fields: ConfigFields) -> tuple[str, _Family]:
    names = fields.items("architectures")
    for name in names:
        if name in _FAMILIES:
            return name, _FAMILIES[name]
    raise UnsupportedModel(
        f"architecture {shown(', '.join(map(str, names)) or None)} is not supported; "
        f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _torch_dtype(fields: ConfigFields, family: _Family) -> WeightDtype:
    name = str(fields.raw("dtype") or fields.raw("torch_dtype") or family.torch_dtype).removeprefix("torch.")
    for dtype in SUPPORTED_DTYPES:
        if name == dtype:
            return dtype
    raise UnsupportedModel(
        f"weights of dtype {shown(name)} are not supported; supported: {', '.join(SUPPORTED_DTYPES)}"
    )


def _sliding_windows(fields: ConfigFields, family: _Family) -> tuple[int | None, ...]:
    num_layers = fields.integer("num_hidden_layers")
    if not family.window:
        return (None,) * num_layers
    # An explicit null means no window; only a missing field has the family's default.
    has_field = fields.has("sliding_window")
    window = fields.raw("sliding_window") if has_field else family.sliding_window
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise UnsupportedModel(f"sliding_window {shown(window)} is not supported; supported: null or an integer from 1")
    if family.window in ("optional", "by_layer") and not fields.flag("use_sliding_window"):
        window = None
    if family.window in ("by_type", "alternating", "by_layer") and fields.raw("layer_types") is not None:
        return tuple(_window_of(layer_type, window) for layer_type in fields.items("layer_types"))
    if family.window == "alternating":
        return tuple(None if layer % 2 else window for layer in range(num_layers))
    first = fields.integer("max_window_layers", 28) if family.window == "by_layer" else 0
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _window_of(layer_type: object, window: int | None) -> int | None:
    if layer_type == "sliding_attention":
        return window
    if layer_type == "full_attention":
        return None
    raise UnsupportedModel(
        f"layer type {shown(layer_type)} is not supported; supported: full_attention, sliding_attention"
    )


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate up to `limit` and up from -limit to limit (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixture-of-experts layers: a router chooses `num_per_token` of `num_experts` MLPs for each token."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalises: bool
    """Whether the chosen experts' weights are divided by their sum."""
    layers: tuple[bool, ...]
    """Whether layer i has experts, or one MLP."""
    names: ExpertNames
    gate: ClampedGate | None = None
    """None: SiLU."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_per_token <= self.num_experts:
            raise UnsupportedModel(
                f"num_experts_per_tok is {self.num_per_token}; it must be between 1 and the {self.num_experts} experts"
            )


def _experts(fields: ConfigFields, family: _Family) -> ExpertsConfig | None:
    """The experts of an architecture that has them; transformers 5 calls their number `num_local_experts`."""
    num_layers = fields.integer("num_hidden_layers")
    if family.experts is None:
        return None
    if family.experts != "qwen":
        is_mixtral, gate = family.experts == "mixtral", None
        if not is_mixtral:
            gate = ClampedGate(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
        return ExpertsConfig(
            num_experts=fields.integer("num_local_experts", 8 if is_mixtral else 128),
            num_per_token=fields.integer("num_experts_per_tok", 2 if is_mixtral else 4),
            intermediate_size=fields.integer("intermediate_size"),
            normalises=True,
            layers=(True,) * num_layers,
            names=family.experts,
            gate=gate,
        )
    num_experts = fields.integer("num_experts", fields.integer("num_local_experts", 128))
    step, dense = fields.integer("decoder_sparse_step", 1), fields.items("mlp_only_layers")
    if step < 1:
        raise UnsupportedModel(f"decoder_sparse_step is {step}; it must be at least 1")
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        normalises=fields.flag("norm_topk_prob"),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        names=family.experts,
    )


RopeType = Literal["default", "linear", "llama3", "yarn"]
SUPPORTED_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """The frequencies of rotary embedding. Fields of other types keep their defaults."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """llama3 and yarn: the length of the original training."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def parse_rope(
    fields: ConfigFields, max_position_embeddings: int, default_theta: float, default: Mapping[str, Any] | None = None
) -> RopeParameters:
    """Reads `rope_parameters`, or `rope_scaling` and `rope_theta`; without them `default`, or plain RoPE, with the
    default theta."""
    name = "rope_scaling" if fields.raw("rope_scaling") else "rope_parameters"
    scaling = fields.section(name) or ConfigFields(default or {})
    if kinds := scaling.sections():
        raise UnsupportedModel(
            f"{name} by type of layer ({shown(', '.join(kinds))}) is not supported; supported: one for all layers"
        )
    theta = scaling.number("rope_theta", fields.number("rope_theta", default_theta))
    partial = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    rope_type = _rope_type(scaling)
    if rope_type == "default":
        return RopeParameters(rope_type, theta)
    if rope_type == "linear":
        return RopeParameters(rope_type, theta, factor=scaling.number("factor"))
    # As in transformers a length at the top level overrides the one beside the factor.
    original = scaling.integer("original_max_position_embeddings", max_position_embeddings)
    original = fields.integer("original_max_position_embeddings", original)
    if original < 1:
        raise UnsupportedModel(f"original_max_position_embeddings is {original}; it must be at least 1")
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
        truncate=scaling.flag("truncate", not scaling.has("truncate")),  # null is false, as in transformers
    )


def _rope_type(scaling: ConfigFields) -> RopeType:
    name = scaling.raw("rope_type") or scaling.raw("type") or "default"
    for rope_type in SUPPORTED_ROPE_TYPES:
        if name == rope_type:
            return rope_type
    raise UnsupportedModel(f"RoPE type {shown(name)} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
