"""The compiled sampler of rows of logits on CPU, called with addresses by `sampler.py`; and, called by
`grammar_masks.py`, what excludes the tokens that a constraint's mask does not admit.

A row takes a few passes over its vocabulary, in float64. Where a filter compares weights, they are counted into buckets
by their exponent and the first bits of their mantissa, and only the bucket in which the filter ends is put in order, so
that top_p sorts no vocabulary. Sums are those of blocks, in an order that depends on the vocabulary's size alone.
`engine.attention.openmp` says how kernels run and what arguments[0] is.
"""

# The compiled bodies are typed by numba, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import functools
import math

import numpy as np

from engine.attention.compilation import kernel, kernel_part
from engine.attention.simd import FLOAT32, INT32, INT64, as_double, bits_of_double, next_task, pointer

FLOAT64 = np.float64(0)
BLOCK = 256
"""Weights that are added up together."""
NUM_BUCKETS = 4096
_BUCKET_SHIFT = 46
"""64 buckets for each power of two. The last bucket has the weights below about 2**-64."""
_FIRST_BUCKET = 1023 << (52 - _BUCKET_SHIFT)
"""The upper bits of 1.0, the largest weight."""
_SMALLEST = -690.0
"""e to numbers below this is 0: less than 1e-299 of the largest weight."""
_ROUNDER = 1.5 * 2.0**52
"""Added to a double, it leaves the nearest whole number in the lower bits."""
_LOG2_E = 1 / math.log(2)
_LN2_UPPER, _LN2_LOWER = 0.693147180369123816490, 1.90821492927058770002e-10
"""ln 2 in two parts, the first with so few bits that its product with a whole number is exact."""
SPEC_FIELDS = ("best", "temperature", "min_p", "top_k", "top_p", "point")
_BEST, _TEMPERATURE, _MIN_P, _TOP_K, _TOP_P, _POINT = range(len(SPEC_FIELDS))


