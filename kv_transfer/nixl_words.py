"""Lease words: 8 bytes of registered memory for each transfer, by which a reader learns, after it has read pages, that
they were still held when it did.

    free ──take──▶ says a word never used before ──drop, before any page of the transfer is given back──▶ zero, free

A reader that has read pages reads the word next. If it still says what the metadata said, the lease had not ended when
the pages were read, and nobody had written to them. This needs nothing of the holder's process but its memory, so it
holds for a holder that was frozen, for a reader that was, and with digests off.
"""

from __future__ import annotations

import secrets

import numpy as np

from kv_transfer.nixl_agent import Region
from kv_transfer.nixl_metadata import WORD_BYTES


class LeaseWords:
    """Owns the words of one core. Used in the step loop alone; readers see its memory."""

    def __init__(self, num_words: int) -> None:
        self._words = np.zeros(num_words, dtype="<u8")
        self._free = list(range(num_words - 1, -1, -1))
        # Random, so that a word of this process is none of the one before it.
        self._next = secrets.randbits(62) | 1

    @property
    def region(self) -> Region:
        """The memory, to be registered."""
        return Region("DRAM", 0, self._words.ctypes.data, WORD_BYTES, len(self._words))

    def take(self) -> tuple[int, bytes] | None:
        """A free word's index and what it says from now on; None: all are taken."""
        if not self._free:
            return None
        index = self._free.pop()
        self._next += 1
        self._words[index] = self._next
        return index, self._next.to_bytes(WORD_BYTES, "little")

    def drop(self, index: int) -> None:
        """The transfer has ended; its pages may be given back after this."""
        self._words[index] = 0
        self._free.append(index)
