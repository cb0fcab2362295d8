"""Pieces of text: together the whole, none ending inside a character, at a constant cost per token. Stop strings
against a slow definition; replay. Rows 36-39 and 44 of the bad-input catalogue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer, OutputProcessor, TextDelta
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


def test_a_text_that_begins_without_a_space_keeps_the_later_ones() -> None:
    tokenizer = byte_fallback()
    word = tokenizer.encode("world", add_special_tokens=False)
    for start in ("\n", "\U0001f9d1"):
        ids = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in start.encode()]
        assert "".join(pieces(tokenizer, [*ids, *word])) == f"{start} world"


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


class WordsAndBytes:
    """A vocabulary without a table of bytes: ids below 256 are bytes, others words, each with a space before it unless
    it comes first; 300 has no text, and 400 is special."""

    special_ids = frozenset({400})
    token_bytes = None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        parts = [i for i in token_ids if i != 300 and not (skip_special_tokens and i == 400)]
        data = b"".join(bytes([i]) if i < 256 else b" %d" % i for i in parts)
        return data.decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (list("a\u00e9\U0001f600b".encode()), ["a", "", "\u00e9", "", "", "", "\U0001f600", "b", ""]),
        ([301, 300, 302], ["301", "", " 302", ""]),
        ([400, 301, 302], ["400", " 301", " 302", ""]),
        ([255] * 40, [*[""] * 31, "\ufffd" * 32, *[""] * 7, "", "\ufffd" * 8]),
    ],
    ids=["characters of several bytes", "without text", "special", "no characters"],
)
def test_pieces_of_a_vocabulary_without_bytes_are_whole_and_bounded(ids: list[int], expected: list[str]) -> None:
    tokenizer: Any = WordsAndBytes()
    assert pieces(tokenizer, ids, skip=False) == expected


def test_a_character_that_a_long_prompt_begins_is_completed() -> None:
    tokenizer = byte_level()
    *begun, last = tokenizer.encode("\U0001f9d1")
    prompt = [*tokenizer.encode("hello world " * 9), *begun, *sorted(tokenizer.special_ids)]
    assert IncrementalDetokenizer(tokenizer, prompt=prompt).push([last]) == "\U0001f9d1"


def test_a_text_behind_special_tokens_alone_begins_as_any_text_does() -> None:
    tokenizer = byte_fallback()
    bos, *output = tokenizer.encode("yes")
    assert IncrementalDetokenizer(tokenizer, prompt=[bos]).push(output) == "yes"


def test_each_byte_that_is_no_character_is_replaced_with_byte_fallback() -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "\U0001f600".encode()[:3]]
    assert "".join(pieces(tokenizer, ids)) == FALLBACK.decode(ids) == "\ufffd" * 3


def test_the_cost_of_a_token_does_not_grow() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("hello w\u00f6rld \U0001f600 " * 200) * 10
    detokenizer = IncrementalDetokenizer(tokenizer)
    start = time.process_time()
    for token_id in ids:
        detokenizer.push((token_id,))
    assert (time.process_time() - start) / len(ids) < 50e-6


# Stop strings

TOKENIZERS = st.sampled_from([byte_level, byte_fallback]).map(lambda make: make())


def run(
    ids: list[int], *, cuts: list[int] | None = None, tokenizer: Tokenizer | None = None, **fields: Any
) -> list[TextDelta]:
    """Push `ids` in pieces of the sizes in `cuts` (then one by one), and end by length."""
    processor = OutputProcessor(tokenizer or byte_level(), SamplingParams(max_tokens=None, **fields))
    deltas, i, sizes = [], 0, list(cuts or [])
    while i < len(ids):
        size = sizes.pop(0) if sizes else 1
        deltas.append(processor.push(ids[i : i + size]))
        i += size
    deltas.append(processor.push([], finish_reason="length"))
    return deltas


def text_of(deltas: list[TextDelta]) -> str:
    offset = 0
    for delta in deltas:
        assert delta.text_offset == offset
        offset += len(delta.text)
    return "".join(delta.text for delta in deltas)


def slow_cut(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], min_tokens: int) -> tuple[str, str | None]:
    """Definition: the text before the stop string that is complete first, the longest of those complete together."""
    seen = ""
    for count in range(1, len(ids) + 1):
        # The texts of this test hold no U+FFFD: one at the end is the beginning of a character
        text = tokenizer.decode(ids[:count]).rstrip("\ufffd")
        for end in range(len(seen) + 1, len(text) + 1):
            found = [s for s in stop if text[:end].endswith(s)]
            if found and count >= min_tokens:
                longest = max(found, key=len)
                return text[: end - len(longest)], longest
        seen = text
    return tokenizer.decode(ids), None


TEXT = "hello world! STOP here. stop there\nEND of the END"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (("STOP",), "hello world! ", "STOP"),
        # row 38: a prefix of another; the one that is complete first ends the text
        (("STOP here", "STOP"), "hello world! ", "STOP"),
        (("wor", "world"), "hello ", "wor"),
        (("d!", "world!"), "hello ", "world!"),
        (("ello w", "lo"), "hel", "lo"),
        # inside one token, across many
        (("l",), "he", "l"),
        (("rld! STOP he",), "hello wo", "rld! STOP he"),
        (("END",), "hello world! STOP here. stop there\n", "END"),
        (("ENDE", "nothing"), TEXT, None),
        (("the END",), "hello world! STOP here. stop there\nEND of ", "the END"),
    ],
)
def test_the_text_is_cut_exactly_and_nothing_of_the_stop_string_leaks(
    stop: tuple[str, ...], text: str, reason: str | None
) -> None:
    for cuts in (None, [3, 1, 4, 1, 5], [1000]):
        deltas = run(byte_level().encode(TEXT), stop=stop, cuts=cuts)
        assert text_of(deltas) == text
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (("stop", reason) if reason else ("length", None))


def test_a_stop_string_is_shown_on_request() -> None:
    deltas = run(byte_level().encode(TEXT), stop=("STOP",), include_stop_str_in_output=True)
    assert text_of(deltas) == "hello world! STOP"


@pytest.mark.parametrize("stop", ["\ufffd", "\0", "\u0301", "\u0645\u0631", "\U0001f600", "\u6f22"])
def test_odd_stop_strings(stop: str) -> None:
    # row 39, and a character whose bytes are several tokens
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode(f"ab{stop}cd", add_special_tokens=False)
        deltas = run(ids, stop=(stop,), tokenizer=tokenizer)
        assert text_of(deltas) == "ab"
        assert deltas[-1].stop_reason == stop


@pytest.mark.parametrize(("min_tokens", "text"), [(3, "a"), (4, "abc")])
def test_a_stop_string_counts_that_the_last_of_min_tokens_completes(min_tokens: int, text: str) -> None:
    tokenizer = byte_level()
    ids = [token_id for char in "abc" for token_id in tokenizer.encode(char)]
    assert text_of(run(ids, stop=("bc",), min_tokens=min_tokens)) == text
    processor = OutputProcessor(tokenizer, SamplingParams(stop=("bc",), min_tokens=min_tokens))
    assert (processor.replay(ids) is None) == (text == "a")


def test_what_was_nearly_a_stop_string_is_no_part_of_one() -> None:
    ids = [token_id for char in "aaacab" for token_id in byte_level().encode(char)]
    assert text_of(run(ids, stop=("aaab",))) == "aaacab"


def test_half_a_character_at_the_end_may_be_the_stop_string() -> None:
    ids = byte_level().encode("ab\U0001f9d1")[:-2]
    deltas = run(ids, stop=("\ufffd",))
    assert text_of(deltas) == "ab"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "\ufffd")


def test_ids_after_a_stop_string_are_not_part_of_the_output() -> None:
    tokenizer = byte_level()
    ids, more = tokenizer.encode("hello STOP"), tokenizer.encode(" more text")
    processor = OutputProcessor(tokenizer, SamplingParams(stop=("STOP",)))
    delta = processor.push([*ids, *more])
    assert delta.num_tokens == len(ids)
    # STEP: what the core sent before it heard of the end is dropped
    late = processor.push(more, finish_reason="length")
    assert (late.text, late.num_tokens, late.finish_reason, late.stop_reason) == ("", 0, "stop", "STOP")


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    tokenizer = byte_level()
    processor = OutputProcessor(tokenizer, SamplingParams(stop=("xyz",)))
    seen = [processor.push(tokenizer.encode(char)).text for char in "axyxyb"]
    assert seen == ["a", "", "", "xy", "", "xyb"]


@settings(max_examples=200)
@given(
    tokenizer=TOKENIZERS,
    text=st.text("ab\u00e9", max_size=30),
    stop=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=4).map(tuple),
    cuts=st.lists(st.integers(1, 5), max_size=10),
    min_tokens=st.integers(0, 6),
)
def test_any_stop_strings_cut_as_the_definition_says(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], cuts: list[int], min_tokens: int
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = run(ids, stop=stop, cuts=cuts, min_tokens=min_tokens, tokenizer=tokenizer)
    expected, reason = slow_cut(tokenizer, ids, stop, min_tokens)
    assert text_of(deltas) == expected
    assert deltas[-1].stop_reason == reason


@settings(max_examples=200)
@given(
    tokenizer=TOKENIZERS,
    ids=st.lists(st.integers(0, 480), max_size=40),
    stop=st.lists(st.text("abe\ufffd t", min_size=1, max_size=3), max_size=3).map(tuple),
    cut=st.integers(0, 40),
    prompt=st.lists(st.integers(0, 480), max_size=12),
    min_tokens=st.integers(0, 40),
)
def test_a_stream_goes_on_elsewhere_with_the_same_pieces(
    tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], cut: int, prompt: list[int], min_tokens: int
) -> None:
    params = SamplingParams(stop=stop, max_tokens=None, min_tokens=min_tokens)
    # STEP: one instance to the end
    first = OutputProcessor(tokenizer, params, prompt=prompt)
    deltas = [first.push([i]) for i in ids] + [first.push([], finish_reason="length")]
    # STEP: another replays `cut` ids at once and goes on
    second = OutputProcessor(tokenizer, params, prompt=prompt)
    replayed = second.replay(ids[:cut])
    assert (replayed is None) == any(delta.finish_reason for delta in deltas[: len(ids[:cut])])
    if replayed is not None:
        assert replayed == text_of(deltas[: len(ids[:cut])])
        rest = [second.push([i]) for i in ids[cut:]] + [second.push([], finish_reason="length")]
        assert rest == deltas[len(ids[:cut]) :]
    text_of(deltas)


@given(
    ids=st.lists(st.sampled_from("ab"), max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple),
    cuts=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    min_tokens=st.integers(0, 30),
)
def test_what_is_replayed_in_parts_stops_where_what_is_pushed_does(
    ids: list[str], stop: tuple[str, ...], cuts: tuple[int, int], min_tokens: int
) -> None:
    tokenizer = byte_level()
    whole = [tokenizer.encode(char)[0] for char in ids]
    first, last = sorted(cuts)
    params = SamplingParams(stop=stop, max_tokens=None, min_tokens=min_tokens)
    pushed, replayed = OutputProcessor(tokenizer, params), OutputProcessor(tokenizer, params)
    for part in (whole[:first], whole[first:last]):
        delta = pushed.push(part)
        if delta.finish_reason is not None:
            assert replayed.replay(part) is None
            return
        assert replayed.replay(part) == delta.text
    assert [replayed.push([i]) for i in whole[last:]] == [pushed.push([i]) for i in whole[last:]]


@pytest.mark.parametrize("min_tokens", [0, 10**5])
def test_what_a_client_says_it_has_is_replayed_in_little_time(min_tokens: int) -> None:
    """It may be as much as the context has, for a thread that others need and for the event loop of an instance."""
    tokenizer = byte_level()
    [letter], [bad, *_] = tokenizer.encode("a"), tokenizer.encode("\U0001f9d1")
    stop = tuple("a" * 100 + char for char in "bcdefghijklmnopq")
    params = SamplingParams(stop=stop, max_tokens=None, min_tokens=min_tokens)
    begun_s = time.thread_time()
    OutputProcessor(tokenizer, params).push([letter] * 2000)
    pushed_s, begun_s = time.thread_time() - begun_s, time.thread_time()
    OutputProcessor(tokenizer, params).replay([letter, bad] * 1000)
    assert time.thread_time() - begun_s < pushed_s / 2


def test_hand_over_keeps_the_held_text_for_the_next_instance() -> None:
    tokenizer = byte_level()
    params = SamplingParams(stop=("hello you",))
    ids = tokenizer.encode("hello world")
    prefill = OutputProcessor(tokenizer, params)
    first = prefill.push(ids[:1], finish_reason="hand_over")
    decode = OutputProcessor(tokenizer, params)
    decode.push(ids[:1])
    rest = [decode.push([i]) for i in ids[1:]] + [decode.push([], finish_reason="length")]
    assert text_of([first, *rest]) == "hello world"


def test_the_stop_tokens_text_is_hidden_unless_asked_for() -> None:
    tokenizer = byte_level()
    [full_stop], [eos] = tokenizer.encode("."), tokenizer.encode("<|im_end|>")
    ids = tokenizer.encode("hello", add_special_tokens=False)
    for last, include, skip, text in [
        (full_stop, False, True, "hello"),
        (full_stop, True, True, "hello."),
        (eos, False, True, "hello"),
        (eos, False, False, "hello"),
        (eos, True, False, "hello<|im_end|>"),
    ]:
        params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
        processor = OutputProcessor(tokenizer, params)
        delta = processor.push([*ids, last], finish_reason="stop", stop_token_id=last if last == full_stop else None)
        assert (delta.text, delta.num_tokens, delta.finish_reason) == (text, len(ids) + 1, "stop")
        assert delta.stop_reason == (full_stop if last == full_stop else None)


def test_without_detokenising_there_are_only_ids() -> None:
    processor = OutputProcessor(byte_level(), SamplingParams(detokenize=False))
    assert processor.push([1, 2, 3], finish_reason="length") == TextDelta("", 0, 3, "length")
