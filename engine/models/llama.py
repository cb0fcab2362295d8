"""The decoder shared by Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE and gpt-oss, with fused projections.

The families differ in biases, in the norm of query and key heads, in attention sinks and sliding windows, in RoPE and
in the layers with experts: data in ModelConfig.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.attention import AttentionBackend, AttentionMetadata
from engine.models import LastTokens
from engine.models.adapters import Adapters
from engine.models.config import ExpertsConfig, ModelConfig, RopeParameters
from engine.models.elementwise import CompiledElementwise, Elementwise, HeadNorm, HeadShape, elementwise_for
from engine.models.experts import CompiledExperts, Experts, SeparateExperts
from engine.models.linear import Linear, LinearSource, make_linear
from engine.models.weights import WeightSource
from engine.partition import Part
from engine.ranks import RankGroup, Stages


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    head_norm: HeadNorm | None
    output: Linear
    post_norm: torch.Tensor
    mlp: GatedMLP | SparseMLP
    sliding_window: int | None
    sinks: torch.Tensor | None


class LlamaModel:
    """One rank's part of the decoder: of the layers of its stage, its heads and features. Owns its weights; the caller
    owns the KV cache and the step's metadata. Used by one thread; all ranks of a stage make the same calls.

        embeddings on the first stage ─▶ its layers ─▶ hidden states ─▶ next stage … last stage ─▶ norm ─▶ logits
    """

    def __init__(
        self,
        config: ModelConfig,
        linears: LinearSource,
        *,
        device: torch.device,
        attention: AttentionBackend,
        part: Part,
        ranks: RankGroup,
        stages: Stages,
        adapters: Adapters | None = None,
    ) -> None:
        """`linears` and `adapters` have the tensors of `part`; `ranks` are those of its stage. Raises InvalidCheckpoint
        for a tensor that is missing, has the wrong shape or is not used, and UnsupportedModel for an adapter's that is
        not used."""
        linears = replace(linears, adapters=adapters)
        self.config = config
        self.dtype = linears.dtype
        self.device = device
        self.attention_name = attention.name
        self._attention = attention
        self._part = part
        self._ranks = ranks
        self._stages = stages
        self._adapters = adapters
        row_sizes = (config.hidden_size, *(len(part.share(size)) for size in config.intermediate_sizes))
        self._elementwise = elementwise_for(device, self.dtype, row_sizes=row_sizes, head_dim=config.head_dim)
        self._rope = RotaryEmbedding(config.rope, head_dim=config.head_dim, device=device)
        self._shape = HeadShape(len(part.share(config.num_heads)), len(part.kv_heads), config.head_dim)
        self._scale = config.head_dim**-0.5
        weights, vocab_shape = linears.weights, (config.vocab_size, config.hidden_size)
        is_tied = config.tie_word_embeddings
        if part.is_first_stage or (part.is_last_stage and is_tied):
            self._embedding = weights.take(_embedding_name(weights, is_tied=is_tied), vocab_shape)
        self._layers = [_take_layer(config, linears, self._elementwise, layer) for layer in part.layers]
        if part.is_last_stage:
            self._norm = weights.take("model.norm.weight", (config.hidden_size,))
            head = self._embedding if is_tied else weights.take("lm_head.weight", vocab_shape, is_kept=False)
            if is_tied and weights.has("lm_head.weight"):
                own = weights.take("lm_head.weight", vocab_shape, is_kept=False)
                head = head if torch.equal(own, head) else own  # a fine-tune's, which transformers does not tie either
            self._lm_head = make_linear(head)
        weights.finish(ignored=("rotary_emb.inv_freq",))  # a table in old checkpoints
        if adapters is not None:
            adapters.finish()

    @property
    def records_adapters(self) -> bool:
        """Whether the launches of a step do not depend on its adapters."""
        return self._adapters is not None and self._adapters.are_compiled

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        needed: LastTokens | None = None,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step: token_ids, positions int [num_tokens] -> final hidden states [num_tokens, hidden_size], 0 where not
        `needed`; before the last stage those that the next one gets.

        Keys and values of the step are written into kv_cache, which has the layers and heads of this rank, at
        metadata.slot_mapping. In the last layer that is all that other tokens than those `needed` are computed for.
        """
        if not self._part.is_last_stage:
            needed = None
        if self._adapters is not None:
            self._adapters.tokens = adapters
        elementwise, eps = self._elementwise, self.config.rms_norm_eps
        num_tokens = token_ids.shape[0]
        head_counts = [self._shape.num_heads, self._shape.num_kv_heads, self._shape.num_kv_heads]
        cos, sin = self._rope.cos_sin(positions)
        residual = self._first_hidden(token_ids)
        x: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(elementwise.add_rms_norm(x, residual, layer.input_norm, eps))
            elementwise.rotate(qkv, cos, sin, self._shape, layer.head_norm)
            query, key, value = qkv.view(num_tokens, -1, self._shape.head_dim).split_with_sizes(head_counts, dim=1)
            if needed is not None and index == len(self._layers) - 1:
                query, residual, metadata = query[needed.rows], residual[needed.rows], needed.metadata
                if self._adapters is not None and adapters is not None:
                    self._adapters.tokens = adapters[needed.rows]
            attended = self._attention.forward(
                query,
                key,
                value,
                kv_cache,
                layer=index,
                metadata=metadata,
                scale=self._scale,
                sliding_window=layer.sliding_window,
                sinks=layer.sinks,
            )
            x = self._ranks.sum(layer.output(attended.flatten(1)))
            x = self._ranks.sum(layer.mlp(elementwise.add_rms_norm(x, residual, layer.post_norm, eps)))
        hidden = self._last_hidden(x, residual)
        if needed is None:
            return hidden
        return hidden.new_zeros((num_tokens, hidden.shape[1])).index_copy_(0, needed.rows, hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] of the last stage -> float32 [rows, vocab_size]; only this rank's columns on other
        ranks than the stage's first."""
        return self._ranks.columns(self._lm_head(hidden.contiguous()), self.config.vocab_size).float()

    def _first_hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of the first layer here."""
        if self._part.is_first_stage:
            return self._embed(token_ids)
        return self._stages.receive(len(token_ids), self.config.hidden_size, self.dtype)

    def _last_hidden(self, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """After the last layer here, whose output is `x`. The sum has the bits that the next layer's norm makes of it
        on one stage: it is rounded to the element type there, too."""
        if self._part.is_last_stage:
            return self._elementwise.add_rms_norm(x, residual, self._norm, self.config.rms_norm_eps)
        assert x is not None
        residual += x
        self._stages.send(residual)
        return residual

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size]. A token's row is on one rank; the others add zeros."""
        rows = self._part.share(self.config.vocab_size)
        if len(rows) == self.config.vocab_size:
            return torch.nn.functional.embedding(token_ids, self._embedding)
        local = token_ids - rows.start
        is_elsewhere = (local < 0) | (local >= len(rows))
        embedded = torch.nn.functional.embedding(local.masked_fill(is_elsewhere, 0), self._embedding)
        return self._ranks.sum(embedded.masked_fill(is_elsewhere[:, None], 0))


