"""What is served: the model's name, tokenizer and defaults from its folder, and the limits that the instances tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.generation_config import GenerationDefaults
from engine.identity import tokenizer_digest
from engine.tokenizer import Tokenizer
from router.pools.instances import InstanceInfo


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the folder says. No weights and no torch are needed for it."""

    name: str
    tokenizer: Tokenizer | None
    """None: the folder has none (random weights, in benchmarks); prompts are then token ids only."""
    defaults: GenerationDefaults
    tokenizer_digest: str

    @classmethod
    def from_folder(cls, folder: str | Path, name: str | None = None) -> ServedModel:
        """Reads the tokenizer and generation_config.json; raises engine.errors.UnsupportedModel."""
        tokenizer = Tokenizer.from_folder(folder) if (Path(folder) / "tokenizer.json").is_file() else None
        defaults = GenerationDefaults.from_folder(folder, tokenizer)
        return cls(name or Path(folder).resolve().name, tokenizer, defaults, tokenizer_digest(Path(folder)))


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What every decode instance can take, so that a valid request is valid wherever it goes."""

    max_model_len: int
    vocab_size: int

    @classmethod
    def of(cls, infos: Sequence[InstanceInfo]) -> ModelLimits | None:
        """The tightest of `infos`; None when there are none."""
        if not infos:
            return None
        return cls(min(info.max_model_len for info in infos), min(info.vocab_size for info in infos))
