"""Pieces of text: together the whole, none ending inside a character, at a constant cost per token."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer, OutputProcessor
from engine.text.token_bytes import decode_utf8
from engine.text.tokenizer import Tokenizer
from tests.tokenizer_builders import byte_fallback, byte_fallback_backend, byte_level, byte_level_backend, word_piece

MAKERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}
IDS = st.lists(st.integers(0, 500), max_size=60)
EMOJI_AND_MARKS = st.lists(
    st.sampled_from(
        ["\U0001f600", "\U0001f468\u200d\U0001f469", "e\u0301", "\u6f22", "\ufffd", "a", " ", "\0", "\u0645"]
    )
).map("".join)


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True, size: int = 1) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    texts = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*texts, detokenizer.finish()]


@settings(max_examples=150)
@given(ids=IDS, skip=st.booleans(), size=st.integers(1, 7), kind=st.sampled_from(sorted(MAKERS)))
def test_pieces_of_any_ids_are_together_what_decode_says(ids: list[int], skip: bool, size: int, kind: str) -> None:
    tokenizer = MAKERS[kind]()
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, ids, skip=skip, size=size)) == text


@settings(max_examples=150)
@given(ids=IDS, skip=st.booleans())
def test_byte_level_text_is_the_librarys_for_any_ids(ids: list[int], skip: bool) -> None:
    assert byte_level().decode(ids, skip_special_tokens=skip) == BACKEND.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150)
@given(text=EMOJI_AND_MARKS | st.text(), kind=st.sampled_from(sorted(MAKERS)))
def test_real_text_streams_without_a_replacement_character_of_ours(text: str, kind: str) -> None:
    tokenizer = MAKERS[kind]()
    ids = tokenizer.encode(text)
    got = pieces(tokenizer, ids)
    assert "".join(got) == text
    assert got[-1] == ""
    assert tokenizer.decode(ids) == {"byte_level": BACKEND, "byte_fallback": FALLBACK}[kind].decode(ids)


BACKEND, FALLBACK = byte_level_backend(), byte_fallback_backend()


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_a_character_comes_with_its_last_byte(kind: str) -> None:
    tokenizer = MAKERS[kind]()
    ids = tokenizer.encode("\U0001f9d1", add_special_tokens=False)
    if kind == "byte_fallback":
        ids = ids[1:]  # the space before the text
    assert len(ids) > 2
    assert pieces(tokenizer, ids) == [*[""] * (len(ids) - 1), "\U0001f9d1", ""]


def test_what_never_becomes_a_character_is_replaced_as_soon_as_that_is_certain() -> None:
    tokenizer = byte_level()
    first, second, *_ = tokenizer.encode("\U0001f9d1")
    [letter] = tokenizer.encode("a")
    assert pieces(tokenizer, [first, second]) == ["", "", "\ufffd"]
    assert pieces(tokenizer, [first, letter]) == ["", "\ufffda", ""]
    assert pieces(tokenizer, [second]) == ["\ufffd", ""]


def test_good_characters_of_a_run_of_bytes_do_not_wait_for_its_end() -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.token_id(f"<0x{b:02X}>") or 0 for b in "\U0001f600\U0001f601".encode()]
    assert pieces(tokenizer, ids) == ["", "", "", "\U0001f600", "", "", "", "\U0001f601", ""]


def test_only_the_texts_own_first_space_is_stripped() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("  hello", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == "  hello"
    # STEP: output that follows a prompt keeps the space between them
    prompt, output = tokenizer.encode("hello"), tokenizer.encode("world", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt=prompt)
    assert detokenizer.push(output) == " world"


def test_a_constrained_text_begins_anew_behind_any_prompt() -> None:
    """Its grammar knows nothing of the prompt."""
    tokenizer = byte_level()
    prompt, output = tokenizer.encode("\U0001f9d1")[:1], tokenizer.encode('{"a": "\U0001f9d1"}')
    assert constrained(tokenizer, prompt, output) == '{"a": "\U0001f9d1"}'
    # STEP: behind a prompt without a token of text the first space stays
    tokenizer = byte_fallback()
    bos, *output = tokenizer.encode("yes")
    assert bos in tokenizer.special_ids
    for prompt in ([bos], tokenizer.encode("hello")):
        assert constrained(tokenizer, prompt, output) == " yes"


def constrained(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    processor = OutputProcessor(tokenizer, SamplingParams(choice=("any",)), prompt=prompt)
    return processor.push(output, finish_reason="length").text


@settings(max_examples=50)
@given(st.binary(max_size=40), st.integers(0, 40))
def test_bytes_decode_the_same_however_they_are_cut(data: bytes, cut: int) -> None:
    text, rest = decode_utf8(data[:cut], per_byte=False, final=False)
    assert len(rest) < 4
    assert text + decode_utf8(rest + data[cut:], per_byte=False, final=True)[0] == data.decode(errors="replace")


def test_a_vocabulary_without_bytes_streams_too() -> None:
    tokenizer = word_piece()
    assert tokenizer.token_bytes is None
    ids = tokenizer.encode("hello singing worlds ! the stop")
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(pieces(tokenizer, [999] * 100 + ids)) == tokenizer.decode(ids)


def test_the_cost_of_a_token_does_not_grow() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("hello w\u00f6rld \U0001f600 " * 200) * 10
    detokenizer = IncrementalDetokenizer(tokenizer)
    start = time.process_time()
    for token_id in ids:
        detokenizer.push((token_id,))
    assert (time.process_time() - start) / len(ids) < 50e-6
