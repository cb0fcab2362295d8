"""The choice of experts, rows in the order of their experts, and the sums of a token's experts, called with addresses
by `engine.models.experts`.

An assignment is one of a token's experts. Its place is that of its row among the rows of all assignments, which are
ordered by expert; those of a token are in the order of their experts, so that the order of its sum depends on it alone.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import functools

import numpy as np

from engine.attention.compilation import kernel, kernel_part
from engine.attention.simd import FLOAT32, INT64, KINDS, WIDTH, exp, first_of, load, next_task, pointer, splat, store


@functools.cache
def choose_address() -> int:
    """`void(int64*)`: counter, tokens, experts of a token, experts, logits (float32 [tokens, experts]), whether the
    weights of a token's experts are divided by their sum; written: weight (float32) and expert of each assignment."""

    @kernel
    def compiled(a):
        _choose(a)

    return int(compiled.address)


@functools.cache
def place_address() -> int:
    """`void(int64*)`, for one thread: counter, tokens, experts of a token, experts; expert and weight (float32) of each
    assignment; written: first row of each expert and the end [experts + 1], place of each assignment, weights in the
    order of the places."""

    @kernel
    def compiled(a):
        _place(a)

    return int(compiled.address)


def spread_address(dtype: str) -> int:
    """`void(int64*)`: counter, tokens, experts of a token, hidden, places, x [tokens, hidden], rows [assignments,
    hidden]."""
    kind = KINDS[dtype]

    @kernel
    def compiled(a):
        _spread(a, kind)

    return int(compiled.address)


def combine_address(dtype: str) -> int:
    """`void(int64*)`: counter, tokens, experts of a token, hidden, places, rows [assignments, hidden], output [tokens,
    hidden], weights (float32)."""
    kind = KINDS[dtype]

    @kernel
    def compiled(a):
        _combine(a, kind)

    return int(compiled.address)


@kernel_part
def _choose(a):
    tokens, size, num_experts, logits = a[1], a[2], a[3], pointer(a[4], FLOAT32)
    weights, chosen = pointer(a[6], FLOAT32), pointer(a[7], INT64)
    while True:
        token = next_task(a)
        if token >= tokens:
            break
        first, row = token * size, token * num_experts
        for assignment in range(size):
            last = chosen[first + assignment - 1] if assignment > 0 else -1
            chosen[first + assignment] = _next_best(logits, row, num_experts, last)
        greatest, total = logits[row + chosen[first]], np.float32(0)
        if a[5] == 0:
            for expert in range(num_experts):
                total += _exp(logits[row + expert] - greatest)
        for assignment in range(first, first + size):
            weights[assignment] = _exp(logits[row + chosen[assignment]] - greatest)
            if a[5] != 0:
                total += weights[assignment]
        for assignment in range(first, first + size):
            weights[assignment] /= total


@kernel_part
def _next_best(logits, row, num_experts, last):
    """The expert that follows `last` (-1: none) by logits, those of equal ones in ascending order. Of a row with NaN it
    may be any."""
    best = -1
    for expert in range(num_experts):
        logit = logits[row + expert]
        follows = last < 0 or logit < logits[row + last] or (logit == logits[row + last] and expert > last)
        if follows and (best < 0 or logit > logits[row + best]):
            best = expert
    return max(best, 0)


@kernel_part
def _exp(x):
    """NaN stays, which `exp` clamps."""
    return x if np.isnan(x) else first_of(exp(splat(x)))


@kernel_part
def _place(a):
    size, num_assignments, num_experts = a[2], a[1] * a[2], a[3]
    chosen, given = pointer(a[4], INT64), pointer(a[5], FLOAT32)
    starts, places, weights = pointer(a[6], INT64), pointer(a[7], INT64), pointer(a[8], FLOAT32)
    for expert in range(num_experts + 1):
        starts[expert] = 0
    for assignment in range(num_assignments):
        starts[chosen[assignment]] += 1
    for expert in range(num_experts):
        starts[expert + 1] += starts[expert]
    for assignment in range(num_assignments - 1, -1, -1):
        expert = chosen[assignment]
        starts[expert] -= 1
        places[assignment], weights[assignment] = starts[expert], given[assignment]
    for first in range(0, num_assignments, size):
        _sort(places, weights, first, first + size)


@kernel_part
def _sort(places, weights, first, end):
    """The assignments of one token: a few."""
    for assignment in range(first + 1, end):
        place, weight, at = places[assignment], weights[assignment], assignment
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
        for assignment in range(token * size, token * size + size):
            start = places[assignment] * hidden
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
            for assignment in range(first, first + size):
                total = total + splat(weights[assignment]) * load(rows, places[assignment] * hidden + i)
            store(output, token * hidden + i, total)
