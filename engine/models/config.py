"""What a checkpoint's config.json says, in the engine's words. Free of torch and of transformers.

Both spellings are read: the old one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of transformers 5
(`rope_parameters`, `dtype`, `layer_types`). Whatever the native decoder cannot compute exactly is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.config import Dtype
from engine.errors import UnsupportedModel, shown
from engine.kv_layout import KVLayout
from engine.models.config_fields import ConfigFields, read_json
from engine.models.rope_parameters import RopeParameters, parse_rope

WeightDtype = Literal["float32", "bfloat16", "float16"]

SUPPORTED_DTYPES: tuple[WeightDtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture means where its config.json is silent (the defaults of transformers)."""

    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    sliding_window: int | None = None
    qkv_bias: bool | None = None
    """None: `attention_bias` decides, for the output projection too."""
    qk_norm: bool = False
    mlp_bias: bool = False
    """Whether `mlp_bias` is looked at."""
    window_is_optional: bool = False
    """Whether `use_sliding_window`, `max_window_layers` and `layer_types` choose the layers that have a window."""


_FAMILIES = {
    "LlamaForCausalLM": _Family(max_position_embeddings=2048, mlp_bias=True),
    "MistralForCausalLM": _Family(num_kv_heads=8, max_position_embeddings=131072, sliding_window=4096, qkv_bias=False),
    "Qwen2ForCausalLM": _Family(num_kv_heads=32, sliding_window=4096, qkv_bias=True, window_is_optional=True),
    "Qwen3ForCausalLM": _Family(
        num_kv_heads=32, head_dim=128, sliding_window=4096, qk_norm=True, window_is_optional=True
    ),
}
SUPPORTED_ARCHITECTURES = tuple(sorted(_FAMILIES))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder of the Llama, Qwen or Mistral family. Sizes are elements, layers, heads or tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    """One per layer: w means that position p sees (p - w, p]; None sees everything before it."""
    torch_dtype: WeightDtype
    """The checkpoint's own."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Of config.json and generation_config.json together, in that order."""

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise UnsupportedModel(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"{self.num_heads} attention heads do not divide evenly among {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd; rotary embedding turns pairs")
        if len(self.sliding_windows) != self.num_layers:
            raise UnsupportedModel(f"layer_types names {len(self.sliding_windows)} layers of {self.num_layers}")

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelConfig:
        """Reads config.json (and eos ids of generation_config.json) of a checkpoint folder.

        Raises UnsupportedModel, naming the field, for whatever the native decoder cannot run.
        """
        folder = Path(folder)
        fields = ConfigFields(read_json(folder / "config.json"))
        generation = folder / "generation_config.json"
        extra_eos = _token_ids(read_json(generation).get("eos_token_id")) if generation.exists() else ()
        return _parse(fields, extra_eos)

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens that the positions were made for (yarn stretches the original length)."""
        if self.rope.rope_type != "yarn":
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * self.rope.factor))

    def resolve_dtype(self, dtype: Dtype) -> Literal["float32", "bfloat16"]:
        """What the engine's `dtype` setting means for this checkpoint: `auto` is its own, float16 runs as bfloat16."""
        if dtype != "auto":
            return dtype
        return "float32" if self.torch_dtype == "float32" else "bfloat16"

    def kv_layout(self, *, dtype: Dtype, block_size: int) -> KVLayout:
        """The page of this model's KV cache."""
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=self.resolve_dtype(dtype),
        )


def _parse(fields: ConfigFields, extra_eos: tuple[int, ...]) -> ModelConfig:
    architecture, family = _architecture(fields)
    if (activation := fields.raw("hidden_act") or "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {shown(activation)} is not supported; supported: silu")
    if (quantization := fields.raw("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(
            f"quantization_config ({shown(method)}) is not supported; supported: unquantized weights"
        )
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    attention_bias = fields.flag("attention_bias")
    max_position = fields.integer("max_position_embeddings", family.max_position_embeddings)
    eos = _token_ids(fields.raw("eos_token_id"))
    bos = _token_ids(fields.raw("bos_token_id"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", family.num_kv_heads or num_heads),
        head_dim=fields.integer("head_dim", family.head_dim or hidden_size // max(num_heads, 1)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=parse_rope(fields, max_position),
        max_position_embeddings=max_position,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=fields.flag("mlp_bias") if family.mlp_bias else False,
        qk_norm=family.qk_norm,
        sliding_windows=_sliding_windows(fields, family),
        torch_dtype=_torch_dtype(fields),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys((*eos, *extra_eos))),
    )


def _architecture(fields: ConfigFields) -> tuple[str, _Family]:
    names = fields.raw("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return name, _FAMILIES[name]
    raise UnsupportedModel(
        f"architecture {shown(', '.join(map(str, names)) or None)} is not supported; "
        f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _torch_dtype(fields: ConfigFields) -> WeightDtype:
    name = str(fields.raw("dtype") or fields.raw("torch_dtype") or "float32").removeprefix("torch.")
    for dtype in SUPPORTED_DTYPES:
        if name == dtype:
            return dtype
    raise UnsupportedModel(
        f"weights of dtype {shown(name)} are not supported; supported: {', '.join(SUPPORTED_DTYPES)}"
    )


def _token_ids(value: object) -> tuple[int, ...]:
    """One id, a list of ids or nothing."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in values):
        raise UnsupportedModel(f"special token ids {shown(value)} are not whole numbers")
    return tuple(values)


def _sliding_windows(fields: ConfigFields, family: _Family) -> tuple[int | None, ...]:
    num_layers = fields.integer("num_hidden_layers")
    if family.sliding_window is None:
        return (None,) * num_layers
    # An explicit null means no window; only a missing field means the family's default.
    has_field = fields.has("sliding_window")
    window = fields.raw("sliding_window") if has_field else family.sliding_window
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise UnsupportedModel(f"sliding_window {shown(window)} is not supported; supported: null or an integer from 1")
    if not family.window_is_optional:
        return (window,) * num_layers
    if not fields.flag("use_sliding_window"):
        window = None
    layer_types = fields.raw("layer_types")
    if layer_types is None:
        first = fields.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(_window_of(layer_type, window) for layer_type in layer_types)


def _window_of(layer_type: object, window: int | None) -> int | None:
    if layer_type == "sliding_attention":
        return window
    if layer_type == "full_attention":
        return None
    raise UnsupportedModel(
        f"layer type {shown(layer_type)} is not supported; supported: full_attention, sliding_attention"
    )
