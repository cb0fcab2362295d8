"""Turns a scheduler's decision into tensors, runs the model, draws the tokens.

A draw: raw logits ─▶ biases and penalties (penalties.py; of rows that ask for log-probabilities a raw copy stays)
─▶ tokens (sampler.py) ─▶ log-probabilities of the raw logits (logprobs.py).
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionMetadata
from engine.config import EngineConfig
from engine.kv_cache_manager import KVCacheManager
from engine.logprobs import token_logprobs
from engine.models.llama import LlamaModel
from engine.penalties import LogitChanges
from engine.prompt_logprobs import PromptLogprobs
from engine.request import Request
from engine.sampler import NonFiniteLogits, SamplingRow, sample
from engine.scheduler_output import Sampled, ScheduledRequest, SchedulerOutput


class ModelRunner:
    """Owns the model and the KV memory of one rank."""

    def __init__(self, config: EngineConfig, model: LlamaModel, kv_cache: torch.Tensor, kv: KVCacheManager) -> None:
        self._device = torch.device(config.device)
        self._model = model
        self._kv_cache = kv_cache
        self._kv = kv
        self._changes = LogitChanges()
        self._prompt_logprobs = PromptLogprobs(model.compute_logits)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> Sampled:
        """Run one step. Returns the next tokens of the shares that sample; a request whose logits are not finite is
        missing from them."""
        shares = output.scheduled
        token_ids, positions, metadata = self._inputs(shares)
        hidden = self._model.forward(token_ids, positions, self._kv_cache, metadata)
        prompt_logprobs = self._prompt_logprobs.collect(shares, hidden)
        sampling = [index for index, share in enumerate(shares) if share.samples]
        if not sampling:
            return Sampled()
        rows = metadata.query_start_loc[1:][sampling].long() - 1
        logits = self._model.compute_logits(hidden[rows])
        requests = [shares[index].request for index in sampling]
        return replace(self._draw(logits, requests), prompt_logprobs=prompt_logprobs)

    def warm_up(self) -> float:
        """Compile and touch what the first request would otherwise wait for. Writes to blocks that nobody has yet.
        Returns the seconds per token of a step of one block."""
        block_size = self._kv.block_size
        for query_len, seq_len in ((1, block_size), (block_size, block_size), (block_size, block_size)):
            started = time.monotonic()
            positions = torch.arange(seq_len - query_len, seq_len, device=self._device)
            metadata = AttentionMetadata(
                query_start_loc=torch.tensor([0, query_len], dtype=torch.int32, device=self._device),
                seq_lens=torch.tensor([seq_len], dtype=torch.int32, device=self._device),
                block_tables=torch.zeros((1, 1), dtype=torch.int32, device=self._device),
                slot_mapping=positions,
                max_query_len=query_len,
                max_seq_len=seq_len,
            )
            hidden = self._model.forward(torch.zeros_like(positions), positions, self._kv_cache, metadata)
            sample(self._model.compute_logits(hidden[-1:]), [SamplingRow()])
        return (time.monotonic() - started) / block_size

    def _inputs(self, shares: list[ScheduledRequest]) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        block_size = self._kv.block_size
        lens = np.array([share.num_tokens for share in shares], np.int64)
        starts = np.array([share.start for share in shares], np.int64)
        query_start_loc = np.zeros(len(shares) + 1, np.int64)
        np.cumsum(lens, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        seq_lens = starts + lens
        positions = np.repeat(starts - query_start_loc[:-1], lens) + np.arange(num_tokens)
        table_rows = np.array([self._kv.rows[share.request.request_id] for share in shares])
        max_seq_len = int(seq_lens.max())
        block_tables = self._kv.block_tables[table_rows, : -(-max_seq_len // block_size)]
        owners = np.repeat(np.arange(len(shares)), lens)
        slots = block_tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
        token_ids = np.fromiter(chain.from_iterable(_known_tokens(share) for share in shares), np.int64, num_tokens)
        metadata = AttentionMetadata(
            query_start_loc=self._tensor(query_start_loc.astype(np.int32)),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            block_tables=self._tensor(block_tables),
            slot_mapping=self._tensor(slots),
            max_query_len=int(lens.max()),
            max_seq_len=max_seq_len,
        )
        return self._tensor(token_ids), self._tensor(positions), metadata

    def _draw(self, logits: torch.Tensor, requests: list[Request]) -> Sampled:
        """The next tokens, from `logits` [len(requests), vocab], which it changes."""
        asking = [(row, request) for row, request in enumerate(requests) if request.spec.params.logprobs is not None]
        raw = {row: logits[row].clone() for row, request in asking if request.spec.params.changes_logits}
        self._changes.apply(logits, requests)
        token_ids = _sample(logits, requests)
        nothing_allowed = frozenset(
            request.request_id
            for row, request in enumerate(requests)
            if request.request_id not in token_ids and _is_all_forbidden(logits[row], request)
        )
        asking = [(row, request) for row, request in asking if request.request_id in token_ids]
        if not asking:
            return Sampled(token_ids, nothing_allowed=nothing_allowed)
        logprobs = token_logprobs(
            [raw.get(row, logits[row]) for row, _ in asking],
            [token_ids[request.request_id] for _, request in asking],
            [request.spec.params.logprobs or 0 for _, request in asking],
        )
        by_id = {request.request_id: entries for (_, request), entries in zip(asking, logprobs, strict=True)}
        return Sampled(token_ids, by_id, nothing_allowed=nothing_allowed)

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _known_tokens(share: ScheduledRequest) -> list[int]:
    return share.request.token_ids[share.start : share.start + share.num_tokens]


def _sample(logits: torch.Tensor, requests: list[Request]) -> dict[str, int]:
    rows = [_sampling_row(request) for request in requests]
    try:
        tokens = sample(logits, rows)
    except NonFiniteLogits as error:
        good = [index for index in range(len(rows)) if index not in error.rows]
        if not good:
            return {}
        tokens = sample(logits[good], [rows[index] for index in good])
        requests = [requests[index] for index in good]
    return {request.request_id: token for request, token in zip(requests, tokens, strict=True)}


def _is_all_forbidden(logits: torch.Tensor, request: Request) -> bool:
    """Whether the request itself leaves nothing to draw from `logits` [vocab]; those of a broken model are NaN."""
    params = request.spec.params
    has_wishes = params.changes_logits or params.min_tokens > 0
    return has_wishes and not bool(logits.isnan().any() or logits.isposinf().any())


def _sampling_row(request: Request) -> SamplingRow:
    params = request.spec.params
    forbidden: tuple[int, ...] = ()
    if request.num_output_tokens < params.min_tokens:
        eos = () if params.ignore_eos else request.spec.eos_token_ids
        forbidden = (*eos, *params.stop_token_ids)
    return SamplingRow(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.spec.seed,
        choice=request.spec.choice,
        position=request.num_tokens,
        forbidden_ids=forbidden,
    )
