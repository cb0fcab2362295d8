"""A checkpoint's generation_config.json: EOS ids, and default sampling parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.errors import UnsupportedModel, shown
from engine.models.config import read_json
from engine.text.tokenizer import Tokenizer


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values from generation_config.json; None where it has none."""

    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the output: generation_config.json's, or config.json's where it has none, and the tokenizer's.

    A fine-tune often keeps its base model's files, while its chats end with the EOS of its tokenizer."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = msgspec.field(default=None, name="max_new_tokens")

    @classmethod
    def from_folder(
        cls, path: str | Path, tokenizer: Tokenizer | None = None, *, skips_tokenizer: bool = False
    ) -> GenerationDefaults:
        """Read a model's folder; `tokenizer`: the folder's, if it is loaded already. With `skips_tokenizer` it is read
        only if the other files have no EOS. Raises EngineError."""
        folder = Path(path)
        config = _read(folder / "generation_config.json")
        eos = _eos_ids("generation_config.json", config) or _eos_ids("config.json", _read(folder / "config.json"))
        if tokenizer is None and not (skips_tokenizer and eos) and (folder / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_folder(folder)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos = eos if tokenizer.eos_token_id in eos else (*eos, tokenizer.eos_token_id)
        try:
            return msgspec.convert({**config, "eos_token_ids": eos}, cls)
        except msgspec.ValidationError as error:
            raise UnsupportedModel(f"generation_config.json: {error}") from None

    def eos_ids_within(self, vocab_size: int) -> tuple[int, ...]:
        """Those within the model's vocabulary: the file may have been written for a larger one."""
        return tuple(token_id for token_id in self.eos_token_ids if 0 <= token_id < vocab_size)

    def sampling_fields(self) -> dict[str, float | int]:
        """Keyword arguments for `SamplingParams`, overridden by those of a request."""
        fields = msgspec.structs.asdict(self)
        del fields["eos_token_ids"]
        return {name: value for name, value in fields.items() if value is not None}


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _eos_ids(file: str, config: dict[str, Any]) -> tuple[int, ...]:
    """`eos_token_id`, an id or a list of ids, of a file's config or of its text model."""
    text, eos = config.get("text_config"), config.get("eos_token_id")
    if eos is None and isinstance(text, dict):
        eos = text.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    try:
        return msgspec.convert(ids, tuple[int, ...])
    except msgspec.ValidationError:
        raise UnsupportedModel(f"{file}: eos_token_id is {shown(eos)}; it must be an id or a list of ids") from None
