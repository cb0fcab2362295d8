"""The decoder shared by Llama, Mistral, Qwen2 and Qwen3, with fused projections.

The families differ in biases, in the norm of query and key heads, in sliding windows and in RoPE: data in ModelConfig.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionBackend, AttentionMetadata
from engine.models.config import ModelConfig
from engine.models.elementwise import HeadNorm, HeadShape, elementwise_for
from engine.models.rope import RotaryEmbedding
from engine.models.weights import WeightSource


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: PackedLinear
    head_norm: HeadNorm | None
    output: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    sliding_window: int | None


class LlamaModel:
    """Owns the weights; the caller owns the KV cache and the step's metadata. Used by one thread."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionBackend,
    ) -> None:
        """Raises InvalidCheckpoint for a tensor that is missing, has the wrong shape or is not used."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self._attention = attention
        self._elementwise = elementwise_for(
            device, dtype, row_sizes=(config.hidden_size, config.intermediate_size), head_dim=config.head_dim
        )
        self._rope = RotaryEmbedding(config.rope, head_dim=config.head_dim, device=device)
        self._shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._scale = config.head_dim**-0.5
        self._embedding = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._layers = [_take_layer(config, weights, layer) for layer in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", (config.hidden_size,))
        ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)  # a table in old checkpoints
        if config.tie_word_embeddings:
            self._lm_head = PackedLinear(self._embedding)
            ignored += ("lm_head.weight",)
        else:
            self._lm_head = PackedLinear(weights.take("lm_head.weight", (config.vocab_size, config.hidden_size)))
        weights.finish(ignored=ignored)

    @property
    def attention_name(self) -> str:
        """Name of the attention backend."""
        return self._attention.name

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """One step: token_ids, positions int [num_tokens] -> final hidden states [num_tokens, hidden_size].

        Keys and values of the step are written into kv_cache at metadata.slot_mapping.
        """
        elementwise, eps = self._elementwise, self.config.rms_norm_eps
        num_tokens = token_ids.shape[0]
        head_counts = [self._shape.num_heads, self._shape.num_kv_heads, self._shape.num_kv_heads]
        cos, sin = self._rope.cos_sin(positions)
        residual = torch.nn.functional.embedding(token_ids, self._embedding)
        x: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(elementwise.add_rms_norm(x, residual, layer.input_norm, eps))
            elementwise.rotate(qkv, cos, sin, self._shape, layer.head_norm)
            query, key, value = qkv.view(num_tokens, -1, self._shape.head_dim).split_with_sizes(head_counts, dim=1)
            attended = self._attention.forward(
                query,
                key,
                value,
                kv_cache,
                layer=index,
                metadata=metadata,
                scale=self._scale,
                sliding_window=layer.sliding_window,
            )
            x = layer.output(attended.view(num_tokens, -1))
            gate_up = layer.gate_up(elementwise.add_rms_norm(x, residual, layer.post_norm, eps))
            x = layer.down(elementwise.silu_and_mul(gate_up))
        return elementwise.add_rms_norm(x, residual, self._norm, eps)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32 [rows, vocab_size]."""
        return self._lm_head(hidden.contiguous()).float()


def _take_layer(config: ModelConfig, weights: WeightSource, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    head_norm = None
    if config.qk_norm:
        head_norm = HeadNorm(
            query_weight=weights.take(f"{attention}.q_norm.weight", (head_dim,)),
            key_weight=weights.take(f"{attention}.k_norm.weight", (head_dim,)),
            eps=config.rms_norm_eps,
        )
    qkv = {f"{attention}.q_proj": query_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
    gate_up = {f"{mlp}.gate_proj": intermediate, f"{mlp}.up_proj": intermediate}
    return _Layer(
        input_norm=weights.take(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=_take_linear(weights, qkv, hidden, has_bias=config.qkv_bias),
        head_norm=head_norm,
        output=_take_linear(weights, {f"{attention}.o_proj": hidden}, query_size, has_bias=config.o_bias),
        post_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=_take_linear(weights, gate_up, hidden, has_bias=config.mlp_bias),
        down=_take_linear(weights, {f"{mlp}.down_proj": hidden}, intermediate, has_bias=config.mlp_bias),
        sliding_window=config.sliding_windows[index],
    )


def _take_linear(weights: WeightSource, parts: dict[str, int], in_features: int, *, has_bias: bool) -> PackedLinear:
    """One matrix for several projections of the same input, stacked in order; `parts`: name -> output features."""
    stacked = torch.cat([weights.take(f"{name}.weight", (size, in_features)) for name, size in parts.items()])
    bias = torch.cat([weights.take(f"{name}.bias", (size,)) for name, size in parts.items()]) if has_bias else None
    return PackedLinear(stacked, bias)


class PackedLinear:
    """y = x W^T + b. On CPU the weight is copied once into oneDNN's blocked layout.

    Without packing oneDNN reorders the weight, or reads it strided, in every call: one row of bfloat16 then runs at a
    third of the memory bandwidth. In float32 packing pays from a few rows on.

    On CPU the bits of a row do not depend on the other rows of the call. For a single row oneDNN takes another kernel,
    which may add in another order: where it does, a single row is computed as two (benchmarks/LOG.md has the cost).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out_features, in_features], bias [out_features], both on the device and of the dtype to run with."""
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        is_packed = _can_pack(weight)
        # Looked up once: the lookup costs as much as a small layer.
        self._product = torch.ops.mkldnn._linear_pointwise.default if is_packed else None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if is_packed else weight
        self._doubles_single_rows = weight.device.type == "cpu" and not self._is_one_row_exact(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""
        if self._doubles_single_rows and x.shape[0] == 1:
            return self(x.expand(2, -1))[:1]
        if self._product is not None:
            y: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
            return y
        return torch.nn.functional.linear(x, self._weight, self._bias)

    def _is_one_row_exact(self, dtype: torch.dtype) -> bool:
        """Whether one row has the bits that it has among others. In float32 most results show another order."""
        if self._product is None:
            return False
        if dtype == torch.bfloat16:
            return _is_one_bfloat16_row_exact()
        x = torch.randn(2, self.in_features, generator=torch.Generator().manual_seed(0))
        alone, together = (self._product(rows, self._weight, None, "none", [], "") for rows in (x[:1], x))
        return torch.equal(alone, together[:1])


@functools.cache
def _is_one_bfloat16_row_exact() -> bool:
    """As PackedLinear._is_one_row_exact, on 2^17 results: one in 2,000 to 20,000 shows another order of addition."""
    weight, x = (torch.randn(n, 1024, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (512, 256))
    product = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    one_by_one = torch.cat([product(row, packed, None, "none", [], "") for row in x.split(1)])
    return torch.equal(one_by_one, product(x, packed, None, "none", [], ""))


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
