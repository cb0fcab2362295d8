"""Messages in channels: reasoning, content and calls, and that they are the same however the text is divided."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.channels import ChannelParser

NAMES = ["add", "get.time-1"]
Parsed = tuple[str, str, list[tuple[str, str]]]
THOUGHT = "<|channel|>analysis<|message|>Hm, 5 < 6.<|end|>"
NEXT = "<|start|>assistant"
ANSWER = "<|channel|>final<|message|>Five.\n<|return|>"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": "<|x"}<|call|>'
EARLY = ' to=functions.get.time-1<|channel|>commentary json<|message|>{"zone": "é"}<|call|>'
ADD, TIME = ("add", '{"a": "<|x"}'), ("get.time-1", '{"zone": "é"}')


def parsed(pieces: Sequence[str], **options: Any) -> Parsed:
    """Reasoning, content, and name and arguments of each call."""
    parser = ChannelParser(NAMES, **options)
    deltas = [parser.push(piece, final=number == len(pieces)) for number, piece in enumerate(pieces, 1)]
    calls: list[tuple[str, str]] = []
    for part in (part for delta in deltas for part in delta.tool_calls):
        calls += [("", "")] if part.name else []
        assert part.index == len(calls) - 1
        calls[-1] = (calls[-1][0] + part.name, calls[-1][1] + part.arguments)
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas), calls


CASES: list[tuple[str, Parsed]] = [
    (f"{THOUGHT}{NEXT}{ANSWER}", ("Hm, 5 < 6.", "Five.\n", [])),
    (ANSWER, ("", "Five.\n", [])),
    (f"{THOUGHT}{NEXT}{CALL}", ("Hm, 5 < 6.", "", [ADD])),
    (f"{EARLY}{NEXT}{CALL}", ("", "", [TIME, ADD])),
    # What the user may read before a call, and several messages of a kind.
    (f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I ask.<|end|>{NEXT}{CALL}", ("Hm, 5 < 6.", "I ask.", [ADD])),
    (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{ANSWER}", ("Hm, 5 < 6.\nHm, 5 < 6.", "Five.\n", [])),
    (f"{ANSWER}{NEXT}{ANSWER}", ("", "Five.\n\nFive.\n", [])),
    # A message that is cut before the mark of its end, and one that has none.
    (f"{THOUGHT}{NEXT}<|channel|>final<|message|>Fi", ("Hm, 5 < 6.", "Fi", [])),
    ("<|channel|>analysis<|message|>Hm<|en", ("Hm<|en", "", [])),
    (CALL[: CALL.index("x")], ("", "", [("add", '{"a": "<|')])),
    (f"<|channel|>analysis<|message|>Hm.{NEXT}{ANSWER}", ("Hm.", "Five.\n", [])),
    # A head that is cut.
    ("<|channel|>comm", ("", "", [])),
    (f"{THOUGHT}{NEXT} to=func", ("Hm, 5 < 6.", "", [])),
    ("", ("", "", [])),
    # Tools that are not the request's.
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", ("{}", "", [])),
    # Heads as gpt-oss sometimes writes them: a bare name, no channel, two channels, other words, no body.
    ("<|channel|>analysis to=add code<|message|>{}<|call|>", ("", "", [("add", "{}")])),
    (' to=functions.add<|message|>{"a": 1}<|call|>', ("", "", [("add", '{"a": 1}')])),
    ("<|channel|>commentary <|constrain|>json to=functions.add<|message|>{}<|call|>", ("", "", [("add", "{}")])),
    (
        "<|channel|>commentary to=functions.add<|channel|>commentary json<|message|>{}<|call|>",
        ("", "", [("add", "{}")]),
    ),
    ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|>", ("Hm.", "", [])),
    ("<|channel|>commentary to=assistant<|channel|>final<|message|>Five.<|return|>", ("", "Five.", [])),
    (" to=python<|channel|>commentary code<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    ("<|channel|>final<|constrain|>my format json<|message|>{}<|return|>", ("", "{}", [])),
    ("<|message|>Five.<|return|>", ("", "Five.", [])),
    (f"<|channel|>commentary 2?<|end|>{NEXT}{THOUGHT}{NEXT}{ANSWER}", ("commentary 2?\nHm, 5 < 6.", "Five.\n", [])),
    (f"<|channel|>{NEXT}{ANSWER}", ("", "Five.\n", [])),
    (f"<|end|>{NEXT}{ANSWER}", ("", "Five.\n", [])),
    # No messages.
    (" to the five", ("", " to the five", [])),
    ("to=x and more", ("", "to=x and more", [])),
    ("<|channel|>a < b<|message|>", ("", "<|channel|>a < b<|message|>", [])),
    (f"{'<|channel|>x' * 5}<|message|>", ("", f"{'<|channel|>x' * 5}<|message|>", [])),
    ("Five.", ("", "Five.", [])),
    ("ship", ("", "ship", [])),
    (f"{ANSWER}<|start|>user<|message|>Hi<|end|>", ("", "Five.\nuser<|message|>Hi", [])),
    (f"<|channel|>final{'x' * 400}<|message|>", ("", f"<|channel|>final{'x' * 400}<|message|>", [])),
    (f"{ANSWER}lost{NEXT}{CALL}", ("", "Five.\n", [ADD])),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_messages_are_divided_in_one_piece_and_in_single_characters(text: str, expected: Parsed) -> None:
    assert parsed([text]) == expected
    assert parsed([*text, ""]) == expected


def test_behind_the_last_call_that_is_allowed_all_is_dropped() -> None:
    assert parsed([f"{CALL}{NEXT}{EARLY}{NEXT}{ANSWER}"], max_calls=1) == ("", "", [ADD])


def test_a_constrained_answer_is_content() -> None:
    assert parsed(['{"a": 5}'], is_answer=True) == ("", '{"a": 5}', [])
    marks = f'{{"a": "<|end|>{NEXT}{CALL}"}}'
    assert parsed([marks], is_answer=True) == ("", marks, []), "text, since the constraint excludes the tokens"


def test_text_comes_as_it_is_written() -> None:
    parser = ChannelParser(NAMES)
    assert parser.push("<|channel|>analysis<|message|>Hm").reasoning == "Hm"
    assert parser.push(", 5 <").reasoning == ", 5 "
    assert parser.push(" 6.<|end|><|start|>assistant<|channel|>final<|message|>Fi").content == "Fi"
    assert parser.push("ve").content == "ve"


FRAGMENTS = st.sampled_from([
    *(THOUGHT, NEXT, ANSWER, CALL, EARLY, "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>"),
    *("<|constrain|>", "assistant", " to=functions.add", "final", "analysis", "commentary", " ", "é", "<", "{", "<|"),
    *("to=", "to=add", "t", "?", "<|channel|>commentary to=assistant"),
])  # fmt: skip


@given(
    text=st.lists(FRAGMENTS, max_size=10).map("".join),
    cuts=st.lists(st.integers(0, 300), max_size=10),
    options=st.sampled_from([{}, {"max_calls": 1}, {"is_answer": True}]),
)
def test_nothing_depends_on_how_the_text_is_divided(text: str, cuts: list[int], options: dict[str, Any]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parsed([text[start:end] for start, end in itertools.pairwise(edges)], **options) == parsed([text], **options)
