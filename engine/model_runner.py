"""Turns a SchedulerOutput into tensors, runs the model and samples the tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain, compress

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionMetadata
from engine.config import EngineConfig
from engine.models.decoder import Decoder
from engine.sampling.logprobs import PromptLogprobs
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow, sample
from engine.sampling.token_sampler import TokenSampler
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.scheduler_output import Sampled, ScheduledRequest, SchedulerOutput


class ModelRunner:
    """Owns the model and the KV memory of one rank."""

    def __init__(self, config: EngineConfig, model: Decoder, kv_cache: torch.Tensor, kv: KVCacheManager) -> None:
        self._device = torch.device(config.device)
        self._model = model
        self._kv_cache = kv_cache
        self._kv = kv
        self._sampler = TokenSampler()
        self._prompt_logprobs = PromptLogprobs(model.compute_logits)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> Sampled:
        """Run one step. Returns the next token of each share that samples, unless its logits are not finite."""
        shares = output.scheduled
        token_ids, positions, metadata = self._inputs(shares)
        hidden = self._model.forward(token_ids, positions, self._kv_cache, metadata)
        prompt_logprobs = self._prompt_logprobs.collect(shares, hidden)
        sampling = [index for index, share in enumerate(shares) if share.samples]
        if not sampling:
            return Sampled()
        rows = metadata.query_start_loc[1:][sampling].long() - 1
        requests = [shares[index].request for index in sampling]
        sampled = self._sampler.sample(self._model.compute_logits(hidden[rows]), requests)
        failed = [index for index, request in enumerate(requests) if request.request_id not in sampled.token_ids]
        nothing_allowed: frozenset[str] = frozenset()
        if failed:  # computed again: the request's parameters have changed the logits in place
            is_finite = self._model.compute_logits(hidden[rows[failed]]).amax(dim=-1).isfinite().tolist()
            nothing_allowed = frozenset(requests[index].request_id for index in compress(failed, is_finite))
        return replace(sampled, prompt_logprobs=prompt_logprobs, nothing_allowed=nothing_allowed)

    def warm_up(self) -> float:
        """Compile kernels and touch memory before the first request. Writes to block 0, while no request has blocks.
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
            sample(self._model.compute_logits(hidden[-1:]), [SamplingRow(SamplingParams())])
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

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _known_tokens(share: ScheduledRequest) -> list[int]:
    return share.request.token_ids[share.start : share.start + share.num_tokens]
