"""What a fake instance generates: a pure function of (prompt, seed, choice, position), as the real sampling is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

VOCAB_SIZE = 300
FIRST_ID = 10
"""Ids below are special and never generated."""


def token_at(prompt: Sequence[int], seed: int, choice: int, position: int) -> int:
    """The output id at `position`, counted from 0."""
    material = repr((tuple(prompt), seed, choice, position)).encode()
    return FIRST_ID + int.from_bytes(hashlib.sha256(material).digest()[:4], "little") % (VOCAB_SIZE - FIRST_ID)


def text_of(token_ids: Sequence[int]) -> str:
    """The text of ids: two of three have some, and that is not ASCII, so that bytes and characters differ."""
    return "".join("" if token_id % 3 == 0 else f"é{token_id} " for token_id in token_ids)


def expected_ids(prompt: Sequence[int], seed: int, num_tokens: int, choice: int = 0) -> list[int]:
    """What a fault-free run emits."""
    return [token_at(prompt, seed, choice, position) for position in range(num_tokens)]
