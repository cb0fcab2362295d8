"""One value of a request against what is allowed: refusals that name the field, the value and the range.

For values of any type, since a caller in this process may give anything. All raise `InvalidRequest`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.errors import InvalidRequest, shown


class Range(NamedTuple):
    """A number's limits, and how a person is told of them."""

    field: str
    low: float
    high: float
    allowed: str
    open_low: bool = False
    optional: bool = False


def check_float(limits: Range, value: Any) -> None:
    """Refuse what is no finite number in range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(limits.field, f"{shown(value)} is not a number", limits.allowed)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(limits.field, f"{value} must be finite", limits.allowed)
    if not limits.low <= value <= limits.high or (limits.open_low and value == limits.low):
        raise InvalidRequest(limits.field, f"{shown(value)} is out of range", limits.allowed)


def check_int(limits: Range, value: Any) -> None:
    """Refuse what is no integer in range."""
    if value is None and limits.optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(limits.field, f"{shown(value)} is not an integer", limits.allowed)
    if not limits.low <= value <= limits.high:
        raise InvalidRequest(limits.field, f"{shown(value)} is out of range", limits.allowed)


def check_text(field: str, index: int, string: Any, allowed: str, max_bytes: int) -> None:
    """Refuse a string of a list that is none, is empty, too long, or no text."""
    name = f"{field}[{index}]"
    if not isinstance(string, str):
        raise InvalidRequest(field, f"{name}={shown(string)} is not a string", allowed)
    if not string:
        raise InvalidRequest(field, f"{name} is empty", allowed)
    # Characters first: encoding a megabyte to learn that it is too long would be the caller's to pay.
    if len(string) > max_bytes:
        raise InvalidRequest(field, f"{name} has {len(string)} characters", allowed)
    try:
        num_bytes = len(string.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(
            field, f"{name}={shown(string)} is not valid Unicode", "text without lone surrogates"
        ) from None
    if num_bytes > max_bytes:
        raise InvalidRequest(field, f"{name} has {num_bytes} bytes", allowed)


def check_ids(field: str, ids: Any, vocab_size: int, max_ids: int) -> None:
    """Refuse what is no tuple of at most `max_ids` ids of the vocabulary."""
    if not isinstance(ids, tuple):
        raise InvalidRequest(field, f"{shown(ids)} is not a list of token ids", f"at most {max_ids} ids")
    if len(ids) > max_ids:
        raise InvalidRequest(field, f"{len(ids)} ids", f"at most {max_ids} ids")
    check_each_id(field, ids, vocab_size)


def check_each_id(field: str, ids: Sequence[Any], vocab_size: int) -> None:
    """Refuse the first id that the vocabulary does not have."""
    if not ids:
        return
    # The good case in three passes that run in C: a prompt may have 10^5 ids.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for i, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise InvalidRequest(field, f"{field}[{i}]={shown(token_id)} is not an integer", f"0..{vocab_size - 1}")
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                field, f"{field}[{i}]={shown(token_id)} out of range 0..{vocab_size - 1} of the model vocabulary"
            )
