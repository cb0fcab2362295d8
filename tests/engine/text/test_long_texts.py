"""Texts as long as a message may be: what is done to them before they are rejected takes little of the GIL."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from engine.errors import InvalidRequest
from engine.text.token_bytes import NORMALIZED_CHARS
from engine.text.tokenizer import Tokenizer, longest_of
from tests.tokenizer_builders import CHATML, byte_level_backend


def cpu_s(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def with_special_tokens(number: int) -> Tokenizer:
    """As Mistral's, which have a thousand of them."""
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(f"<SPECIAL_{index}>", special=True) for index in range(number)])
    return Tokenizer(backend.to_str(), {}, {"default": CHATML})


@pytest.mark.parametrize(
    "value", ["<SPECIAL_" * 60_000, [""] * 20_000], ids=["beginnings of special tokens", "many short strings"]
)
def test_a_thousand_special_tokens_cost_a_chat_hardly_more_than_a_few(value: Any) -> None:
    def encoding_s(num_special: int) -> float:
        tokenizer, messages = with_special_tokens(num_special), [{"role": "user", "content": "x"}]
        return cpu_s(lambda: tokenizer.encode_chat(messages, template_variables={"unused": value}))

    assert encoding_s(1000) < 5 * encoding_s(2)


@given(st.sets(st.text("ab.|", min_size=1, max_size=4), min_size=1), st.text("ab.|"))
def test_the_longest_of_several_words_is_found_at_each_place(words: set[str], text: str) -> None:
    one_after_the_other = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    assert re.findall(longest_of(sorted(words)), text) == re.findall(one_after_the_other, text)


def normalizing() -> Tokenizer:
    """As Qwen's."""
    backend = byte_level_backend()
    backend.normalizer = normalizers.NFC()
    return Tokenizer(backend.to_str(), {})


def test_a_text_that_cannot_fit_is_normalized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, lengths = normalizing(), list[int]()
    table = tokenizer.token_bytes
    assert table is not None
    table.min_tokens("")  # which reads the vocabulary
    normalize = table._backend.normalizer.normalize_str

    def recorded(text: str) -> str:
        lengths.append(len(text))
        return str(normalize(text))

    monkeypatch.setattr(table, "_backend", SimpleNamespace(normalizer=SimpleNamespace(normalize_str=recorded)))
    with pytest.raises(InvalidRequest, match="limit 4096"):
        tokenizer.encode("漢" * 100_000, max_tokens=4096)
    assert sum(lengths) == 100_000
    assert max(lengths) == NORMALIZED_CHARS


@pytest.mark.parametrize("unit", ["e\u0301", "\u1100\u1161\u11a8", "\u03b1\u0345\u0301\u0313", "\u0344", "漢"])
def test_a_letter_that_is_cut_between_two_parts_does_not_count_twice(unit: str) -> None:
    tokenizer = normalizing()
    for num_before in range(len(unit)):
        text = "x" * num_before + unit * (2 * NORMALIZED_CHARS // len(unit))
        ids = tokenizer.encode(text)
        assert tokenizer.encode(text, max_tokens=len(ids)) == ids
