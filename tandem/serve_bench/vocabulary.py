"""Which token ids made-up prompts consist of: ordinary ones, never special tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

_MIDDLE = (1 / 8, 1 / 2)
"""Where a vocabulary has no special tokens, in parts of its size: they lie at either end in all that we know."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids to draw from, and how they were found, for people."""

    ids: tuple[int, ...]
    origin: str

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError(f"{self.origin}: no ordinary token is left to make prompts of")

    @classmethod
    def of_tokenizer(cls, folder: Path, *, vocab_size: int | None = None, end_ids: frozenset[int]) -> Vocabulary:
        """All ids of the tokenizer.json in `folder` (or of that file) that are below `vocab_size`, but for added and
        special tokens. Raises ValueError that says what is wrong with the file."""
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            text = file.read_text(encoding="utf-8")
            added = {int(token["id"]) for token in json.loads(text)["added_tokens"]}
            known = tokenizers.Tokenizer.from_str(text).get_vocab(with_added_tokens=False).values()
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{file} is no tokenizer.json that can be read: {error}") from None
        within = known if vocab_size is None else (one for one in known if one < vocab_size)
        return cls(tuple(sorted(set(within) - added - end_ids)), f"of {file} without special tokens")

    @classmethod
    def middle(cls, vocab_size: int, *, end_ids: frozenset[int]) -> Vocabulary:
        """For a model whose tokenizer is not at hand."""
        begin, end = (int(part * vocab_size) for part in _MIDDLE)
        ids = tuple(one for one in range(begin, end) if one not in end_ids)
        return cls(ids, f"{begin} to {end - 1}, where no vocabulary has special tokens")

    def draw(self, count: int, rng: np.random.Generator) -> tuple[int, ...]:
        """So many ids, each as likely as any other."""
        return tuple(self.ids[place] for place in rng.integers(len(self.ids), size=count).tolist())

    def at(self, places: Sequence[int]) -> tuple[int, ...]:
        """The ids at `places`, 0 to len(ids) - 1."""
        return tuple(self.ids[place] for place in places)
