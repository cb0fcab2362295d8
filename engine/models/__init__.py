"""Models: the checkpoint's config (free of torch), the decoder and its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.models.config import ModelConfig
    from engine.models.llama import LlamaModel


def load_model(config: ModelConfig, engine: EngineConfig) -> LlamaModel:
    """The decoder that `config` describes, with the checkpoint's weights or dummy ones.

    Raises InvalidCheckpoint for files that do not fit, UnsupportedModel for an attention backend that cannot run it.
    """
    import torch  # late: `config` is used without torch

    from engine.attention import select_backend
    from engine.models.llama import LlamaModel
    from engine.models.weights import DummyWeights, SafetensorsWeights, WeightSource

    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.resolve_dtype(engine.dtype)]
    device = torch.device(engine.device)
    attention = select_backend(
        engine.attention_backend, block_size=engine.block_size, head_dim=config.head_dim, dtype=dtype, device=device
    )
    weights: WeightSource
    if engine.load_format == "dummy":
        weights = DummyWeights(engine.seed, dtype=dtype, device=device)
    else:
        weights = SafetensorsWeights(engine.model, dtype=dtype, device=device)
    return LlamaModel(config, weights, dtype=dtype, device=device, attention=attention)
