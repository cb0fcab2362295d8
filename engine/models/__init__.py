"""Models: the checkpoint's config (free of torch), the interface of a decoder, native decoders and their weights, and
those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.errors import UnsupportedModel, to_install

if TYPE_CHECKING:
    import torch

    from engine.attention import AttentionMetadata
    from engine.config import EngineConfig
    from engine.models.config import DecoderConfig
    from engine.partition import Parallelism, Part
    from engine.ranks import RankGroup, Stages


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The tokens of a step whose hidden states are needed: the last ones of some requests, one at least."""

    rows: torch.Tensor
    """int64 [num_rows]: their places in the step."""
    metadata: AttentionMetadata
    """As if these were the step's only queries; its slot_mapping is that of all tokens."""


class Decoder(Protocol):
    """Owns the weights; the caller owns the KV cache and the step's metadata. Used by one thread."""

    attention_name: str
    """Name of the attention backend."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        needed: LastTokens | None = None,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step: token_ids, positions int [num_tokens] -> final hidden states [num_tokens, hidden_size].

        Keys and values of the step are written into kv_cache at metadata.slot_mapping. With `needed` the hidden states
        of other tokens may be anything. `adapters`, int64 [num_tokens]: the index of each token's adapter among the
        decoder's, by name, or their number where it has none; None: no token has one.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32 [rows, vocab_size]."""


def read_config(folder: Path | str, model_impl: str = "auto") -> DecoderConfig:
    """The decoder in `folder` as `model_impl` computes it: native, transformers, or auto, which is native if it can be.

    Raises UnsupportedModel, which says what would run it. Imports transformers, and torch with it, for those alone.
    """
    from engine.models.config import ModelConfig
    from engine.models.weight_codes import are_mxfp4, read_codes

    folder = Path(folder)
    codes = None if are_mxfp4(folder) else read_codes(folder)
    native_error = ""
    if model_impl != "transformers":
        try:
            return ModelConfig.from_folder(folder)
        except UnsupportedModel as error:
            if model_impl == "native":
                raise
            native_error = f"{error}, and "
    if codes is not None:
        raise UnsupportedModel(f"{native_error}a quantised checkpoint is not supported by the transformers backend")
    try:
        import engine.models.transformers_backend as transformers_backend
    except ImportError:
        raise UnsupportedModel(
            f"{native_error}the transformers backend is not installed; it runs most decoders: " + to_install("models")
        ) from None
    return transformers_backend.read_config(folder)


def check_ranks(config: DecoderConfig, parallelism: Parallelism) -> None:
    """Raises UnsupportedModel where the ranks cannot divide the decoder."""
    from engine.models.config import ModelConfig

    if parallelism.num_ranks == 1:
        return
    if not isinstance(config, ModelConfig):
        raise UnsupportedModel(
            f"{parallelism.name} above 1 is supported for native models; set it to 1 with the transformers backend"
        )
    parallelism.check(config)


def check_adapters(config: DecoderConfig | None, folders: Mapping[str, str]) -> None:
    """Raises UnsupportedModel or InvalidCheckpoint where the decoder (None: vLLM's) takes no LoRA adapters, or their
    folders, by name, do not say what is supported. Their tensors are not read."""
    from engine.adapter_config import AdapterConfig

    if folders and config is not None and config.backend != "native":
        raise UnsupportedModel("lora_adapters are supported for native models, not by the transformers backend")
    for name, folder in folders.items():
        AdapterConfig.read(name, folder)


def load_model(
    config: DecoderConfig,
    engine: EngineConfig,
    *,
    part: Part | None = None,
    ranks: RankGroup | None = None,
    stages: Stages | None = None,
) -> Decoder:
    """The decoder that `config` describes, with the checkpoint's weights or dummy ones; `part` of it, computed together
    with `ranks` of its stage and the `stages` next to it, None: all of it.

    Raises InvalidCheckpoint for files that do not fit, UnsupportedModel for an attention backend that cannot run it.
    """
    import torch  # late: `config` is used without torch

    from engine.attention import select_backend
    from engine.models.adapters import Adapters
    from engine.models.config import ModelConfig
    from engine.models.linear import LinearSource
    from engine.models.llama import LlamaModel
    from engine.models.weight_codes import are_mxfp4, read_codes
    from engine.models.weights import DummyWeights, PartWeights, SafetensorsWeights, WeightSource
    from engine.partition import Parallelism
    from engine.ranks import OneRank, OneStage

    dtype: torch.dtype = getattr(torch, config.resolve_dtype(engine.dtype))
    device = torch.device(engine.device)
    attention = select_backend(
        engine.attention_backend,
        block_size=engine.block_size,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
        softcap=config.softcap,
        has_sinks=config.has_sinks,
    )
    dummy_seed = engine.seed if engine.load_format == "dummy" else None
    if not isinstance(config, ModelConfig):
        from engine.models.transformers_backend import TransformersModel

        check_adapters(config, engine.lora_adapters)
        return TransformersModel(
            config,
            Path(engine.model),
            dtype=dtype,
            device=device,
            attention=attention,
            dummy_seed=dummy_seed,
            quantization=engine.quantization,
        )
    weights: WeightSource
    if dummy_seed is None:
        folder = Path(engine.model)
        codes = None if are_mxfp4(folder) else read_codes(folder)
        experts = None if config.experts is None else config.experts.names
        weights = SafetensorsWeights(folder, dtype=dtype, device=device, codes=codes, experts=experts)
    else:
        weights = DummyWeights(dummy_seed, dtype=dtype, device=device)
    if part is not None:
        weights = PartWeights(weights, part, config)
    part, adapters = part or Parallelism().part(0, config), None
    if engine.lora_adapters:
        adapters = Adapters(engine.lora_adapters, part, config, dtype=dtype, device=device)
    return LlamaModel(
        config,
        LinearSource(weights, dtype, engine.quantization),
        device=device,
        attention=attention,
        part=part,
        ranks=ranks or OneRank(),
        stages=stages or OneStage(),
        adapters=adapters,
    )
