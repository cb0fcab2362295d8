"""Models: what config.json says (`config`, torch-free), the decoder, its weights. torch is imported when one loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import Device, Dtype, LoadFormat

if TYPE_CHECKING:
    from engine.models.config import ModelConfig
    from engine.models.llama import LlamaModel


def load_model(
    config: ModelConfig,
    *,
    folder: Path | str,
    dtype: Dtype,
    device: Device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    block_size: int = 16,
    attention_backend: str = "auto",
) -> LlamaModel:
    """Builds the decoder that `config` describes and fills it, from `folder` or with dummy weights.

    Raises InvalidCheckpoint for files that do not fit, UnsupportedModel for an attention backend that cannot run it.
    """
    import torch

    from engine.attention import select_backend
    from engine.models.llama import LlamaModel
    from engine.models.weights import DummyWeights, SafetensorsWeights, WeightSource

    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.resolve_dtype(dtype)]
    torch_device = torch.device(device)
    attention = select_backend(
        attention_backend, block_size=block_size, head_dim=config.head_dim, dtype=torch_dtype, device=torch_device
    )
    weights: WeightSource
    if load_format == "dummy":
        weights = DummyWeights(seed, dtype=torch_dtype, device=torch_device)
    else:
        weights = SafetensorsWeights(folder, dtype=torch_dtype, device=torch_device)
    return LlamaModel(config, weights, dtype=torch_dtype, device=torch_device, attention=attention)
