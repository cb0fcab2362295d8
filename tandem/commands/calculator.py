"""The calculator of `tandem chat --tool calculator`: arithmetic without eval, bounded in time and memory.

message ─▶ expressions in it ─┬─ some ─▶ the model must call the tool, with one after the other (a constraint)
                              └─ none ─▶ the model may call it
call ─▶ its arguments ─▶ the result, or what is wrong with it, as text for the model
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

NAME = "calculator"
MAX_CHARS = 200
MAX_DEPTH = 40
MAX_BITS = 4096
"""Of an integer, in between too."""

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_ALLOWED = "numbers, + - * / // % ** and parentheses"
_SPELT = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_CANDIDATE = re.compile(r"[0-9.()+\-*/%×·÷−– ]+")


class WrongExpression(ValueError):
    """What is wrong with an expression, for the model and for the user."""


def computed(expression: str) -> str:
    """The value of `expression` as text. Raises WrongExpression."""
    if len(expression) > MAX_CHARS:
        raise WrongExpression(f"the expression has {len(expression)} characters; allowed: {MAX_CHARS}")
    try:
        value = _value(ast.parse(expression.translate(_SPELT).strip(), mode="eval").body, 0)
        if isinstance(value, float) and not math.isfinite(value):
            raise OverflowError  # as a power would be
    except WrongExpression:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise WrongExpression(f"{expression!r} is not an expression; allowed: {_ALLOWED}") from None
    except ZeroDivisionError:
        raise WrongExpression(f"{expression!r} divides by zero") from None
    except OverflowError:
        raise WrongExpression(f"the result of {expression!r} is too large") from None
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _value(node: ast.AST, depth: int) -> int | float:
    if depth > MAX_DEPTH:
        raise WrongExpression(f"the expression is nested too deeply; allowed: {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _bounded(_OPERATORS[type(sign)](_value(operand, depth + 1)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            one, other = _value(left, depth + 1), _value(right, depth + 1)
            if isinstance(sign, ast.Pow):
                _check_power(one, other)
            return _bounded(_OPERATORS[type(sign)](one, other))
        case _:
            raise WrongExpression(f"{ast.unparse(node)[:40]!r} is not supported; allowed: {_ALLOWED}")


def _check_power(base: float, exponent: float) -> None:
    """Before it is computed: an integer power can take all memory."""
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * base.bit_length() > MAX_BITS:
        raise WrongExpression(f"the power has too many digits; allowed: {MAX_BITS} bits")


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex):
        raise WrongExpression("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise WrongExpression(f"the result has too many digits; allowed: {MAX_BITS} bits")
    return value  # type: ignore[no-any-return]


def expressions_in(message: str) -> list[str]:
    """The computations that `message` spells, such as "17 + 25"; plain numbers and dates are none."""
    found = (match.strip(" .") for match in _CANDIDATE.findall(message))
    return list(dict.fromkeys(one for one in found if _is_computation(one)))


def _is_computation(text: str) -> bool:
    try:
        node = ast.parse(text.translate(_SPELT), mode="eval").body
        computed(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return isinstance(node, ast.BinOp) and re.fullmatch(r"\d{1,4}(-\d{1,2}){2}", text) is None


def options(expressions: Sequence[str]) -> dict[str, Any]:
    """Those of a request whose answer may call the tool; if there are `expressions`, it must, with one of them."""
    expression: dict[str, Any] = {"enum": list(expressions)} if expressions else {"type": "string"}
    tool = {
        "name": NAME,
        "description": f"Computes an arithmetic expression: {_ALLOWED}.",
        "parameters": {"type": "object", "properties": {"expression": expression}, "required": ["expression"]},
    }
    return {"tools": [tool], "tool_choice": NAME if expressions else "auto", "parallel_tool_calls": False}


def answer(arguments: str) -> tuple[str, str]:
    """Of a call: the expression, and its result or what is wrong."""
    try:
        given = json.loads(arguments)
        expression = given["expression"]
        if not isinstance(expression, str):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        return arguments[:MAX_CHARS], 'error: the arguments are not {"expression": "…"}'
    try:
        return expression[:MAX_CHARS], computed(expression)
    except WrongExpression as error:
        return expression[:MAX_CHARS], f"error: {error}"