def num_scratch(vocab: int) -> int:
    """float64 of scratch for each thread: weights, sums of blocks, sums and counts of buckets, members of a bucket."""
    return 2 * vocab + -(-vocab // BLOCK) + 2 * NUM_BUCKETS


@functools.cache
def sample_address() -> int:
    """`void(int64*)`: counter, threads, rows, vocab, addresses of the rows' float32 logits [rows], specs float64
    [rows, SPEC_FIELDS], scratch float64 [threads, num_scratch], num_scratch, tokens int64 [rows]."""

    @kernel
    def compiled(a):
        num_lanes, num_rows, vocab = a[1], a[2], a[3]
        rows, tokens = pointer(a[4], INT64), pointer(a[8], INT64)
        lane = next_task(a)
        while lane < num_lanes:
            scratch = a[6] + 8 * lane * a[7]
            for row in range(lane, num_rows, num_lanes):
                spec = pointer(a[5] + 8 * len(SPEC_FIELDS) * row, FLOAT64)
                tokens[row] = _sample_row(pointer(rows[row], FLOAT32), vocab, spec, scratch)
            lane = next_task(a)

    return int(compiled.address)


@kernel_part
def _sample_row(logits, vocab, spec, scratch):
    weights, sums = pointer(scratch, FLOAT64), pointer(scratch + 8 * vocab, FLOAT64)
    total = _compute_weights(logits, vocab, spec, weights, sums)
    top_k, top_p = np.int64(spec[_TOP_K]), spec[_TOP_P]
    is_narrowed = 0 < top_k < vocab
    if is_narrowed or top_p < 1.0:
        after_sums = scratch + 8 * (vocab + -(-vocab // BLOCK))
        bucket_sums, counts = pointer(after_sums, FLOAT64), pointer(after_sums + 8 * NUM_BUCKETS, INT64)
        members = after_sums + 16 * NUM_BUCKETS
        _fill_buckets(weights, vocab, bucket_sums, counts)
        count = top_k if is_narrowed else vocab
        edge, num_equal, has_more = 0.0, 0, False
        if is_narrowed:
            edge, num_equal, has_more, total = _edge(weights, vocab, bucket_sums, counts, members, count, math.inf)
        if top_p < 1.0:
            edge, num_equal, has_more, total = _edge(weights, vocab, bucket_sums, counts, members, count, top_p * total)
        total = _keep(weights, vocab, edge, num_equal, has_more, sums)
    return _invert(weights, vocab, sums, spec[_POINT] * total)


@kernel_part(fastmath={"contract"})
def _compute_weights(logits, vocab, spec, weights, sums):
    """Computes weights [vocab], of which the best is 1 and those below min_p are 0, and the sum of each block.
    Returns the total."""
    best, temperature, min_p = spec[_BEST], spec[_TEMPERATURE], spec[_MIN_P]
    total = 0.0
    for begin in range(0, vocab, BLOCK):
        end = min(begin + BLOCK, vocab)
        for i in range(begin, end):
            weight = _exp((np.float64(logits[i]) - best) / temperature)
            weights[i] = weight if weight >= min_p else 0.0
        sums[begin // BLOCK] = _sum(weights, begin, end)
        total += sums[begin // BLOCK]
    return total


@kernel_part(fastmath={"contract"})
def _exp(x):
    """e**x within 1 ulp for x <= 0; 0 for x below `_SMALLEST`.

    x = n ln 2 + r with |r| <= ln 2 / 2, and Taylor to r**13 by Estrin's scheme, whose terms do not wait.
    """
    shifted = x * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    r = (x - n * _LN2_UPPER) - n * _LN2_LOWER
    r2 = r * r
    r4 = r2 * r2
    p0 = (1.0 + r) + (1 / 2 + r * (1 / 6)) * r2
    p4 = (1 / 24 + r * (1 / 120)) + (1 / 720 + r * (1 / 5040)) * r2
    p8 = (1 / 40320 + r * (1 / 362880)) + (1 / 3628800 + r * (1 / 39916800)) * r2
    p12 = 1 / 479001600 + r * (1 / 6227020800)
    p = (p0 + p4 * r4) + (p8 + p12 * r4) * (r4 * r4)
    scaled = as_double(bits_of_double(p) + (bits_of_double(shifted) << 52))
    return scaled if x >= _SMALLEST else 0.0


@kernel_part
def _sum(weights, begin, end):
    """Of weights [begin, end), in eight sums."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    whole = begin + (end - begin) // 8 * 8
    for i in range(begin, whole, 8):
        s0 += weights[i]
        s1 += weights[i + 1]
        s2 += weights[i + 2]
        s3 += weights[i + 3]
        s4 += weights[i + 4]
        s5 += weights[i + 5]
        s6 += weights[i + 6]
        s7 += weights[i + 7]
    for i in range(whole, end):
        s0 += weights[i]
    return ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))


@kernel_part
def _bucket_of(weight):
    """From 0, which has 1.0 alone, in falling order."""
    return min(_FIRST_BUCKET - (bits_of_double(weight) >> _BUCKET_SHIFT), NUM_BUCKETS - 1)


@kernel_part
def _fill_buckets(weights, vocab, bucket_sums, counts):
    """Number and sum of the weights of each bucket but the last one."""
    for bucket in range(NUM_BUCKETS):
        bucket_sums[bucket], counts[bucket] = 0.0, 0
    for i in range(vocab):
        bucket = _bucket_of(weights[i])
        if bucket < NUM_BUCKETS - 1:
            bucket_sums[bucket] += weights[i]
            counts[bucket] += 1


@kernel_part
def _edge(weights, vocab, bucket_sums, counts, members, max_count, min_sum):
    """Where the largest weights end, of which there are `max_count`, or as many as add up to `min_sum`: the smallest of
    them, how many of those equal to it belong to them, whether there are more of those, and the sum of all."""
    count, total, bucket = 0, 0.0, 0
    while bucket < NUM_BUCKETS - 1:
        if count + counts[bucket] >= max_count or total + bucket_sums[bucket] >= min_sum:
            break
        count += counts[bucket]
        total += bucket_sums[bucket]
        bucket += 1
    found = pointer(members, FLOAT64)
    num_found = 0
    for i in range(vocab):
        if weights[i] > 0.0 and _bucket_of(weights[i]) == bucket:
            found[num_found] = weights[i]
            num_found += 1
    for parent in range(num_found // 2 - 1, -1, -1):
        _sift_down(found, parent, num_found)
    edge, num_equal = 0.0, 0
    while num_found > 0 and count < max_count and total < min_sum:
        num_equal = num_equal + 1 if found[0] == edge else 1
        edge = found[0]
        count += 1
        total += edge
        num_found -= 1
        found[0] = found[num_found]
        _sift_down(found, 0, num_found)
    return edge, num_equal, num_found > 0 and found[0] == edge, total


@kernel_part
def _sift_down(heap, parent, length):
    """Restores the heap, the largest first, of which only heap[parent] may be too small."""
    number, at, child = heap[parent], parent, 2 * parent + 1
    while child < length:
        if child + 1 < length and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= number:
            break
        heap[at] = heap[child]
        at, child = child, 2 * child + 1
    heap[at] = number


@kernel_part
def _keep(weights, vocab, edge, num_equal, has_more, sums):
    """Sets weights below `edge` to 0, and where `has_more` those equal to it but the first `num_equal`. Returns the
    total, and updates the sums of blocks."""
    total = 0.0
    for begin in range(0, vocab, BLOCK):
        end = min(begin + BLOCK, vocab)
        for i in range(begin, end):
            weights[i] = weights[i] if weights[i] >= edge else 0.0
        if has_more:
            for i in range(begin, end):
                if weights[i] == edge:
                    num_equal -= 1
                    weights[i] = edge if num_equal >= 0 else 0.0
        sums[begin // BLOCK] = _sum(weights, begin, end)
        total += sums[begin // BLOCK]
    return total


@kernel_part
def _invert(weights, vocab, sums, target):
    """The first id whose running sum exceeds `target`, which is less than the total; where rounding leaves none in its
    block, the last possible one there."""
    block, running = 0, 0.0
    while running + sums[block] <= target:
        running += sums[block]
        block += 1
    token = 0
    for i in range(BLOCK * block, min(BLOCK * (block + 1), vocab)):
        running += weights[i]
        if weights[i] > 0.0:
            token = i
            if running > target:
                break
    return token


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
