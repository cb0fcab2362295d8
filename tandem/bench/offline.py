"""The engine alone, without services: the latency of one batch, and the throughput of many requests.

Both run on `engine.LLM`, in this process, greedily and past the end-of-sequence token, with random prompts that are new
every time, so that the prefix cache never hits. The same work is done before the measurement, because kernels are
compiled and KV memory is touched at their first use.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine import LLM, SamplingParams
from engine.core.messages import AbortRequests, AddRequest, EngineRequest, TokensEvent
from tandem.bench.serve.report import Distribution

_FIRST_TOKEN_ID = 3
"""Lower ids are special in most vocabularies."""

Progress = Callable[[int], object]
"""Called with the number of further iterations that are done."""


class CannotMeasure(Exception):
    """The model or the memory does not allow the measurement; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`size` requests, queued at once."""

    size: int
    input_len: int
    output_len: int


@dataclass(slots=True)
class Iteration:
    """The times of one batch, seconds."""

    prefill_s: float = 0.0
    """Until the first token of the last request."""
    token_s: list[float] = field(default_factory=list)
    """Of each later step that gave every request a token; where the memory does not hold all, others do not."""
    total_s: float = 0.0
    """Until the last token."""


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """Times in milliseconds: over the iterations, and for tokens over all their steps."""

    batch: Batch
    num_iterations: int
    prefill: Distribution
    token: Distribution
    total: Distribution
    prefill_tokens_per_s: float
    """Of the median iteration."""
    output_tokens_per_s: float
    """Of the median step; 0 without one."""


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """Totals of requests that were all queued from the start."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    duration_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float


def measure_latency(
    llm: LLM,
    batch: Batch,
    *,
    num_iterations: int,
    num_warm_up: int,
    seed: int = 0,
    on_progress: Progress = lambda more: None,
) -> LatencyResult:
    """`num_warm_up` batches that are not measured, then `num_iterations` that are; raises CannotMeasure."""
    _check_lengths(llm, [(batch.input_len, batch.output_len)])
    if batch.size > llm.core.config.max_num_seqs:
        raise CannotMeasure(
            f"a batch of {batch.size} does not run at once: the engine runs {llm.core.config.max_num_seqs} requests; "
            f"give --max-num-seqs {batch.size}"
        )
    needed = batch.size * (batch.input_len + batch.output_len)
    fits = llm.core.info.num_blocks * llm.core.config.block_size
    if needed > fits and not llm.core.scheduler.kv.has_window:
        raise CannotMeasure(
            f"a batch of {batch.size} does not run at once: its KV is that of {needed} tokens, and there is room for "
            f"{fits}; give more --kv-memory, or a smaller batch"
        )
    prompts = _prompts(llm, seed)
    done = []
    for index in range(num_warm_up + num_iterations):
        with llm.torch_settings():
            iteration = _run_batch(llm, batch, [prompts(batch.input_len) for _ in range(batch.size)])
        if index >= num_warm_up:
            done.append(iteration)
        on_progress(1)
    prefill = Distribution.of(one.prefill_s for one in done)
    token = Distribution.of(token_s for one in done for token_s in one.token_s)
    return LatencyResult(
        batch,
        num_iterations,
        prefill,
        token,
        total=Distribution.of(one.total_s for one in done),
        prefill_tokens_per_s=batch.size * batch.input_len / (prefill.p50 / 1e3),
        output_tokens_per_s=batch.size / (token.p50 / 1e3) if token.count else 0.0,
    )


def measure_throughput(
    llm: LLM, lengths: list[tuple[int, int]], *, num_warm_up: int = 2, seed: int = 0, show_progress: bool = False
) -> ThroughputResult:
    """A request for each of `lengths` (prompt, output), all given to `LLM.generate` at once; raises CannotMeasure.

    The first `num_warm_up` of them are run before, with other prompts. The duration is that of the whole call.
    """
    _check_lengths(llm, lengths)
    prompts = _prompts(llm, seed)

    def generate(some: list[tuple[int, int]], *, use_tqdm: bool) -> int:
        requests = [prompts(input_len) for input_len, _ in some]
        params = [_greedy(output_len) for _, output_len in some]
        outputs = [answer.outputs[0] for answer in llm.generate(requests, params, use_tqdm=use_tqdm)]
        for output in outputs:
            if output.error is not None:
                raise CannotMeasure(f"a request failed: {output.error}")
        return sum(len(output.token_ids) for output in outputs)

    if num_warm_up:
        generate(lengths[:num_warm_up], use_tqdm=False)
    started_s = time.perf_counter()
    num_output_tokens = generate(lengths, use_tqdm=show_progress)
    duration_s = time.perf_counter() - started_s
    num_prompt_tokens = sum(input_len for input_len, _ in lengths)
    return ThroughputResult(
        len(lengths),
        num_prompt_tokens,
        num_output_tokens,
        duration_s,
        requests_per_s=len(lengths) / duration_s,
        prompt_tokens_per_s=num_prompt_tokens / duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
    )


def spread_lengths(num: int, input_len: int, output_len: int, spread: float, seed: int = 0) -> list[tuple[int, int]]:
    """`num` pairs, each length uniform within ± `spread` (0 to 1) of its mean and at least 1."""
    rng = random.Random(seed)

    def around(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))

    return [(around(input_len), around(output_len)) for _ in range(num)]


def _run_batch(llm: LLM, batch: Batch, prompts: Iterable[list[int]]) -> Iteration:
    """Steps the core until every request has ended. After an exception no request stays in the core."""
    ids = [f"latency-{index}" for index in range(batch.size)]
    for request_id, prompt in zip(ids, prompts, strict=True):
        request = EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=_greedy(batch.output_len))
        llm.core.handle(AddRequest(request))
    missing, running = set(ids), set(ids)
    iteration = Iteration()
    started_s = time.perf_counter()
    try:
        while running:
            events = [event for event in llm.core.step() if isinstance(event, TokensEvent)]
            now_s = time.perf_counter() - started_s
            for event in events:
                if event.finish_reason == "error":
                    raise CannotMeasure(
                        f"a request failed: {event.error}; give fewer or shorter requests, or more --kv-memory"
                    )
            served = {event.request_id for event in events}
            if not missing and len(served) == batch.size:
                iteration.token_s.append(now_s - iteration.total_s)
            missing -= served
            if not missing:
                iteration.prefill_s = iteration.prefill_s or now_s
            running -= {event.request_id for event in events if event.finish_reason is not None}
            iteration.total_s = now_s
    finally:
        llm.core.handle(AbortRequests(ids))
        llm.core.step()
    return iteration


def _check_lengths(llm: LLM, lengths: Iterable[tuple[int, int]]) -> None:
    """Raises CannotMeasure if a request is longer than the model or the KV memory allows."""
    limit = llm.core.info.max_model_len
    longest = max(lengths, key=sum)
    if sum(longest) > limit:
        raise CannotMeasure(
            f"{longest[0]} tokens in and {longest[1]} out are {sum(longest)}, and {limit} are allowed; "
            "lower --input-len or --output-len, or raise --max-model-len or --kv-memory"
        )


def _prompts(llm: LLM, seed: int) -> Callable[[int], list[int]]:
    """A function that makes a new prompt of a given length at every call."""
    rng = random.Random(seed)
    first_token_id = min(_FIRST_TOKEN_ID, llm.core.info.vocab_size - 1)
    return lambda length: rng.choices(range(first_token_id, llm.core.info.vocab_size), k=length)


def _greedy(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
