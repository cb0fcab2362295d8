"""Excludes the tokens that a mask does not admit from rows of logits on CPU, called by `grammar_masks`."""

# The compiled bodies are typed by numba, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import functools

import numpy as np

from engine.attention.compilation import kernel, kernel_part
from engine.attention.simd import FLOAT32, INT32, INT64, pointer


@functools.cache
def exclude_address() -> int:
    """`void(int64*)`: counter, rows, vocab, addresses of the rows' logits and masks int64 [rows, 2]. Logits are
    float32, masks int32 [ceil(vocab / 32)] with a bit for each token; the logits of those without it become -inf."""

    @kernel
    def compiled(a):
        addresses, num_rows, vocab = pointer(a[3], INT64), a[1], a[2]
        for row in range(num_rows):
            _exclude(pointer(addresses[2 * row], FLOAT32), pointer(addresses[2 * row + 1], INT32), vocab)

    return int(compiled.address)


@kernel_part
def _exclude(logits, mask, vocab):
    for first in range(0, vocab, 32):
        word = mask[first // 32]
        if word != -1:
            for bit in range(min(32, vocab - first)):
                if (word >> bit) & 1 == 0:
                    logits[first + bit] = -np.inf
