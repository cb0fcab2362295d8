"""The calculator computes what Python computes, and nothing that is not arithmetic."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.commands.calculator import WrongExpression, answer, computed, expressions_in, options

EXPRESSIONS = st.recursive(
    st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=2).map(str),
    lambda parts: st.one_of(
        st.tuples(parts, st.sampled_from(["+", "-", "*", " / ", "//", "%"]), parts).map(
            lambda one: f"({''.join(one)})"
        ),
        parts.map(lambda one: f"-{one}"),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_a_result_is_pythons(expression: str) -> None:
    try:
        expected = eval(expression)  # of digits, operators and parentheses
    except ZeroDivisionError:
        with pytest.raises(WrongExpression, match="zero"):
            computed(expression)
        return
    assert computed(expression) == (f"{expected:.15g}" if isinstance(expected, float) else str(expected))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os').system('true')", "is not supported; allowed: numbers"),
        ("(1).__class__", "is not supported"),
        ("[1 for _ in (1,)]", "is not supported"),
        ("'a' * 9", "is not supported"),
        ("True + 1", "is not supported"),
        ("1 if 1 else 2", "is not supported"),
        ("9 ** 9 ** 9 ** 9", "power has too many digits"),
        ("2 ** 99999999999", "power has too many digits"),
        ("2.0 ** 99999", "too large"),
        ("1e308 * 10", "too large"),
        ("1e999 - 1e999", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("1 / 0", "divides by zero"),
        ("1 % 0", "zero"),
        ("1 +", "is not an expression"),
        ("", "is not an expression"),
        ("\x00", "is not an expression"),
        ("1" * 201, "has 201 characters; allowed: 200"),
        ("(" * 100 + "1" + ")" * 99, "is not an expression"),
        ("-" * 150 + "1", "nested too deeply"),
    ],
)
def test_anything_else_is_rejected(expression: str, message: str) -> None:
    with pytest.raises(WrongExpression, match=message):
        computed(expression)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("What is 17 plus 25?", []),
        ("What is 17 + 25?", ["17 + 25"]),
        ("6×7 and (1+2)*3, please.", ["6×7", "(1+2)*3"]),
        ("I was born on 1990-02-31, in 3.5 kg.", []),
        ("1 / 0?", []),
        ("5 - 5 - 5 - 5", ["5 - 5 - 5 - 5"]),
        ("", []),
    ],
)
def test_only_computations_are_found_in_a_message(message: str, expected: list[str]) -> None:
    assert expressions_in(message) == expected
    request = options(expressions_in(message))
    assert request["tool_choice"] == ("calculator" if expected else "auto")
    expression: Any = request["tools"][0]["parameters"]["properties"]["expression"]
    assert expression == ({"enum": expected} if expected else {"type": "string"})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (json.dumps({"expression": "6×7"}), ("6×7", "42")),
        (json.dumps({"expression": "1/0"}), ("1/0", "error: '1/0' divides by zero")),
        ("{", ("{", 'error: the arguments are not {"expression": "…"}')),
        (json.dumps({"expression": 5}), ('{"expression": 5}', 'error: the arguments are not {"expression": "…"}')),
    ],
)
def test_a_call_is_answered_in_any_case(arguments: str, expected: tuple[str, str]) -> None:
    assert answer(arguments) == expected
