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
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.scheduling.request import Request
from engine.scheduling.scheduler_output import LogitsRow

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

    def after(self, token_ids: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """`ids` and `counts` with these output tokens behind those counted."""
        if not token_ids:
            return self.ids, self.counts
        slots = {token_id: self._slots.get(token_id) for token_id in token_ids}
        new_ids = [token_id for token_id, slot in slots.items() if slot is None]
        slots |= {token_id: slot for slot, token_id in enumerate(new_ids, len(self._slots))}
        counts = np.concatenate([self.counts, np.zeros(len(new_ids), np.float32)])
        for token_id in token_ids:
            counts[slots[token_id]] += 1
        return np.concatenate([self.ids, np.array(new_ids, np.int64)]), counts

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


class _RowAdjustments(NamedTuple):
    """Those of one row of logits."""

    allowed_ids: npt.NDArray[np.int64] | None
    banned_ids: list[int]
    bias_ids: npt.NDArray[np.int64]
    bias_values: npt.NDArray[np.float32]
    penalties: tuple[float, float, float]
    """Repetition, frequency, presence."""
    seen_ids: npt.NDArray[np.int64]
    seen_counts: npt.NDArray[np.float32]


class _RequestAdjustments:
    __slots__ = ("_bad_words", "_fixed", "_seen")

    def __init__(self, request: Request) -> None:
        params = request.spec.params
        bias = params.logit_bias or {}
        self._fixed = _RowAdjustments(
            allowed_ids=None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64),
            banned_ids=[],
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
            penalties=(params.repetition_penalty, params.frequency_penalty, params.presence_penalty),
            seen_ids=np.empty(0, np.int64),
            seen_counts=np.empty(0, np.float32),
        )
        self._bad_words = [(list(ids[:-1]), ids[-1]) for ids in params.bad_word_ids]
        self._seen: SeenTokens | None = None
        if params.is_penalised:
            self._seen = SeenTokens(request.spec.prompt_token_ids if params.repetition_penalty != 1.0 else ())

    def of(self, row: LogitsRow) -> _RowAdjustments:
        """Those of a row of this request, after its output and the drafted tokens."""
        change = self._fixed
        if self._bad_words:
            change = change._replace(banned_ids=[last for ids, last in self._bad_words if _ends_with(row, ids)])
        if self._seen is not None:
            request = row.request
            if self._seen.num_output_tokens < request.num_output_tokens:
                self._seen.add(request.token_ids[request.num_prompt_tokens + self._seen.num_output_tokens :])
            seen_ids, seen_counts = self._seen.after(row.drafted)
            change = change._replace(seen_ids=seen_ids, seen_counts=seen_counts)
        return change


def _ends_with(row: LogitsRow, token_ids: list[int]) -> bool:
    """Whether these are the last tokens before the row's, all of them in the output."""
    if not token_ids or len(token_ids) > row.num_output_tokens:
        return not token_ids
    known = row.request.token_ids
    last = [*known[-len(token_ids) :], *row.drafted]
    return last[len(last) - len(token_ids) :] == token_ids


class LogitAdjustments:
    """The adjustments of all requests that have some. Owned by the model runner.

    Those of a request are created at its first sampled token, kept through preemptions, and dropped with it.
    """

    def __init__(self) -> None:
        self._by_request: WeakKeyDictionary[Request, _RequestAdjustments] = WeakKeyDictionary()

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        """Change `logits` [len(rows), vocab] (float32) in place, for each row's token."""
        changing = [
            (index, self._adjustments_of(row.request).of(row))
            for index, row in enumerate(rows)
            if row.request.spec.params.changes_logits
        ]
        if changing:
            _allow(logits, changing)
            _add_bias(logits, changing)
            _penalise(logits, changing)

    def _adjustments_of(self, request: Request) -> _RequestAdjustments:
        adjustments = self._by_request.get(request)
        if adjustments is None:
            adjustments = self._by_request[request] = _RequestAdjustments(request)
        return adjustments


def _allow(logits: Tensor, changing: Sequence[tuple[int, _RowAdjustments]]) -> None:
    for row, change in changing:
        if change.allowed_ids is not None:
            allowed = torch.from_numpy(change.allowed_ids).to(logits.device)
            kept = logits[row, allowed]
            logits[row] = -torch.inf
            logits[row, allowed] = kept
        if change.banned_ids:
            logits[row, change.banned_ids] = -torch.inf


def _add_bias(logits: Tensor, changing: Sequence[tuple[int, _RowAdjustments]]) -> None:
    biased = [(row, change) for row, change in changing if len(change.bias_ids)]
    if not biased:
        return
    place = _places(logits, [(row, change.bias_ids) for row, change in biased])
    logits[place] += _tensor(logits, [change.bias_values for _, change in biased])


def _penalise(logits: Tensor, changing: Sequence[tuple[int, _RowAdjustments]]) -> None:
    penalised = [(row, change) for row, change in changing if len(change.seen_ids)]
    if not penalised:
        return
    place = _places(logits, [(row, change.seen_ids) for row, change in penalised])
    counts = _tensor(logits, [change.seen_counts for _, change in penalised])
    sizes = [len(change.seen_ids) for _, change in penalised]
    columns = zip(*(change.penalties for _, change in penalised), strict=True)
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
