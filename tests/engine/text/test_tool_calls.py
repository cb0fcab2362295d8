"""Tool calls in a model's text: what is a call, and that it is the same however the text is divided."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.chat_output import (
    HARMONY,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    TOOL_FORMATS,
    ToolCallParser,
    ToolFormat,
    tool_format_of,
)

NAMES = ("get_weather", "add")
Parsed = tuple[str, list[tuple[str, str]]]


def parsed(form: ToolFormat, pieces: Sequence[str], **options: Any) -> Parsed:
    """Content, and name and arguments of each call."""
    parser, content, calls = ToolCallParser(form, NAMES, **options), "", list[tuple[str, str]]()
    for number, piece in enumerate(pieces, 1):
        delta = parser.push(piece, final=number == len(pieces))
        content += delta.content
        for part in delta.tool_calls:
            if part.name:
                assert part.index == len(calls)
                calls.append((part.name, ""))
            name, arguments = calls[part.index]
            assert part.index == len(calls) - 1, "parts come in order"
            calls[part.index] = (name, arguments + part.arguments)
    return content, calls


ARGUMENTS = '{"city": "a}<\\"é🚲</tool_call>", "n": [1, {"x": null}]}'


def written(form: ToolFormat, *calls: tuple[str, str]) -> str:
    """As the models write them."""
    objects = [f'{{"name": "{name}", "{form.arguments}": {arguments}}}' for name, arguments in calls]
    if form is HERMES:
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    return f"[TOOL_CALLS] [{', '.join(objects)}]" if form is MISTRAL else "; ".join(objects)


CALL = ("get_weather", ARGUMENTS)
ADD = ("add", "{}")
PROSE = f"I use <tool_call> now.\n{written(HERMES, ADD)}"
BROKEN = f'<tool_call>\n{{"name": f, \n{written(HERMES, CALL)}'
CASES: list[tuple[ToolFormat, str, Parsed]] = [
    *((form, written(form, CALL), ("", [CALL])) for form in TOOL_FORMATS.values()),
    *((form, written(form, CALL, ADD, CALL), ("", [CALL, ADD, CALL])) for form in TOOL_FORMATS.values()),
    *((form, "No call. \n", ("No call. \n", [])) for form in TOOL_FORMATS.values()),
    *((form, "", ("", [])) for form in TOOL_FORMATS.values()),
    # text around, and other white space
    (HERMES, f"Let me see.\n\n{written(HERMES, CALL)}\n", ("Let me see.", [CALL])),
    (HERMES, f"One {written(HERMES, ADD)}\n\ntwo {written(HERMES, ADD)} three", ("One\n\ntwo three", [ADD, ADD])),
    (HERMES, '<tool_call>{"name":"add","arguments":{}}</tool_call>', ("", [ADD])),
    (MISTRAL, f"See {written(MISTRAL, CALL)} there", ("See there", [CALL])),
    (MISTRAL, 'a[TOOL_CALLS]add{}[TOOL_CALLS]add[ARGS]{"a": 1}', ("a", [ADD, ("add", '{"a": 1}')])),
    (MISTRAL, "[TOOL_CALLS]add[CALL_ID]x1y2z3[ARGS]{}", ("", [ADD])),
    (LLAMA3_JSON, f"{written(LLAMA3_JSON, CALL)}\nDone", ("\nDone", [CALL])),
    (LLAMA3_JSON, '{"type": "function", "name": "add", "parameters": {}}', ("", [ADD])),
    # members in another order, arguments as text, more members
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', ("", [("add", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("add", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', ("", [ADD])),
    (HERMES, '<tool_call>{"name": "add", "arguments": {}, "id": "}"}</tool_call>!', ("!", [ADD])),
    # a mark in prose, and calls that are broken off, before others
    (HERMES, PROSE, ("I use <tool_call> now.", [ADD])),
    (HERMES, BROKEN, ('<tool_call>\n{"name": f,', [CALL])),
    (HERMES, f"<tool_call>\n{written(HERMES, ADD)}", ("<tool_call>", [ADD])),
    (HERMES, '<tool_call>{"name": "add"}\n' + written(HERMES, ADD), ("", [ADD, ADD])),
    (HERMES, f"`<tool_call>` and `</tool_call>`: {written(HERMES, ADD)}", ("`<tool_call>` and `</tool_call>`:", [ADD])),
    # no calls
    (HERMES, "<tool_call>{oops}</tool_call> x", ("<tool_call>{oops}</tool_call> x", [])),
    (HERMES, '<tool_call>["add"]</tool_call>', ('<tool_call>["add"]</tool_call>', [])),
    (HERMES, f'<tool_call>{"[" * 9999}</tool_call>', (f'<tool_call>{"[" * 9999}</tool_call>', [])),
    (HERMES, "1 < 2 <tool> <tool_ca", ("1 < 2 <tool> <tool_ca", [])),
    (MISTRAL, "[TOOL_CALLS] []", ("[TOOL_CALLS] []", [])),
    (MISTRAL, "[TOOL_CALLS", ("[TOOL_CALLS", [])),
    (LLAMA3_JSON, f"Look: {written(LLAMA3_JSON, CALL)}", (f"Look: {written(LLAMA3_JSON, CALL)}", [])),
    (LLAMA3_JSON, '{"name": "Bob", "parameters": {}}', ('{"name": "Bob", "parameters": {}}', [])),
    (LLAMA3_JSON, '{"answer": 5}', ('{"answer": 5}', [])),
    # ended by max_tokens, or malformed: what was written is delivered
    (HERMES, "<tool_call>\n{\"na", ("<tool_call>\n{\"na", [])),
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": "b', ("", [("add", '{"a": "b')])),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call> x', (" x", [("add", '{"a": 1')])),
    (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": [', ("", [("add", '{"a": [')])),
    (LLAMA3_JSON, '{"name": "add", "parameters": {"a"', ("", [("add", '{"a"')])),
    # ended in the mark behind a call
    (HERMES, '<tool_call>{"name": "add", "arguments": {}}\n</tool', ("", [ADD])),
    (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {}} ', ("", [ADD])),
    (LLAMA3_JSON, '{"name": "add", "parameters": {}};', ("", [ADD])),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=lambda value: getattr(value, "name", None))
def test_a_text_has_its_calls_in_one_piece_and_in_single_characters(
    form: ToolFormat, text: str, expected: Parsed
) -> None:
    assert parsed(form, [text]) == expected
    assert parsed(form, [*text, ""]) == expected


@pytest.mark.parametrize("text", [PROSE, BROKEN])
def test_a_call_behind_what_is_none_is_found_wherever_the_text_is_cut(text: str) -> None:
    for cut in range(len(text)):
        assert parsed(HERMES, [text[:cut], text[cut:]]) == parsed(HERMES, [text]), cut


def test_a_mark_in_prose_holds_no_text_back() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push("Use <tool_call> n").content == "Use <tool_call> n"
    assert parser.push("ow").content == "ow"


FRAGMENTS = st.sampled_from([
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "{", "}", "[", "]", '"', "\\", ",", ";"),
    *(" ", "\n", "é", "🚲", "<", "add", '"name"', '"arguments"', '"parameters"', '{"name": "add", "arguments": {'),
    *('{"name": "add", "parameters": {', '{"name": "add", "arguments": {"a": "', "x", "<tool", "[TOOL"),
    *('{"name": "add"}', '{"arguments": {}, "name": "add"}', " now "),
    *(written(form, CALL) for form in TOOL_FORMATS.values()),
])  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


@given(
    form=st.sampled_from(list(TOOL_FORMATS.values())),
    text=TEXTS,
    cuts=st.lists(st.integers(0, 300), max_size=12),
    options=st.sampled_from([{}, {"max_calls": 1}, {"is_forced": True}, {"calls_only": True}]),
)
def test_calls_do_not_depend_on_how_the_text_is_divided(
    form: ToolFormat, text: str, cuts: list[int], options: dict[str, Any]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert parsed(form, pieces, **options) == parsed(form, [text], **options)


@given(form=st.sampled_from(list(TOOL_FORMATS.values())), text=TEXTS)
def test_text_without_calls_is_content(form: ToolFormat, text: str) -> None:
    content, calls = parsed(form, [*text, ""])
    assert calls or content == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(
    form=st.sampled_from(list(TOOL_FORMATS.values())),
    values=st.lists(st.dictionaries(st.text(max_size=6), JSON, max_size=3), min_size=1, max_size=3),
    ascii_only=st.booleans(),
)
def test_any_arguments_come_back(form: ToolFormat, values: list[dict[str, Any]], ascii_only: bool) -> None:
    calls = [("add", json.dumps(value, ensure_ascii=ascii_only)) for value in values]
    assert parsed(form, [*written(form, *calls), ""]) == ("", calls)


def test_arguments_are_delivered_as_they_come() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert not parser.push('Hm. <tool_call>{"name": "add", "arg').tool_calls
    assert [part.name for part in parser.push('uments": {"a').tool_calls] == ["add"]
    assert [part.arguments for part in parser.push('": "bc').tool_calls] == ['": "bc']


def test_what_follows_the_only_call_is_dropped() -> None:
    for form in TOOL_FORMATS.values():
        assert parsed(form, [written(form, CALL, ADD) + " more"], max_calls=1) == ("", [CALL])


def test_where_only_calls_are_allowed_a_mark_that_is_cut_is_no_content() -> None:
    for end in range(1, len(text := written(HERMES, CALL))):
        content, _ = parsed(HERMES, [*text[:end], ""], calls_only=True)
        assert content == ""
    assert parsed(HERMES, [*text, ""], calls_only=True) == ("", [CALL])


def test_a_forced_output_begins_behind_a_special_mark() -> None:
    text = written(MISTRAL, CALL, ADD).removeprefix("[TOOL_CALLS] ")
    assert parsed(MISTRAL, [text], is_forced=True) == ("", [CALL, ADD])
    assert parsed(MISTRAL, [text]) == (text, [])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('within <tool_call></tool_call> tags:\n{"name": <function-name>, "arguments": <args-json-object>}', HERMES),
        ("{{ '<tool_call>\\n<function=' + tool_call.name }}", None),
        ("<tool_call>{name}<arg_key>{key}</arg_key></tool_call>", None),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name}', LLAMA3_JSON),
        ("{%- if tools %}[AVAILABLE_TOOLS]{{ tools }}{% endif %}[TOOL_CALLS]", MISTRAL),
        ("{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}", HARMONY),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)
def test_a_format_is_known_by_its_template(template: str, form: ToolFormat | None) -> None:
    assert tool_format_of(template) is form
