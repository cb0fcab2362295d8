"""Sampling: a pure function of the logits and of (seed, choice, absolute position). Both engines use `TokenSampler`
(vllm_engine/worker.py).

    raw logits ─▶ biases and penalties (penalties.py; rows with log-probabilities keep a raw copy)
    ─▶ constraints (grammar_masks.py) ─▶ tokens (`sample`) ─▶ log-probabilities of the raw logits (logprobs.py)

Each token takes one uniform number from a counter-based generator, which has no state to carry, save or replay, and
inverts the cumulative distribution over the vocabulary, in vocabulary order and float64. So a token does not depend on
the rest of the batch, on preemption, or on the instance that continues a stream: every row's arithmetic is the same
alone or in a batch. On CPU a compiled kernel draws, one row a thread (sampler_kernels.py); on a GPU one of Triton, one
row a program (triton_sampler.py), which adds up in another order.

Filters in vLLM's order: temperature, then min_p, top_k, top_p (of what top_k kept). Of equal logits at a filter's edge
the lowest ids stay, so that top_k=1 is greedy; vLLM keeps all of them for top_k and unspecified ones for top_p.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.openmp import launcher
from engine.errors import EngineError
from engine.sampling import sampler_kernels
from engine.sampling.grammar_masks import GrammarMasks
from engine.sampling.logprobs import token_logprobs
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import LogitAdjustments
from engine.scheduling.request import Request
from engine.scheduling.scheduler_output import LogitsRow, Sampled

_MASK32 = 0xFFFFFFFF

T = TypeVar("T")

_scratch = threading.local()
"""Of each thread that samples on CPU: `memory`, float64."""


class NonFiniteLogits(EngineError):
    """The best logit of `rows` is NaN or infinite: a broken model, or the request's parameters. No row was sampled."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows
        super().__init__(f"the best logit of row(s) {', '.join(map(str, rows[:8]))} is not finite")


@dataclass(slots=True, frozen=True)
class SamplingRow:
    """How one row of logits is sampled; `params` is validated."""

    params: SamplingParams
    seed: int = 0
    choice: int = 0
    position: int = 0
    """Index in prompt + output of the sampled token."""
    forbidden_ids: tuple[int, ...] = ()
    """Tokens that must not be sampled: EOS and stop tokens before min_tokens."""


class TokenSampler:
    """Samples the next tokens of requests, and keeps what a request's next sampling needs."""

    def __init__(self) -> None:
        self._adjustments = LogitAdjustments()
        self.grammars = GrammarMasks()

    def sample(
        self, logits: Tensor, requests: Sequence[Request], drafts: Mapping[str, list[int]] | None = None
    ) -> Sampled:
        """The next tokens, from `logits` [rows, vocab] (float32), which it changes: a row of each request, then one of
        each token of its draft, where `drafts` has one under its id. Requests whose logits are not finite get none."""
        rows = list(_rows(requests, drafts or {}))
        owners = [row.request for row in rows]
        with_logprobs = [row for row, request in enumerate(owners) if request.spec.params.logprobs is not None]
        raw = {row: logits[row].clone() for row in with_logprobs if owners[row].spec.params.changes_logits}
        self._adjustments.apply(logits, rows)
        unknown = self.grammars.apply(logits, rows)
        tokens = _sample_finite(logits, [_sampling_row(row) for row in rows])
        kept = dict.fromkeys(_kept(rows, tokens, unknown)) if drafts else tokens
        token_ids = _by_request(owners, kept, [tokens[row] for row in kept])
        with_logprobs = [row for row in with_logprobs if row in kept]
        if not with_logprobs:
            return Sampled(token_ids)
        logprobs = token_logprobs(
            [raw.get(row, logits[row]) for row in with_logprobs],
            [tokens[row] for row in with_logprobs],
            [owners[row].spec.params.logprobs or 0 for row in with_logprobs],
        )
        return Sampled(token_ids, _by_request(owners, with_logprobs, logprobs))


def _rows(requests: Sequence[Request], drafts: Mapping[str, list[int]]) -> Iterator[LogitsRow]:
    for request in requests:
        yield LogitsRow(request)
        if draft := drafts.get(request.request_id):
            yield from (LogitsRow(request, draft[:place]) for place in range(1, 1 + len(draft)))


def _kept(rows: Sequence[LogitsRow], tokens: Mapping[int, int], unknown: Container[int]) -> Iterator[int]:
    """The rows whose tokens count: of each request the first, and those behind a token of its draft that was right."""
    is_right = True
    for index, row in enumerate(rows):
        is_right = not row.drafted or (is_right and tokens.get(index - 1) == row.drafted[-1] and index not in unknown)
        if is_right and index in tokens:
            yield index


def _by_request(owners: Sequence[Request], rows: Iterable[int], values: Iterable[T]) -> dict[str, list[T]]:
    """The values of each request's rows, by its id."""
    by_id: dict[str, list[T]] = {}
    for row, value in zip(rows, values, strict=True):
        by_id.setdefault(owners[row].request_id, []).append(value)
    return by_id


