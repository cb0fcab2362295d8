"""The tokens of a step: everything between the raw logits and the ids. Both engines use it (vllm_engine/sampling.py).

raw logits ─▶ biases and penalties (penalties.py; rows with log-probabilities keep a raw copy)
─▶ constraints (grammar.py) ─▶ tokens (sampler.py) ─▶ log-probabilities of the raw logits (logprobs.py)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sampling.grammar import GrammarMasks
from engine.sampling.logprobs import token_logprobs
from engine.sampling.penalties import LogitAdjustments
from engine.sampling.sampler import NonFiniteLogits, SamplingRow, sample
from engine.scheduling.request import Request
from engine.scheduling.scheduler_output import Sampled


class TokenSampler:
    """Samples the next tokens of requests, and keeps what a request's next sampling needs."""

    def __init__(self) -> None:
        self._adjustments = LogitAdjustments()
        self._grammars = GrammarMasks()

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """The next tokens, from `logits` [len(requests), vocab] (float32), which it changes. Requests whose logits are
        not finite get none."""
        numbered = list(enumerate(requests))
        with_logprobs = [(row, request) for row, request in numbered if request.spec.params.logprobs is not None]
        raw = {row: logits[row].clone() for row, request in with_logprobs if request.spec.params.changes_logits}
        self._adjustments.apply(logits, requests)
        self._grammars.apply(logits, requests)
        token_ids = _sample_finite(logits, requests)
        with_logprobs = [(row, request) for row, request in with_logprobs if request.request_id in token_ids]
        if not with_logprobs:
            return Sampled(token_ids)
        logprobs = token_logprobs(
            [raw.get(row, logits[row]) for row, _ in with_logprobs],
            [token_ids[request.request_id] for _, request in with_logprobs],
            [request.spec.params.logprobs or 0 for _, request in with_logprobs],
        )
        by_id = {request.request_id: entries for (_, request), entries in zip(with_logprobs, logprobs, strict=True)}
        return Sampled(token_ids, by_id)


def _sample_finite(logits: torch.Tensor, requests: Sequence[Request]) -> dict[str, int]:
    """Tokens by request id, of the rows with finite logits."""
    rows = [_sampling_row(request) for request in requests]
    try:
        tokens = sample(logits, rows)
    except NonFiniteLogits as error:
        finite = [index for index in range(len(rows)) if index not in error.rows]
        if not finite:
            return {}
        tokens = sample(logits[finite], [rows[index] for index in finite])
        requests = [requests[index] for index in finite]
    return {request.request_id: token for request, token in zip(requests, tokens, strict=True)}


def _sampling_row(request: Request) -> SamplingRow:
    params = request.spec.params
    forbidden: tuple[int, ...] = ()
    if request.num_output_tokens < params.min_tokens and request.grammar is None:  # else its mask forbids them
        eos = () if params.ignore_eos else request.spec.eos_token_ids
        forbidden = (*eos, *params.stop_token_ids)
    return SamplingRow(
        params=params,
        seed=request.spec.seed,
        choice=request.spec.choice,
        position=request.num_tokens,
        forbidden_ids=forbidden,
    )
