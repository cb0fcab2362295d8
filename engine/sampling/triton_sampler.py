"""The draw of a row's token on a GPU, as a Triton kernel: one program for each row, so that a token does not depend on
the rows beside it.

    weights exp((logit - best) / temperature), 0 below min_p
    ─▶ the smallest logit that top_k keeps, then the smallest that top_p keeps, by search over the bits of float32
    ─▶ the first id whose running sum of weights exceeds point * total

Sums are of blocks in vocabulary order, in float64. Of logits equal to the smallest kept one the lowest ids stay. With
TRITON_INTERPRET=1 the kernel runs on CPU, in numpy.
"""

# Triton's compiler types the bodies of kernels, not annotations; capitals are its compile-time constants.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: PLR0913 - a kernel has no objects to pass

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 8192


def draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    rows: Sequence[int],
    specs: Sequence[Sequence[float]],
    tokens: torch.Tensor,
) -> None:
    """Writes the token ids of some rows of `logits` [n, vocab] (float32) to `tokens` int64 [n]. `best` [n] has each
    row's largest logit, `specs` [len(rows), 5] temperature, min_p, top_k, top_p and the uniform number. Of a row whose
    best logit is not finite it is undefined."""
    device, vocab = logits.device, logits.shape[1]
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    by_row = [(row, *spec) for row, spec in zip(rows, specs, strict=True)]
    numbers = torch.tensor(by_row, dtype=torch.float64, device="cpu")
    draw_row[(len(rows),)](
        logits, best, numbers.to(device), tokens, vocab, logits.stride(0),
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)), num_warps=16,
    )  # fmt: skip


@triton.jit
def _ordered(bits):
    """The bits of floats as integers with the order of the floats, and back."""
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _keys(logits, start, vocab, BLOCK: tl.constexpr):
    """Numbers of a block of logits that are ordered as the logits are, and the logits; below all where there is none.
    Zeros of both signs are equal."""
    at = start + tl.arange(0, BLOCK)
    logit = tl.load(logits + at, mask=at < vocab, other=-float("inf")) + 0.0
    return _ordered(logit.to(tl.int32, bitcast=True)), logit


@triton.jit
def _weights(logit, best, temperature, min_p):
    weight = tl.exp((logit.to(tl.float64) - best) / temperature)
    return tl.where(weight >= min_p, weight, 0.0)


@triton.jit
def _possible(logits, best, temperature, min_p, vocab, BLOCK: tl.constexpr):
    """How many weights are above 0, and the smallest of their keys."""
    count, smallest = tl.zeros((), tl.int32), tl.full((), 2147483647, tl.int32)
    for start in range(0, vocab, BLOCK):
        key, logit = _keys(logits, start, vocab, BLOCK)
        is_possible = _weights(logit, best, temperature, min_p) > 0
        count += tl.sum(is_possible.to(tl.int32), 0)
        smallest = tl.minimum(smallest, tl.min(tl.where(is_possible, key, 2147483647), 0))
    return count, smallest.to(tl.int64)


@triton.jit
def _count_from(logits, first, second, third, vocab, BLOCK: tl.constexpr):
    """How many keys are at least `first`, `second` and `third`."""
    from_first, from_second, from_third = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, vocab, BLOCK):
        key, _ = _keys(logits, start, vocab, BLOCK)
        from_first += tl.sum((key >= first).to(tl.int32), 0)
        from_second += tl.sum((key >= second).to(tl.int32), 0)
        from_third += tl.sum((key >= third).to(tl.int32), 0)
    return from_first, from_second, from_third


@triton.jit
def _sum_from(logits, first, second, third, best, temperature, min_p, vocab, BLOCK: tl.constexpr):
    """The sums of weights with keys of at least `first` < `second` < `third`."""
    from_first, from_second, from_third = tl.zeros((), tl.float64), tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    for start in range(0, vocab, BLOCK):
        key, logit = _keys(logits, start, vocab, BLOCK)
        if tl.max(key, 0) >= first:
            weight = _weights(logit, best, temperature, min_p)
            from_first += tl.sum(tl.where(key >= first, weight, 0.0), 0)
            from_second += tl.sum(tl.where(key >= second, weight, 0.0), 0)
            from_third += tl.sum(tl.where(key >= third, weight, 0.0), 0)
    return from_first, from_second, from_third


@triton.jit
def _narrowed(lowest, high, quarter, reaches_first, reaches_second, reaches_third):
    """The part of [lowest, high] with the largest number that reaches what is needed, by whether lowest + 1, 2 and 3
    quarters do."""
    up = lowest + tl.where(reaches_third, 3, tl.where(reaches_second, 2, tl.where(reaches_first, 1, 0))) * quarter
    return up, tl.where(reaches_third, high, tl.minimum(high, up + quarter - 1))


@triton.jit
def _kept(logits, start, lowest, allowed, num_equal, best, temperature, min_p, vocab, BLOCK: tl.constexpr):
    """Weights of a block, 0 where they are not kept: keys below `lowest`, and of those equal to it all but the first
    `allowed`, of which `num_equal` came before. And that number after the block."""
    key, logit = _keys(logits, start, vocab, BLOCK)
    is_equal = (key == lowest).to(tl.int32)
    is_kept = (key > lowest) | ((is_equal > 0) & (num_equal + tl.cumsum(is_equal, 0) <= allowed))
    weight = tl.where(is_kept, _weights(logit, best, temperature, min_p), 0.0)
    return weight, num_equal + tl.sum(is_equal, 0)


