"""What a checkpoint's author set for generation: end-of-text ids, and sampling values for requests that name none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import UnsupportedModel
from engine.tokenizer import Tokenizer

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values from generation_config.json; None where the file says nothing."""

    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the output: generation_config.json's, else config.json's, else the tokenizer's."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """The file's max_new_tokens."""

    @classmethod
    def from_folder(cls, path: str | Path, tokenizer: Tokenizer | None = None) -> GenerationDefaults:
        """Read a model's folder. `tokenizer` spares loading it again where only it knows the EOS."""
        folder = Path(path)
        config = _read(folder / "generation_config.json")
        eos = _eos_ids(config) or _eos_ids(_read(folder / "config.json"))
        if not eos and (tokenizer is not None or (folder / "tokenizer.json").is_file()):
            tokenizer = tokenizer or Tokenizer.from_folder(folder)
            eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        fields = {name: config.get(name) for name in _SAMPLING}
        try:
            return msgspec.convert({"eos_token_ids": eos, "max_tokens": config.get("max_new_tokens"), **fields}, cls)
        except msgspec.ValidationError as error:
            raise UnsupportedModel(f"generation_config.json: {error}") from None

    def eos_ids_within(self, vocab_size: int) -> tuple[int, ...]:
        """Those that the model can sample: files made for a larger vocabulary name others."""
        return tuple(token_id for token_id in self.eos_token_ids if 0 <= token_id < vocab_size)

    def sampling_fields(self) -> dict[str, float | int]:
        """Keyword arguments for `SamplingParams`, to be overridden by what a request names itself."""
        return {name: value for name in (*_SAMPLING, "max_tokens") if (value := getattr(self, name)) is not None}


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """`eos_token_id`, an id or a list of ids, of a config or of its text model."""
    eos = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    return (eos,) if isinstance(eos, int) else tuple(eos or ())
