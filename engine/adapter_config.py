"""What a LoRA adapter's folder says of it, in PEFT's form, and its digest. Free of torch."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import InvalidCheckpoint, UnsupportedModel, shown

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_UNSUPPORTED: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "fan_in_fan_out": False,
    "kasa_config": None,
    "layer_replication": None,
    "lora_bias": False,
    "modules_to_save": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
}
"""Fields that change what an adapter computes, and the value with which they do not; so does an empty one."""
_MAX_ALPHA = 1e30
"""A larger one, such as an integer of 400 digits, is no float32."""
_CHANGES_WEIGHTS = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Beginnings of `init_lora_weights` with which training also changed the model's own weights."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """One adapter's adapter_config.json."""

    name: str
    folder: Path
    alpha: float
    is_rank_stabilised: bool = False
    max_rank: int = 8
    """As the config has it, for vLLM. The built-in engine takes ranks from the tensors."""

    @classmethod
    def read(cls, name: str, folder: str | Path) -> AdapterConfig:
        """Raises UnsupportedModel or InvalidCheckpoint, naming the adapter, the field and what is supported."""
        folder = Path(folder)
        title = f"adapter {shown(name)}"
        if not _NAME.fullmatch(name):
            raise UnsupportedModel(f"{title}: a name is 1..128 of [A-Za-z0-9._-]")
        raw = _read_object(folder / CONFIG, title)
        if not (folder / WEIGHTS).is_file():
            raise InvalidCheckpoint(
                f"{title}: {folder} has no {WEIGHTS}, and other formats (*.bin, *.pt) are never loaded; PEFT's "
                "save_pretrained writes it"
            )
        required = {"peft_type": "LORA", "bias": "none"}
        for field, value in required.items():
            if raw.get(field, value) != value:
                raise UnsupportedModel(f"{title}: {CONFIG}: {field} {shown(raw[field])} is not supported; {value} is")
        for field, neutral in _UNSUPPORTED.items():
            if raw.get(field) and raw[field] != neutral:
                raise UnsupportedModel(f"{title}: {CONFIG}: {field} {shown(raw[field])} is not supported")
        initial = raw.get("init_lora_weights")
        if isinstance(initial, str) and initial.lower().startswith(_CHANGES_WEIGHTS):
            raise UnsupportedModel(
                f"{title}: {CONFIG}: init_lora_weights {shown(initial)} changed the model's own weights too; "
                "PEFT's save_pretrained(path_initial_model_for_weight_conversion=…) makes a plain adapter of it"
            )
        alpha = raw.get("lora_alpha", 8)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _MAX_ALPHA:
            raise InvalidCheckpoint(f"{title}: {CONFIG}: lora_alpha is {shown(alpha)}; it must be a number")
        patterns = raw.get("rank_pattern")
        ranks = [raw.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
        max_rank = max((rank for rank in ranks if isinstance(rank, int)), default=8)
        return cls(name, folder, float(alpha), bool(raw.get("use_rslora")), max_rank)

    @property
    def title(self) -> str:
        """For messages."""
        return f"adapter {shown(self.name)}"

    def scale(self, rank: int) -> float:
        """Of what matrices of this rank add: alpha / rank, or alpha / sqrt(rank) (arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def adapters_digest(folders: Mapping[str, str]) -> str:
    """SHA-256 in hex over the adapters' names, what their configs decide and their tensors' files."""
    digest = hashlib.sha256()
    for name in sorted(folders):
        config = AdapterConfig.read(name, folders[name])
        with (config.folder / WEIGHTS).open("rb") as file:
            weights = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{name}\n{config.alpha!r}\n{config.is_rank_stabilised}\n{weights}\n".encode())
    return digest.hexdigest()


def _read_object(path: Path, title: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidCheckpoint(f"{title}: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{title}: {path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"{title}: {path} is not a JSON object")
    return value