def _sample_finite(logits: Tensor, rows: Sequence[SamplingRow]) -> dict[int, int]:
    """Tokens of the rows with finite logits, by row."""
    try:
        return dict(enumerate(sample(logits, rows)))
    except NonFiniteLogits as error:
        finite = [index for index in range(len(rows)) if index not in error.rows]
    if not finite:
        return {}
    return dict(zip(finite, sample(logits[finite], [rows[index] for index in finite]), strict=True))


def _sampling_row(row: LogitsRow) -> SamplingRow:
    spec, params = row.request.spec, row.request.spec.params
    forbidden: tuple[int, ...] = ()
    if row.num_output_tokens < params.min_tokens and row.request.grammar is None:  # else its mask forbids them
        forbidden = spec.ending_token_ids
    return SamplingRow(
        params=params, seed=spec.seed, choice=spec.choice, position=row.position, forbidden_ids=forbidden
    )


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block of Philox4x32-10: four 32-bit words.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        even, odd = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (odd >> 32) ^ c1 ^ k0, odd & _MASK32, (even >> 32) ^ c3 ^ k1, even & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1), a multiple of 2^-53, of (seed, choice, position).

    Key: the seed's low and high word; counter: the position's low and high word, choice, 0; the result is the upper 53
    bits of (second word, first word).
    """
    counter = (position & _MASK32, position >> 32 & _MASK32, choice & _MASK32, 0)
    low, high, _, _ = philox4x32(counter, (seed & _MASK32, seed >> 32 & _MASK32))
    return ((high << 32 | low) >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token id per row of `logits` [n, vocab] (float32, not changed). Raises `NonFiniteLogits`."""
    logits = _without_forbidden(logits, rows)
    drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if logits.device.type != "cpu":
        return _sample_on_device(logits, rows, drawn)
    tokens, best_logits = _best(logits)
    if drawn:
        for index, token in zip(drawn, _draw(logits, best_logits, rows, drawn), strict=True):
            tokens[index] = token
    return tokens


def _without_forbidden(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} sampling rows")
    if not any(row.forbidden_ids for row in rows):
        return logits
    logits = logits.clone()
    for i, row in enumerate(rows):
        if row.forbidden_ids:
            logits[i, list(row.forbidden_ids)] = -math.inf
    return logits


def _best(logits: Tensor) -> tuple[list[int], list[float]]:
    """Id, the lowest among equals, and value of each row's best logit."""
    # numpy's argmax is vectorised and takes the first of equals too: 8 us per row of 152 k, torch's 230 us.
    best = torch.from_numpy(np.argmax(logits.detach().numpy(), axis=-1))
    values: list[float] = logits.gather(1, best[:, None]).squeeze(1).tolist()
    _check_finite(values)
    return best.tolist(), values


def _check_finite(best_logits: Sequence[float]) -> None:
    if wrong := tuple(i for i, value in enumerate(best_logits) if not math.isfinite(value)):
        raise NonFiniteLogits(wrong)


def _sample_on_device(logits: Tensor, rows: Sequence[SamplingRow], drawn: Sequence[int]) -> list[int]:
    """On a GPU, which is waited for once."""
    tokens = logits.argmax(dim=-1)
    best = logits.gather(1, tokens[:, None]).squeeze(1)
    if drawn:
        from engine.sampling.triton_sampler import draw

        draw(logits, best, drawn, [_spec(rows[index]) for index in drawn], tokens)
    found, values = torch.stack((tokens.double(), best.double())).tolist()
    _check_finite(values)
    return [int(token) for token in found]


def _uniform_of(row: SamplingRow) -> float:
    return uniform(row.seed, row.choice, row.position)


def _draw(logits: Tensor, best_logits: Sequence[float], rows: Sequence[SamplingRow], drawn: Sequence[int]) -> list[int]:
    """Tokens of the rows `drawn`, by the compiled kernel."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    vocab, row_bytes = logits.shape[1], logits.stride(0) * logits.element_size()
    addresses = np.array([logits.data_ptr() + index * row_bytes for index in drawn], np.int64)
    specs = np.array([(best_logits[index], *_spec(rows[index])) for index in drawn], np.float64)
    tokens = np.empty(len(drawn), np.int64)
    num_threads = min(torch.get_num_threads(), len(drawn))
    num_scratch = sampler_kernels.num_scratch(vocab)
    scratch = _scratch_of(num_threads * num_scratch)
    inputs = (array.ctypes.data for array in (addresses, specs, scratch))
    arguments = _Arguments(0, num_threads, len(drawn), vocab, *inputs, num_scratch, tokens.ctypes.data)
    launcher(sampler_kernels.sample_address())(num_threads, arguments)
    return tokens.tolist()


_Arguments = ctypes.c_int64 * 9


def _spec(row: SamplingRow) -> tuple[float, ...]:
    """`sampler_kernels.SPEC_FIELDS` without the best logit."""
    params = row.params
    return params.temperature, params.min_p, params.top_k, params.top_p, _uniform_of(row)


def _scratch_of(num_elements: int) -> npt.NDArray[np.float64]:
    """Memory of this thread, kept for its next step: fresh pages cost more than the sampling."""
    memory: npt.NDArray[np.float64] | None = getattr(_scratch, "memory", None)
    if memory is None or len(memory) < num_elements:
        memory = _scratch.memory = np.empty(num_elements, np.float64)
    return memory
