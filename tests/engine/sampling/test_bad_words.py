"""Bad words become the token sequences that vLLM makes of them, within limits."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.sampling.params import SamplingParams, validate, with_bad_word_ids
from tests.tokenizer_builders import byte_level

VOCABULARY = {"cat": [5], " cat": [6], "dog": [7, 8], " dog": [9, 8], "fish": [3, 4], " fish": [10], "x": [2, 11]}


def encode(text: str) -> list[int]:
    return VOCABULARY.get(text, [2, 12])


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["cat"], [(5,), (6,)]),
        (["  cat"], [(5,), (6,)]),
        (["dog"], [(7, 8), (9, 8)]),
        (["fish"], [(3, 4)]),  # after a space it has fewer tokens
        (["x"], [(2, 11)]),  # after a space it begins alike
        (["cat", "cat", "x"], [(5,), (6,), (2, 11)]),
    ],
)
def test_a_word_is_banned_at_the_beginning_and_after_a_space(words: list[str], ids: list[tuple[int, ...]]) -> None:
    params = with_bad_word_ids(SamplingParams(bad_words=words), encode)  # type: ignore[arg-type]
    assert params.bad_word_ids == tuple(ids)
    assert params.bad_words == tuple(words)


def test_sequences_that_were_given_stay() -> None:
    params = SamplingParams(bad_words=("cat",), bad_word_ids=[[1, 2], [6]])  # type: ignore[arg-type]
    assert with_bad_word_ids(params, encode).bad_word_ids == ((1, 2), (6,), (5,))
    assert with_bad_word_ids(SamplingParams(), encode) == SamplingParams()


def test_a_real_tokenizer_gives_ids_whose_text_is_the_word() -> None:
    tokenizer = byte_level()
    params = with_bad_word_ids(
        SamplingParams(bad_words=("times", "漢字", "😀")), lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    assert {tokenizer.decode(ids).lstrip() for ids in params.bad_word_ids} == {"times", "漢字", "😀"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([""], "bad_words[0] is empty"),
        (["a", "  "], "bad_words[1] is blank"),
        (["a"] * 65, "65 words"),
        (["x" * 257], "has 257 characters"),
        (["é" * 129], "has 258 bytes"),
        (["a\ud800"], "not valid Unicode"),
        ([7], "not a string"),
        ("cat", "not a list"),
        (["nothing"], "no tokens"),
    ],
)
def test_words_out_of_bounds_are_refused_by_name(words: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        with_bad_word_ids(SamplingParams(bad_words=words), lambda text: [] if "nothing" in text else encode(text))
    assert refusal.value.field == "bad_words"
    assert says in str(refusal.value)


def check(**fields: Any) -> SamplingParams:
    return validate(SamplingParams(**fields), vocab_size=100, max_model_len=128, num_prompt_tokens=8)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[]], "bad_word_ids[0] has 0 ids"),
        ([[1], [2] * 301], "bad_word_ids[1] has 301 ids"),
        ([[1, 100]], "bad_word_ids[1]=100 out of range 0..99"),
        ([[-1]], "out of range"),
        ([1, 2], "not a list of lists"),
        ([[1]] * 257, "257 lists"),
    ],
)
def test_sequences_out_of_bounds_are_refused_by_name(ids: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check(bad_word_ids=ids)
    assert refusal.value.field == "bad_word_ids"
    assert says in str(refusal.value)


def test_words_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="requires a tokenizer"):
        check(bad_words=["cat"])


def test_allowed_ids_that_are_all_bad_words_leave_nothing() -> None:
    check(allowed_token_ids=[3, 4], bad_word_ids=[[3], [4, 4]])
    with pytest.raises(InvalidRequest, match="no token can be sampled"):
        check(allowed_token_ids=[3, 4], bad_word_ids=[[3], [4]])
    with pytest.raises(InvalidRequest, match="no token can be sampled"):
        check(allowed_token_ids=[3, 4], bad_word_ids=[[3]], stop_token_ids=[4], min_tokens=1)
