"""Words that must not appear in an output, as the token sequences that must not: at the edge, where a tokenizer is.

vLLM's reading of a word: its tokens at the beginning of a text, and those after a space where they are as many and
begin differently (a word inside a sentence). Other spellings of it are other words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.errors import InvalidRequest, shown
from engine.field_checks import check_text
from engine.sampling_params import SamplingParams

MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
_ALLOWED = f"at most {MAX_BAD_WORDS} words of 1..{MAX_BAD_WORD_BYTES} bytes"

Encode = Callable[[str], Sequence[int]]
"""Text to ids, without the special tokens that begin a prompt."""


def with_bad_word_ids(params: SamplingParams, encode: Encode) -> SamplingParams:
    """`params` with the sequences of its `bad_words` added to `bad_word_ids`. Raises InvalidRequest."""
    if not params.bad_words:
        return params
    _check_words(params.bad_words)
    ids = [*params.bad_word_ids]
    for word in params.bad_words:
        ids += _sequences(word.lstrip(), encode)
    return msgspec.structs.replace(params, bad_word_ids=tuple(dict.fromkeys(ids)))


def _sequences(word: str, encode: Encode) -> list[tuple[int, ...]]:
    first, spaced = tuple(encode(word)), tuple(encode(f" {word}"))
    if not first:
        raise InvalidRequest("bad_words", f"{shown(word)} has no tokens", "words that the model can write")
    is_another = len(spaced) == len(first) and spaced[0] != first[0]
    return [first, spaced] if is_another else [first]


def _check_words(words: Any) -> None:
    if not isinstance(words, tuple):
        raise InvalidRequest("bad_words", f"{shown(words)} is not a list of strings", _ALLOWED)
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest("bad_words", f"{len(words)} words", _ALLOWED)
    for index, word in enumerate(words):
        check_text("bad_words", index, word, _ALLOWED, MAX_BAD_WORD_BYTES)
        if not word.strip():
            raise InvalidRequest("bad_words", f"bad_words[{index}] is blank", _ALLOWED)