def _embedding_name(weights: WeightSource, *, is_tied: bool) -> str:
    """A tied checkpoint may have the output layer alone: safetensors' `save_model` keeps one name of the two."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    return head if is_tied and weights.has(head) and not weights.has(embedding) else embedding


def _take_layer(config: ModelConfig, linears: LinearSource, elementwise: Elementwise, index: int) -> _Layer:
    weights, prefix = linears.weights, f"model.layers.{index}"
    hidden, head_dim = config.hidden_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention = f"{prefix}.self_attn"
    head_norm = None
    if config.qk_norm:
        head_norm = HeadNorm(
            query_weight=weights.take(f"{attention}.q_norm.weight", (head_dim,)),
            key_weight=weights.take(f"{attention}.k_norm.weight", (head_dim,)),
            eps=config.rms_norm_eps,
        )
    qkv = {f"{attention}.q_proj": query_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
    return _Layer(
        input_norm=weights.take(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=linears.take(qkv, hidden, has_bias=config.qkv_bias),
        head_norm=head_norm,
        output=linears.take({f"{attention}.o_proj": hidden}, query_size, has_bias=config.o_bias),
        post_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        mlp=_take_mlp(config, linears, elementwise, index),
        sliding_window=config.sliding_windows[index],
        sinks=weights.take(f"{attention}.sinks", (config.num_heads,)).float() if config.has_sinks else None,
    )


class RotaryEmbedding:
    """Rotates pair i of a head, elements (i, i + head_dim / 2), by position * inv_freq[i]. Equal to transformers' in
    float32. There is no table by position: a step needs the angles of its own tokens, once for all layers."""

    def __init__(self, rope: RopeParameters, *, head_dim: int, device: torch.device) -> None:
        self._inv_freq = _inverse_frequencies(rope, head_dim).to(device)
        self._attention_factor = _attention_factor(rope)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int [num_tokens] -> cos, sin float32 [num_tokens, head_dim / 2], attention factor included."""
        angles = positions.to(torch.float32)[:, None] * self._inv_freq
        if self._attention_factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self._attention_factor, angles.sin() * self._attention_factor


