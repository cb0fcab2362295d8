"""Checking a JSON schema stops an event loop: its work grows with the text, not with the square of it."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.sampling.constraints import MAX_CONSTRAINT_BYTES
from engine.sampling.json_schema import MAX_PATTERN_CHARS, MAX_SCHEMAS
from tests.engine.sampling.schemas import STRING, check

MAX_CALLS = 40
"""Of functions, per byte of the schema."""
REQUIRED = [str(number) for number in range(200)]


def branches(name: str, count: int) -> dict[str, Any]:
    return {"anyOf": [{"$ref": f"#/{name}"}] * count}


def one_of(*names: object) -> dict[str, Any]:
    return {"oneOf": [{"$ref": f"#/{name}"} for name in names]}


def numbers(start: int, count: int) -> dict[str, Any]:
    return {"enum": list(range(start, start + count))}


def record(name: str) -> dict[str, Any]:
    properties = {key: {"$ref": f"#/{name}"} for key in REQUIRED}
    return {"type": "object", "properties": properties, "required": REQUIRED}


LARGEST: dict[str, dict[str, Any]] = {
    "references to references": {**branches("b", 2000), "b": branches("c", 2000), "c": {"type": "null"}},
    "formats": {"anyOf": [STRING | {"format": "date-time"}] * 1500},
    "classes": {**STRING, "pattern": "." * MAX_PATTERN_CHARS},
    "a long class": {**STRING, "pattern": "[" + r"\d" * (MAX_PATTERN_CHARS // 2 - 1) + "]"},
    "pairs of lists of constants": {"anyOf": [one_of("x", "y")] * 1100, "x": numbers(0, 500), "y": numbers(500, 500)},
    "pairs of branches": {
        "anyOf": [one_of(*range(64))] * 50,
        **{str(number): numbers(15 * number, 15) for number in range(64)},
    },
    "pairs of properties": {
        "anyOf": [one_of("o", "p")] * 900,
        "o": record("x"),
        "p": {**record("y"), "required": ["0"]},
        "x": numbers(0, 500),
        "y": numbers(500, 500),
    },
}


def num_calls(schema: dict[str, Any]) -> int:
    """Of Python's and C's functions, in the check of `schema`."""
    count, before = 0, sys.getprofile()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    text = text_of(schema)
    sys.setprofile(profile)
    try:
        check(json_schema=text)
    finally:
        sys.setprofile(before)
    return count


def text_of(schema: dict[str, Any]) -> str:
    text = json.dumps(schema, separators=(",", ":"))
    assert len(text) <= MAX_CONSTRAINT_BYTES
    return text


@pytest.mark.parametrize("name", LARGEST)
def test_the_work_of_a_check_is_bounded_by_the_length_of_the_schema(name: str) -> None:
    assert num_calls(LARGEST[name]) < MAX_CALLS * len(text_of(LARGEST[name]))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"anyOf": [{}] * MAX_SCHEMAS}, f"the schema has more than {MAX_SCHEMAS} schemas"),
        (
            {**STRING, "pattern": "a" * (MAX_PATTERN_CHARS + 1)},
            f"at /: pattern brings the schema's patterns to {MAX_PATTERN_CHARS + 1} characters",
        ),
        (
            {"anyOf": [STRING | {"pattern": char * MAX_PATTERN_CHARS} for char in "ab"]},
            f"at /anyOf/1: pattern brings the schema's patterns to {2 * MAX_PATTERN_CHARS} characters",
        ),
    ],
)
def test_more_than_can_be_checked_at_once_is_rejected(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check(json_schema=text_of(schema))


def test_a_pattern_that_many_properties_have_counts_once() -> None:
    pattern = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    properties = {f"p{number}": {**STRING, "pattern": pattern} for number in range(500)}
    assert len(pattern) * len(properties) > MAX_PATTERN_CHARS
    check(json_schema=text_of({"type": "object", "properties": properties}))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#/a", "a": {"$ref": "#/a"}}, "/a"),
        ({"anyOf": [{"$ref": "#/a"}, {"type": "null"}], "a": {"anyOf": [{"$ref": "#"}]}}, "/anyOf/0"),
        ({"items": {"$ref": "#/a"}, "a": {"allOf": [{"oneOf": [{"$ref": "#/a"}]}]}}, "/a/allOf/0/oneOf/0"),
    ],
)
def test_a_recursion_without_a_value_in_between_is_rejected_where_it_is(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest, match=f"at {path}: .ref .* is a recursion without a value in between"):
        check(json_schema=text_of(schema))