@triton.jit
def _sum_kept(logits, lowest, allowed, best, temperature, min_p, vocab, BLOCK: tl.constexpr):
    total, num_equal = tl.zeros((), tl.float64), tl.zeros((), tl.int32)
    for start in range(0, vocab, BLOCK):
        weight, num_equal = _kept(logits, start, lowest, allowed, num_equal, best, temperature, min_p, vocab, BLOCK)
        total += tl.sum(weight, 0)
    return total


@triton.jit
def _keep_count(logits, most, lowest, allowed, best_key, best, temperature, min_p, vocab, BLOCK: tl.constexpr):
    """`lowest` and `allowed` so that at most `most` weights are kept."""
    count, smallest = _possible(logits, best, temperature, min_p, vocab, BLOCK)
    if count > most:
        lowest, high = smallest, best_key
        while lowest < high:  # the largest number that `most` keys reach
            step = (high - lowest) // 4 + 1
            first, second, third = _count_from(
                logits, lowest + step, lowest + 2 * step, lowest + 3 * step, vocab, BLOCK
            )
            lowest, high = _narrowed(lowest, high, step, first >= most, second >= most, third >= most)
        above, _, _ = _count_from(logits, lowest + 1, lowest + 1, lowest + 1, vocab, BLOCK)
        allowed = most - above
    return lowest, allowed


@triton.jit
def _keep_sum(logits, share, lowest, allowed, best_key, best, temperature, min_p, vocab, BLOCK: tl.constexpr):
    """`lowest` and `allowed` so that the fewest weights are kept that add up to `share` of those kept so far."""
    needed = share * _sum_kept(logits, lowest, allowed, best, temperature, min_p, vocab, BLOCK)
    high, smallest = best_key, lowest
    while lowest < high:  # the largest number from which on the weights add up to `needed`
        step = (high - lowest) // 4 + 1
        first, second, third = _sum_from(
            logits, lowest + step, lowest + 2 * step, lowest + 3 * step, best, temperature, min_p, vocab, BLOCK
        )
        lowest, high = _narrowed(lowest, high, step, first >= needed, second >= needed, third >= needed)
    above, _, _ = _sum_from(logits, lowest + 1, lowest + 1, lowest + 1, best, temperature, min_p, vocab, BLOCK)
    bits = _ordered(lowest).to(tl.int32)
    edge = tl.exp((bits.to(tl.float32, bitcast=True).to(tl.float64) - best) / temperature)
    enough = tl.maximum(tl.ceil((needed - above) / edge), 1.0)
    most = tl.where(lowest > smallest, 2147483647, allowed)
    return lowest, tl.minimum(enough, most.to(tl.float64)).to(tl.int32)


@triton.jit
def draw_row(logits, best, specs, tokens, vocab, row_stride, BLOCK: tl.constexpr):
    """Program (one of `specs` float64 [.., 6]: its row, and what `draw` has of it)."""
    specs += 6 * tl.program_id(0)
    row = tl.load(specs).to(tl.int64)
    temperature, min_p, top_k = tl.load(specs + 1), tl.load(specs + 2), tl.load(specs + 3).to(tl.int32)
    top_p, point = tl.load(specs + 4), tl.load(specs + 5)
    logits += row * row_stride
    best_logit = tl.load(best + row) + 0.0
    best_key = _ordered(best_logit.to(tl.int32, bitcast=True)).to(tl.int64)
    best_logit = best_logit.to(tl.float64)

    # Kept are the keys above `lowest`, and the first `allowed` of those equal to it.
    lowest, allowed = tl.full((), -2147483648, tl.int64), tl.full((), 2147483647, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        lowest, allowed = _keep_count(
            logits, top_k, lowest, allowed, best_key, best_logit, temperature, min_p, vocab, BLOCK
        )
    if top_p < 1.0:
        lowest, allowed = _keep_sum(
            logits, top_p, lowest, allowed, best_key, best_logit, temperature, min_p, vocab, BLOCK
        )
    target = point * _sum_kept(logits, lowest, allowed, best_logit, temperature, min_p, vocab, BLOCK)
    # The same sums once more, until they exceed the target.
    running, num_equal = tl.zeros((), tl.float64), tl.zeros((), tl.int32)
    token, start = tl.full((), -1, tl.int32), tl.zeros((), tl.int32)
    while (running <= target) & (start < vocab):
        weight, num_equal = _kept(
            logits, start, lowest, allowed, num_equal, best_logit, temperature, min_p, vocab, BLOCK
        )
        at = start + tl.arange(0, BLOCK)
        block_sum = tl.sum(weight, 0)
        if block_sum > 0:
            is_past = (weight > 0) & (running + tl.cumsum(weight, 0) > target)
            first = tl.min(tl.where(is_past, at, vocab), 0)
            # Rounding may leave none in the last block with a weight.
            token = tl.where(first < vocab, first, tl.max(tl.where(weight > 0, at, -1), 0))
        running += block_sum
        start += BLOCK
    tl.store(tokens + row, token.to(tl.int64))