def _inverse_frequencies(rope: RopeParameters, head_dim: int) -> torch.Tensor:
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


def _attention_factor(rope: RopeParameters) -> float:
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


# The MLP of a layer


class GatedMLP:
    """down(silu(gate(x)) * up(x)), or with another function of gate and up."""

    def __init__(self, gate_up: Linear, activation: Callable[[torch.Tensor], torch.Tensor], down: Linear) -> None:
        """`activation`: [rows, 2 * n] -> [rows, n]."""
        self._gate_up = gate_up
        self._activation = activation
        self._down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._down(self._activation(self._gate_up(x)))


class SparseMLP:
    """The sum of a token's experts, weighted by the router's softmax over all experts."""

    def __init__(self, router: Linear, experts: Experts, *, num_per_token: int, normalises: bool) -> None:
        self._router = router
        self._experts = experts
        self._num_per_token = num_per_token
        self._normalises = normalises

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        chosen = self._experts.choose(self._router(x), self._num_per_token, normalises=self._normalises)
        return self._experts(x, *chosen)


def _take_mlp(config: ModelConfig, linears: LinearSource, elementwise: Elementwise, layer: int) -> GatedMLP | SparseMLP:
    prefix = f"model.layers.{layer}.mlp"
    if config.experts is not None and config.experts.layers[layer]:
        return _take_experts(config.hidden_size, config.experts, linears, elementwise, prefix)
    gate_up, down = _projections(prefix, _PROJECTIONS, config.hidden_size, config.intermediate_size)
    taken = linears.take(gate_up, config.hidden_size, has_bias=config.mlp_bias)
    last = linears.take(down, config.intermediate_size, has_bias=config.mlp_bias)
    return GatedMLP(taken, elementwise.silu_and_mul, last)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _projections(
    prefix: str, names: tuple[str, str, str], hidden: int, size: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Output features of the first two, and of the last. `size`: between them."""
    gate, up, down = (f"{prefix}.{name}" for name in names)
    return {gate: size, up: size}, {down: hidden}


def _take_experts(
    hidden: int, config: ExpertsConfig, linears: LinearSource, elementwise: Elementwise, prefix: str
) -> SparseMLP:
    weights, names, router, size = linears.weights, _PROJECTIONS, "gate", config.intermediate_size
    if has_bias := config.names == "gpt-oss":
        router = "router"
    elif config.names == "mixtral" and not weights.has(f"{prefix}.gate.weight"):  # a state dict's names
        prefix, names = prefix.replace(".mlp", ".block_sparse_moe"), ("w1", "w3", "w2")
    # The router is never quantised: it decides which experts compute.
    routing = make_linear(
        weights.take(f"{prefix}.{router}.weight", (config.num_experts, hidden), is_kept=False),
        weights.take(f"{prefix}.{router}.bias", (config.num_experts,), is_kept=False) if has_bias else None,
    )
    activation = elementwise.silu_and_mul
    if config.gate is not None:
        activation = partial(elementwise.clamped_gate, gate=config.gate)
    linears = replace(linears, adapters=None)  # an expert's rows are not the step's
    layers = [_projections(f"{prefix}.experts.{one}", names, hidden, size) for one in range(config.num_experts)]
    gate_ups, downs = ([*parts] for parts in zip(*layers, strict=True))
    can_group = linears.can_group(gate_ups, hidden) and linears.can_group(downs, size)
    experts: Experts
    if isinstance(elementwise, CompiledElementwise) and can_group:
        up = linears.take_grouped(gate_ups, hidden, has_bias=has_bias)
        down = linears.take_grouped(downs, size, has_bias=has_bias)
        experts = CompiledExperts(up, activation, down, num_experts=config.num_experts)
    else:
        take = partial(linears.take, has_bias=has_bias)
        experts = SeparateExperts([GatedMLP(take(up, hidden), activation, take(down, size)) for up, down in layers])
    return SparseMLP(routing, experts, num_per_token=config.num_per_token, normalises=config.normalises)
