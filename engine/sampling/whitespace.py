"""The limit on white space between two elements of JSON, as part of the masks of constraints (grammar_masks.py)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from engine.sampling.constraints import MAX_WHITESPACE

_BITS = 32
_SPACES = b" \t\n\r"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|$)', re.DOTALL)
_TOO_LONG = re.compile(rb"[ \t\n\r]{%d}" % (MAX_WHITESPACE + 1))


class WhitespaceLimit:
    """The limit on white space between two elements of JSON, in one vocabulary. Immutable.

        output ids ─▶ white space at the end (`run_after`) ─▶ tokens that exceed the limit ─▶ not in the mask

    xgrammar can count them itself. Then it tries all tokens that begin with a space, half of a vocabulary, wherever one
    may stand: 0.5 ms a row with 152 k tokens, without the count 3 µs. So its grammars allow any number.
    """

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self._runs = {
            token_id: (run, run == len(token))
            for token_id, token in enumerate(vocabulary)
            if (run := len(token) - len(token.rstrip(_SPACES)))
        }
        """Of tokens that end with white space: how much, and whether they are nothing else."""
        self._excluded = _excluded(vocabulary)

    def run_after(self, run: int, token_id: int) -> int:
        """The white space at the end of an output that ended with `run` characters of it, and now with `token_id`."""
        own, is_all = self._runs.get(token_id, (0, False))
        return run + own if is_all else own

    def apply(self, mask: npt.NDArray[np.int32], run: int, is_between: Callable[[], bool]) -> None:
        """Remove tokens from `mask`, of an output that ends with `run`. `is_between`, whether it ends between elements,
        is called if it matters."""
        excluded = self._excluded[min(run, MAX_WHITESPACE)]
        if excluded is not None and (mask & excluded).any() and is_between():
            mask &= ~excluded


def _excluded(vocabulary: Sequence[bytes]) -> list[npt.NDArray[np.int32] | None]:
    """For each number of characters of white space: the tokens that may not follow, as bits; None if there are none."""
    leading = np.zeros(-(-len(vocabulary) // _BITS) * _BITS, np.int32)
    for token_id, token in enumerate(vocabulary):
        leading[token_id] = len(token) - len(token.lstrip(_SPACES))
        if len(token) > MAX_WHITESPACE and _TOO_LONG.search(_STRING.sub(b'""', token)):
            leading[token_id] = MAX_WHITESPACE + 1
    too_long = [leading > MAX_WHITESPACE - run for run in range(MAX_WHITESPACE + 1)]
    return [np.packbits(bits, bitorder="little").view(np.int32) if bits.any() else None for bits in too_long]
