"""Reasoning at the beginning of a model's text, and that it is the same however the text is divided."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from engine.text.chat_output import CHAT_MARKS, HERMES, ReasoningParser, ToolCallParser
from engine.text.detokenizer import OutputProcessor
from engine.text.token_bytes import read_vocabulary
from engine.text.tokenizer import Tokenizer
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder

CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def parsed(pieces: Sequence[str], *, is_open: bool, is_exact: bool = False) -> tuple[str, str, int]:
    """Reasoning, content and the number of calls."""
    parser = ReasoningParser(ToolCallParser(HERMES, ["add"]), is_open=is_open, is_exact=is_exact)
    deltas = [parser.push(piece, final=number == len(pieces)) for number, piece in enumerate(pieces, 1)]
    names = [part.name for delta in deltas for part in delta.tool_calls if part.name]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas), len(names)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm, 5 < 6.\n</think>\n\nFive.", False, ("Hm, 5 < 6.", "Five.", 0)),
        ("Hm.\n</think>\n\nFive.", True, ("Hm.", "Five.", 0)),
        ("<think>\n\n</think>\n\nFive.", False, ("", "Five.", 0)),
        (f"<think>{CALL}</think>{CALL}", False, (CALL, "", 1)),
        (f"Hm.</think>Well: {CALL}", True, ("Hm.", "Well:", 1)),
        ("\n Five <think>no</think>", False, ("", "\n Five <think>no</think>", 0)),
        ("<thi", False, ("", "<thi", 0)),
        ("", False, ("", "", 0)),
        ("<think>Hm. </thin", False, ("Hm. </thin", "", 0)),
        ("It never ends \n", True, ("It never ends", "", 0)),
    ],
)
def test_reasoning_comes_before_the_answer(text: str, is_open: bool, expected: tuple[str, str, int]) -> None:
    assert parsed([text], is_open=is_open) == expected
    assert parsed([*text, ""], is_open=is_open) == expected


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<think>Hm.</think>\n\n yes", " yes"),
        ("<think>Hm.</think>\n\n\n\nyes \n", "\n\nyes \n"),
        ("<think>Hm.</think>\n\n", ""),
        ("<think>Hm.</think>\n", ""),
        ("<think>Hm.</think>", ""),
        (" yes", " yes"),
    ],
)
def test_an_exact_answer_keeps_its_white_space(text: str, content: str) -> None:
    for pieces in ([text], [*text, ""]):
        assert parsed(pieces, is_open=False, is_exact=True)[1] == content


FRAGMENTS = st.sampled_from(["<think>", "</think>", "<", "</th", " ", "\n", "é🚲", "x", CALL])


@given(
    text=st.lists(FRAGMENTS, max_size=10).map("".join),
    cuts=st.lists(st.integers(0, 120), max_size=8),
    is_open=st.booleans(),
    is_exact=st.booleans(),
)
def test_reasoning_does_not_depend_on_how_the_text_is_divided(
    text: str, cuts: list[int], is_open: bool, is_exact: bool
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    switches = {"is_open": is_open, "is_exact": is_exact}
    assert parsed(pieces, **switches) == parsed([text], **switches)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose tokenizer lists the marks as special tokens."""
    backend = byte_level_backend()
    backend.add_special_tokens(sorted(CHAT_MARKS))
    return write_folder(tmp_path_factory.mktemp("special"), backend, BYTE_LEVEL_CONFIG)


def test_marks_that_are_special_tokens_are_text_and_others_are_not(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(f"<think>Hm.</think>Well:<|im_start|>{CALL}<|im_end|>")
    assert {tokenizer.token_id(mark) for mark in CHAT_MARKS} < set(ids)
    processor = OutputProcessor(tokenizer, SamplingParams(max_tokens=None, ignore_eos=True))
    pieces = [processor.push([token_id]).text for token_id in ids]
    assert parsed([*pieces, ""], is_open=False) == ("Hm.", "Well:", 1)
    assert "".join(pieces) == tokenizer.decode(ids) == f"<think>Hm.</think>Well:{CALL}"


def test_a_constraint_allows_marks_that_are_special_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    vocabulary = read_vocabulary(folder, tokenizer.vocab_size)
    assert vocabulary is not None
    assert vocabulary.special_ids == tokenizer.special_ids
    others = {tokenizer.token_id(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    assert vocabulary.special_ids == others
