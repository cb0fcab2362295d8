"""Rows in the order of their experts, and the sums of a token's experts, called with addresses by
`engine.models.experts`.

A choice is one of a token's experts. Its place is that of its row among the rows of all choices, which are ordered by
expert; a token's choices are in the order of their experts, so that the order of its sum depends on it alone.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import functools

import numpy as np

from engine.attention.compilation import kernel, kernel_part
from engine.attention.simd import FLOAT32, INT64, KINDS, WIDTH, load, next_task, pointer, splat, store


@functools.cache
def place_address() -> int:
    """`void(int64*)`, for one thread: counter, tokens, choices of a token, experts; expert of each choice; its weight
    (float32), which is moved with it; written: first row of each expert and the end [experts + 1], place of each
    choice."""

    @kernel
    def compiled(a):
        _place(a)

    return int(compiled.address)


def spread_address(dtype: str) -> int:
    """`void(int64*)`: counter, tokens, choices of a token, hidden, places, x [tokens, hidden], rows [choices,
    hidden]."""
    kind = KINDS[dtype]

    @kernel
    def compiled(a):
        _spread(a, kind)

    return int(compiled.address)


def combine_address(dtype: str) -> int:
    """`void(int64*)`: counter, tokens, choices of a token, hidden, places, rows [choices, hidden], output [tokens,
    hidden], weights (float32)."""
    kind = KINDS[dtype]

    @kernel
    def compiled(a):
        _combine(a, kind)

    return int(compiled.address)


@kernel_part
def _place(a):
    size, num_choices, num_experts = a[2], a[1] * a[2], a[3]
    chosen, weights = pointer(a[4], INT64), pointer(a[5], FLOAT32)
    starts, places = pointer(a[6], INT64), pointer(a[7], INT64)
    for expert in range(num_experts + 1):
        starts[expert] = 0
    for choice in range(num_choices):
        starts[chosen[choice]] += 1
    for expert in range(num_experts):
        starts[expert + 1] += starts[expert]
    for choice in range(num_choices - 1, -1, -1):
        expert = chosen[choice]
        starts[expert] -= 1
        places[choice] = starts[expert]
    for first in range(0, num_choices, size):
        _sort(places, weights, first, first + size)


@kernel_part
def _sort(places, weights, first, end):
    """The choices of one token: a few."""
    for choice in range(first + 1, end):
        place, weight, at = places[choice], weights[choice], choice
        while at > first and places[at - 1] > place:
            places[at], weights[at] = places[at - 1], weights[at - 1]
            at -= 1
        places[at], weights[at] = place, weight


@kernel_part
def _spread(a, kind):
    tokens, size, hidden = a[1], a[2], a[3]
    places, x, rows = pointer(a[4], INT64), pointer(a[5], kind), pointer(a[6], kind)
    while True:
        token = next_task(a)
        if token >= tokens:
            break
        for choice in range(token * size, token * size + size):
            start = places[choice] * hidden
            for i in range(0, hidden, WIDTH):
                store(rows, start + i, load(x, token * hidden + i))


@kernel_part
def _combine(a, kind):
    tokens, size, hidden = a[1], a[2], a[3]
    places, weights = pointer(a[4], INT64), pointer(a[7], FLOAT32)
    rows, output = pointer(a[5], kind), pointer(a[6], kind)
    while True:
        token = next_task(a)
        if token >= tokens:
            break
        first = token * size
        for i in range(0, hidden, WIDTH):
            total = splat(np.float32(0))
            for choice in range(first, first + size):
                total = total + splat(weights[choice]) * load(rows, places[choice] * hidden + i)
            store(output, token * hidden + i, total)
