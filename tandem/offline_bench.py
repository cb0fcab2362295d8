"""The engine by itself, without services: how long one batch takes, and how much of many requests it gets through.

Both run on `engine.LLM`, in this process, greedily and past the end-of-sequence token, with random prompts that are new
every time, so that nothing is found in a prefix cache. Before anything is measured the same work is done once or more,
because kernels are compiled and KV memory is touched at their first use.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from engine import LLM, SamplingParams
from engine.messages import AbortRequests, AddRequest, EngineRequest, TokensEvent
from tandem.serve_bench.report import Distribution

_FIRST_TOKEN_ID = 3
"""The ids below are special in most vocabularies."""

Say = Callable[[int], object]
"""Called with how many more iterations, or requests, are done."""


class CannotMeasure(Exception):
    """The model or the memory does not allow what was asked; the message says what would."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`size` requests that are queued at once."""

    size: int
    input_len: int
    output_len: int


@dataclass(slots=True)
class Iteration:
    """One batch, seconds."""

    prefill_s: float = 0.0
    """Until the last request has its first token."""
    token_s: list[float] = field(default_factory=list)
    """Of each step after that, as long as all requests run: one token of each of them."""
    total_s: float = 0.0
    """Until the last token of all."""


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """What a batch takes, in milliseconds: over the iterations, and for tokens over all steps of all of them."""

    batch: Batch
    num_iterations: int
    prefill: Distribution
    token: Distribution
    total: Distribution

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of the median iteration."""
        return self.batch.size * self.batch.input_len / (self.prefill.p50 / 1e3)

    @property
    def output_tokens_per_s(self) -> float:
        """Of the median step; 0 without one."""
        return self.batch.size / (self.token.p50 / 1e3) if self.token.count else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        rates = ("prefill_tokens_per_s", "output_tokens_per_s")
        return {**asdict(self), **{name: getattr(self, name) for name in rates}}


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """What came of many requests that were all there from the beginning."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    duration_s: float

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.duration_s

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.num_prompt_tokens / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s

    def as_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        rates = ("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s")
        return {**asdict(self), **{name: getattr(self, name) for name in rates}}


def measure_latency(
    llm: LLM, batch: Batch, *, num_iterations: int, num_warm_up: int, seed: int = 0, say: Say = lambda more: None
) -> LatencyResult:
    """`num_warm_up` batches that do not count, then `num_iterations` that do; raises CannotMeasure."""
    _check_room(llm, [(batch.input_len, batch.output_len)])
    if batch.size > llm.core.config.max_num_seqs:
        raise CannotMeasure(
            f"a batch of {batch.size} does not run at once: the engine has {llm.core.config.max_num_seqs} places; "
            f"--max-num-seqs {batch.size}"
        )
    prompts = _prompts(llm, seed)
    done = []
    for index in range(num_warm_up + num_iterations):
        iteration = _run_batch(llm, batch, [prompts(batch.input_len) for _ in range(batch.size)])
        if index >= num_warm_up:
            done.append(iteration)
        say(1)
    return LatencyResult(
        batch,
        num_iterations,
        prefill=Distribution.of(one.prefill_s for one in done),
        token=Distribution.of(token_s for one in done for token_s in one.token_s),
        total=Distribution.of(one.total_s for one in done),
    )


def measure_throughput(
    llm: LLM, lengths: list[tuple[int, int]], *, num_warm_up: int = 2, seed: int = 0, show_progress: bool = False
) -> ThroughputResult:
    """A request for each of `lengths` (prompt, output), all given to `LLM.generate` at once; raises CannotMeasure.

    The first `num_warm_up` of them are run before, with other prompts. The duration is that of the whole call.
    """
    _check_room(llm, lengths)
    prompts = _prompts(llm, seed)

    def generate(some: list[tuple[int, int]], *, use_tqdm: bool) -> int:
        asked = [prompts(input_len) for input_len, _ in some]
        params = [_greedy(output_len) for _, output_len in some]
        answers = llm.generate(asked, params, use_tqdm=use_tqdm)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    if num_warm_up:
        generate(lengths[:num_warm_up], use_tqdm=False)
    started_s = time.perf_counter()
    num_output_tokens = generate(lengths, use_tqdm=show_progress)
    duration_s = time.perf_counter() - started_s
    return ThroughputResult(len(lengths), sum(input_len for input_len, _ in lengths), num_output_tokens, duration_s)


def spread_lengths(num: int, input_len: int, output_len: int, spread: float, seed: int = 0) -> list[tuple[int, int]]:
    """`num` pairs, each length uniform within ± `spread` (0 to 1) of its mean and at least 1."""
    rng = random.Random(seed)

    def around(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))

    return [(around(input_len), around(output_len)) for _ in range(num)]


def _run_batch(llm: LLM, batch: Batch, prompts: Iterable[list[int]]) -> Iteration:
    """Step the core until every request has ended. Whatever ends it early, nothing stays in the core."""
    ids = [f"latency-{index}" for index in range(batch.size)]
    for request_id, prompt in zip(ids, prompts, strict=True):
        request = EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=_greedy(batch.output_len))
        llm.core.handle(AddRequest(request))
    missing, running = set(ids), set(ids)
    iteration = Iteration()
    started_s = time.perf_counter()
    full_s: list[float] = []
    try:
        while running:
            events = [event for event in llm.core.step() if isinstance(event, TokensEvent)]
            now_s = time.perf_counter() - started_s
            _refuse_errors(events)
            missing -= {event.request_id for event in events}
            if not missing:
                iteration.prefill_s = iteration.prefill_s or now_s
                full_s += [now_s] * (len(running) == batch.size)
            running -= {event.request_id for event in events if event.finish_reason is not None}
            iteration.total_s = now_s
    finally:
        llm.core.handle(AbortRequests(ids))
        llm.core.step()
    iteration.token_s = [later - earlier for earlier, later in pairwise(full_s)]
    return iteration


def _refuse_errors(events: Iterable[TokensEvent]) -> None:
    for event in events:
        if event.finish_reason == "error":
            raise CannotMeasure(f"a request failed: {event.error}; fewer or shorter requests, or more --kv-memory")


def _check_room(llm: LLM, lengths: Iterable[tuple[int, int]]) -> None:
    """Raises CannotMeasure if a request is longer than the model or the KV memory allows."""
    limit = llm.core.info.max_model_len
    longest = max(lengths, key=sum)
    if sum(longest) > limit:
        raise CannotMeasure(
            f"{longest[0]} tokens in and {longest[1]} out are {sum(longest)}, and {limit} are allowed here; "
            "a smaller --input-len or --output-len, a larger --max-model-len, or more --kv-memory"
        )


def _prompts(llm: LLM, seed: int) -> Callable[[int], list[int]]:
    """A new prompt of so many tokens at every call."""
    rng = random.Random(seed)
    first_token_id = min(_FIRST_TOKEN_ID, llm.core.info.vocab_size - 1)
    return lambda length: rng.choices(range(first_token_id, llm.core.info.vocab_size), k=length)


def _greedy(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
