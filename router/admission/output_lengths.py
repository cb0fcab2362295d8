"""How many tokens a choice will generate, learned from those that have ended.

`max_tokens` is no estimate: most clients leave it at what the context allows and stop far earlier, and a house that
keeps room for the worst case stands half empty. Lengths are learned apart for each power of two of `max_tokens`: a
client that asks for 16 tokens says nothing about one that asks for 4096.
"""

from __future__ import annotations

_WEIGHT = 1 / 32


class OutputLengths:
    """A mean per class of `max_tokens`: `initial` tokens, then that of all that have ended, then of the last ones."""

    def __init__(self, initial: int) -> None:
        self._initial = float(initial)
        self._means: dict[int, float] = {}
        self._nums: dict[int, int] = {}

    def expected(self, max_tokens: int) -> int:
        """Output tokens to expect of a choice that may have `max_tokens`: 1..max_tokens."""
        mean = self._means.get(max_tokens.bit_length(), self._initial)
        return max(1, min(max_tokens, round(mean)))

    def observe(self, max_tokens: int, num_tokens: int) -> None:
        """A choice that might have had `max_tokens` has ended after `num_tokens`."""
        bucket = max_tokens.bit_length()
        self._nums[bucket] = num = self._nums.get(bucket, 0) + 1
        mean = self._means.get(bucket, 0.0)
        self._means[bucket] = mean + max(_WEIGHT, 1 / num) * (num_tokens - mean)
