"""Texts as long as a message may be: what is done to them before they are rejected takes little of the GIL."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

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
