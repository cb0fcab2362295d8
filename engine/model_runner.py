"""Turns a SchedulerOutput into the inputs of a step, has the executor compute it, and samples the tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.executor.executor import Executor, are_finite
from engine.executor.step import StepInputs
from engine.sampling.grammar_masks import warm_up_masks
from engine.sampling.logprobs import PromptLogprobs
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow, TokenSampler, sample
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.request import Request
from engine.scheduling.scheduler_output import Sampled, ScheduledRequest, SchedulerOutput


class ModelRunner:
    """Plans steps for the executor and samples from their logits."""

    def __init__(
        self, executor: Executor, kv: KVCacheManager, kv_cache: torch.Tensor, adapters: Iterable[str] = ()
    ) -> None:
        """`kv_cache`: what the executor has allocated; `adapters`: names of those that requests may give."""
        self._executor = executor
        self._adapters = {name: index for index, name in enumerate([*sorted(adapters), ""])}
        self._kv = kv
        self._kv_cache = kv_cache
        self._sampler = TokenSampler()
        self.grammars = self._sampler.grammars
        self._prompt_logprobs = PromptLogprobs(executor.compute_logits)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> Sampled:
        """Run one step. Returns the next tokens of each share that samples, unless its logits are not finite, and
        which prompts have filled blocks with what is not finite."""
        shares = output.scheduled
        queries = [query for share in shares for query in _queries(share)]
        sampling = [index for index, query in enumerate(queries) if query.samples]
        is_whole = any(share.request.needs_prompt_logprobs for share in shares)
        inputs = self._inputs(queries, None if is_whole else np.array(sampling, np.int64))
        hidden = self._executor.forward(inputs)
        filled = self._filled_blocks(shares)
        block_ids = list(chain.from_iterable(filled.values()))
        all_finite = are_finite(self._kv_cache, block_ids) if block_ids else None
        prompt_logprobs = self._prompt_logprobs.collect(shares, hidden)
        if not sampling:  # nothing else waits for the device, and the step's blocks may be read from now on
            _synchronize(hidden.device)
            return Sampled(not_finite=self._not_finite(filled, all_finite))
        rows = inputs.query_start_loc[1:].astype(np.int64) - 1
        drafts = {share.request.request_id: share.draft for share in shares if share.draft}
        sampled = self._sampler.sample(
            self._executor.compute_logits(hidden, rows[sampling]),
            [share.request for share in shares if share.samples],
            drafts,
        )
        known = [index for index in sampling if not queries[index].is_draft]
        failed = [index for index in known if queries[index].request.request_id not in sampled.token_ids]
        nothing_allowed: frozenset[str] = frozenset()
        if failed:  # computed again: the request's parameters have changed the logits in place
            is_finite = self._executor.compute_logits(hidden, rows[failed]).amax(dim=-1).isfinite().tolist()
            nothing_allowed = frozenset(queries[index].request.request_id for index in compress(failed, is_finite))
        return replace(
            sampled,
            prompt_logprobs=prompt_logprobs,
            nothing_allowed=nothing_allowed,
            not_finite=self._not_finite(filled, all_finite),
        )

    def _filled_blocks(self, shares: Sequence[ScheduledRequest]) -> dict[str, Sequence[int]]:
        """The blocks that prompts fill in this step, by request id: others may find them. A stream's token needs no
        check: it attends to all that is in its block, and its logits are checked."""
        filled = {}
        for share in shares:
            if share.num_tokens == 1 and share.samples:
                continue
            first, end = (place // self._kv.block_size for place in (share.start, share.start + share.num_tokens))
            if first < end:
                request_id = share.request.request_id
                filled[request_id] = self._kv.block_tables[self._kv.rows[request_id], first:end].tolist()
        return filled

    def _not_finite(self, filled: dict[str, Sequence[int]], all_finite: torch.Tensor | None) -> frozenset[str]:
        """The requests that have filled blocks with what is not finite."""
        if all_finite is None or all_finite:
            return frozenset()
        return frozenset(one for one, block_ids in filled.items() if not are_finite(self._kv_cache, block_ids))

    def warm_up(self) -> float:
        """Compile kernels, record decode steps and touch memory before the first request. Writes to block 0, while no
        request has blocks. Returns the seconds per token of a step of one block."""
        block_size = self._kv.block_size
        for num_requests in self._executor.warm_up_sizes:
            self._warm_up(num_requests, 1)
        for query_len in (1, block_size, block_size):
            started = time.monotonic()
            logits = self._warm_up(1, query_len)
        token_s = (time.monotonic() - started) / block_size
        warm_up_masks(logits)
        return token_s

    def _warm_up(self, num_requests: int, query_len: int) -> torch.Tensor:
        """A step of requests that all have block 0. Returns its logits."""
        block_size = self._kv.block_size
        inputs = StepInputs.of(
            token_ids=np.zeros(num_requests * query_len, np.int64),
            starts=np.full(num_requests, block_size - query_len),
            lens=np.full(num_requests, query_len),
            block_tables=np.zeros((num_requests, 1), np.int32),
            block_size=block_size,
        )
        hidden, rows = self._executor.forward(inputs), query_len * np.arange(1, num_requests + 1) - 1
        logits = self._executor.compute_logits(hidden, rows)
        sample(logits, [SamplingRow(SamplingParams())] * num_requests)
        return logits

    def _inputs(self, queries: list[_Query], needed: npt.NDArray[np.int64] | None) -> StepInputs:
        block_size = self._kv.block_size
        lens = np.array([len(query.token_ids) for query in queries], np.int64)
        starts = np.array([query.start for query in queries], np.int64)
        table_rows = np.array([self._kv.rows[query.request.request_id] for query in queries])
        num_blocks = -(-int((starts + lens).max()) // block_size)
        token_ids = np.fromiter(chain.from_iterable(query.token_ids for query in queries), np.int64, int(lens.sum()))
        block_tables, adapters = self._kv.block_tables[table_rows, :num_blocks], self._adapters_of(queries)
        return StepInputs.of(token_ids, starts, lens, block_tables, block_size, needed, adapters)

    def _adapters_of(self, queries: list[_Query]) -> npt.NDArray[np.int64] | None:
        if not any(query.request.spec.lora for query in queries):
            return None
        return np.array([self._adapters[query.request.spec.lora] for query in queries], np.int64)


class _Query(NamedTuple):
    """Adjacent tokens of a request that the executor sees as one request's."""

    request: Request
    start: int
    token_ids: list[int]
    samples: bool
    is_draft: bool


def _queries(share: ScheduledRequest) -> Iterator[_Query]:
    """The share's tokens, then each of its draft's by itself: a step of streams stays one of single tokens, for which
    there are kernels and recordings. They follow each other, since adjacent KV is written together."""
    end = share.start + share.num_tokens
    yield _Query(share.request, share.start, share.request.token_ids[share.start : end], share.samples, False)
    for place, token_id in enumerate(share.draft):
        yield _Query(share.request, end + place, [token_id], True, True)


def _synchronize(device: torch.device) -> None:
    """Return when the device has computed what it was given. On CPU a call returns when it has computed."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
