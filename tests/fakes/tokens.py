"""What a fake instance generates: a pure function of (prompt, seed, choice, position), as the real sampling is."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

VOCAB_SIZE = 300
FIRST_ID = 10
"""Ids below are special and never generated."""


def token_at(prompt: Sequence[int], seed: int, choice: int, position: int) -> int:
    """The output id at `position`, counted from 0."""
    digest = _digest_of(tuple(prompt)).copy()
    digest.update(repr((seed, choice, position)).encode())
    return FIRST_ID + int.from_bytes(digest.digest()[:4], "little") % (VOCAB_SIZE - FIRST_ID)


@functools.lru_cache
def _digest_of(prompt: tuple[int, ...]) -> Any:
    """Begun. Of a long prompt it takes longer than the rest of a token."""
    return hashlib.sha256(repr(prompt).encode())


def text_of(token_ids: Sequence[int]) -> str:
    """The text of ids: two of three have some, and that is not ASCII, so that bytes and characters differ."""
    return "".join("" if token_id % 3 == 0 else f"é{token_id} " for token_id in token_ids)


def expected_ids(prompt: Sequence[int], seed: int, num_tokens: int, choice: int = 0) -> list[int]:
    """What a fault-free run emits."""
    return [token_at(prompt, seed, choice, position) for position in range(num_tokens)]
