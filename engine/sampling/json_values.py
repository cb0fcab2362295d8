"""Values of JSON in a schema's `enum` and `const`: their types, when two are equal, and which are too long."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def constants_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a schema that lists them."""
    return [schema["const"]] if "const" in schema else listed(schema["enum"]) if "enum" in schema else None


def hashable(value: Any) -> Hashable:
    """Equal for equal values of JSON."""
    match value:
        case list():
            return tuple(map(hashable, value))
        case dict():
            return frozenset((name, hashable(one)) for name, one in value.items())
        case _:
            return value  # type: ignore[no-any-return]


def types_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def long_integer(value: Any) -> int | None:
    """An integer of more than 64 bits in `value`: xgrammar writes it as a number of 53 bits, which is another one."""
    rest = [value]
    while rest:
        match rest.pop():
            case list() as items:
                rest += items
            case dict() as members:
                rest += members.values()
            case int() as number if not -(2**63) <= number < 2**63:
                return number
    return None
