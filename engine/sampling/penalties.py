"""Adjustments of logits before sampling: allowed ids, bad words, biases, penalties, in vLLM's order for its results.

    raw logits ─▶ (log-probabilities) ─▶ allowed_token_ids ─▶ bad_word_ids ─▶ logit_bias ─▶ repetition
    ─▶ frequency ─▶ presence ─▶ sampler.py: forbidden ids, temperature, filters, sample

Repetition counts prompt and output (Keskar et al., "CTRL", 2019, section 4.1: a seen token's logit is divided if
positive, multiplied if negative); frequency and presence count the output alone, as OpenAI defines them, wherever it
was emitted: after a preemption, a hand-over or a resumption the counts are the same.

Only the distinct tokens of a request are touched, not the vocabulary, and only in rows of requests with adjustments.
The arithmetic is float32, element by element, so a row is the same alone or in a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.scheduling.request import Request

_MIN_CAPACITY = 64


class SeenTokens:
    """The distinct tokens of one request and their counts in its output. An update costs only the new tokens."""

    def __init__(self, prompt_token_ids: Sequence[int] = ()) -> None:
        distinct = sorted(set(prompt_token_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._ids: npt.NDArray[np.int64] = np.array(distinct, np.int64)
        self._counts: npt.NDArray[np.float32] = np.zeros(len(distinct), np.float32)
        self.num_output_tokens = 0
        """Output tokens counted so far."""

    def add(self, output_token_ids: Iterable[int]) -> None:
        """Count the output tokens that follow those counted so far."""
        for token_id in output_token_ids:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._ids):
                self._grow()
            self._ids[slot] = token_id
            self._counts[slot] += 1
            self.num_output_tokens += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[distinct tokens], in arbitrary order."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """[distinct tokens], parallel to `ids`: occurrences in the output."""
        return self._counts[: len(self._slots)]

    def _grow(self) -> None:
        num_more = max(_MIN_CAPACITY, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(num_more, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(num_more, np.float32)])


class _RequestAdjustments:
    __slots__ = ("allowed_ids", "bad_words", "banned_ids", "bias_ids", "bias_values", "penalties", "seen")

    def __init__(self, request: Request) -> None:
        params = request.spec.params
        bias = params.logit_bias or {}
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self.allowed_ids = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64)
        self.bad_words = [(list(ids[:-1]), ids[-1]) for ids in params.bad_word_ids]
        self.banned_ids: list[int] = []
        self.penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.seen: SeenTokens | None = None
        if params.is_penalised:
            self.seen = SeenTokens(request.spec.prompt_token_ids if params.repetition_penalty != 1.0 else ())

    def update(self, request: Request) -> None:
        """Count the output since the last token and find the bad words that it begins."""
        self.banned_ids = [
            last
            for beginning, last in self.bad_words
            if len(beginning) <= request.num_output_tokens
            and request.token_ids[request.num_tokens - len(beginning) :] == beginning
        ]
        if self.seen is not None and self.seen.num_output_tokens < request.num_output_tokens:
            self.seen.add(request.token_ids[request.num_prompt_tokens + self.seen.num_output_tokens :])


class LogitAdjustments:
    """The adjustments of all requests that have some. Owned by the model runner.

    Those of a request are created at its first sampled token, kept through preemptions, and dropped with it.
    """

    def __init__(self) -> None:
        self._by_request: WeakKeyDictionary[Request, _RequestAdjustments] = WeakKeyDictionary()

    def apply(self, logits: Tensor, requests: Sequence[Request]) -> None:
        """Change `logits` [len(requests), vocab] (float32) in place, for each request's next token."""
        changing = [
            (row, self._adjustments_of(request))
            for row, request in enumerate(requests)
            if request.spec.params.changes_logits
        ]
        if changing:
            _allow(logits, changing)
            _add_bias(logits, changing)
            _penalise(logits, changing)

    def _adjustments_of(self, request: Request) -> _RequestAdjustments:
        adjustments = self._by_request.get(request)
        if adjustments is None:
            adjustments = self._by_request[request] = _RequestAdjustments(request)
        adjustments.update(request)
        return adjustments


def _allow(logits: Tensor, changing: Sequence[tuple[int, _RequestAdjustments]]) -> None:
    for row, change in changing:
        if change.allowed_ids is not None:
            allowed = torch.from_numpy(change.allowed_ids).to(logits.device)
            kept = logits[row, allowed]
            logits[row] = -torch.inf
            logits[row, allowed] = kept
        if change.banned_ids:
            logits[row, change.banned_ids] = -torch.inf


def _add_bias(logits: Tensor, changing: Sequence[tuple[int, _RequestAdjustments]]) -> None:
    biased = [(row, change) for row, change in changing if len(change.bias_ids)]
    if not biased:
        return
    place = _places(logits, [(row, change.bias_ids) for row, change in biased])
    logits[place] += _tensor(logits, [change.bias_values for _, change in biased])


def _penalise(logits: Tensor, changing: Sequence[tuple[int, _RequestAdjustments]]) -> None:
    seen = [(row, change.seen, change.penalties) for row, change in changing if change.seen and len(change.seen.ids)]
    if not seen:
        return
    place = _places(logits, [(row, tokens.ids) for row, tokens, _ in seen])
    counts = _tensor(logits, [tokens.counts for _, tokens, _ in seen])
    sizes = [len(tokens.ids) for _, tokens, _ in seen]
    columns = zip(*(penalties for _, _, penalties in seen), strict=True)
    repetition, frequency, presence = (
        _tensor(logits, [np.repeat(np.array(column, np.float32), sizes)]) for column in columns
    )
    values = logits[place]
    values = torch.where(values > 0, values / repetition, values * repetition)
    # Separate operations: a fused multiply-add would round differently in a vector's body and in its tail.
    values -= frequency * counts
    values -= presence * (counts > 0)
    logits[place] = values


def _places(logits: Tensor, ids_of_rows: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> tuple[Tensor, Tensor]:
    """Index of tokens in several rows: row numbers and ids."""
    rows = np.repeat([row for row, _ in ids_of_rows], [len(ids) for _, ids in ids_of_rows])
    return _tensor(logits, [rows]), _tensor(logits, [ids for _, ids in ids_of_rows])


def _tensor(like: Tensor, parts: Sequence[npt.NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(like.device)
