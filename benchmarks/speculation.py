"""What speculation by prompt lookup gains, and what it costs where predictions are wrong.

    python -m benchmarks.speculation                  (0.6 B, bfloat16; 5 minutes)
    python -m benchmarks.speculation --way json       (streams with a JSON schema and a vocabulary of 152 k)
    python -m benchmarks.speculation --way penalties

A model with random weights has no text whose repetitions could be found. So the predictions are those of a run without
speculation, each token replaced by a wrong one with probability 1 - hit rate; they are weighed, computed, sampled and
kept or dropped as all drafts are. Each row alternates runs with and without; every output is compared.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.constraints import EOS, VOCAB_SIZE, schema, write_tokenizer
from benchmarks.shapes import SHAPES, write_config
from engine import LLM, SamplingParams
from engine.scheduling.drafts import Drafter
from engine.scheduling.request import Request

INPUT_LEN, OUTPUT_LEN = 32, 96
NUM_REQUESTS = (1, 4, 16)
WAYS: dict[str, dict[str, Any]] = {
    "free": {"ignore_eos": True},
    "json": {"json_schema": schema(0), "stop_token_ids": [EOS]},
    "penalties": {"ignore_eos": True, "repetition_penalty": 1.05, "presence_penalty": 0.5},
}


class KnownStream:
    """Predicts what the stream is known to become, with errors: a `Predictor`."""

    def __init__(self, token_ids: list[int], hit_rate: float, seed: int) -> None:
        rng = random.Random(seed)
        self._known = [token_id if rng.random() < hit_rate else token_id ^ 1 for token_id in token_ids]

    def predict(self, token_ids: list[int], most: int) -> list[int]:
        first = len(token_ids) - INPUT_LEN
        return self._known[first : first + max(most, 0)]


Outputs = dict[tuple[int, ...], list[int]]
"""By prompt."""


def drafter_for(llm: LLM, outputs: Outputs, hit_rate: float) -> Drafter:
    """Drafts from the outputs of an earlier run."""

    def predictor(request: Request) -> KnownStream:
        return KnownStream(outputs[tuple(request.spec.prompt_token_ids)], hit_rate, request.arrival)

    config, info = llm.core.config, llm.core.info
    return Drafter(
        config.num_speculative_tokens,
        max_num_rows=config.max_num_seqs,
        max_model_len=info.max_model_len,
        predictor=predictor,
        num_admitted=llm.core._runner.grammars.num_admitted,
    )


def prompts_of(num_requests: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(num_requests)
    return [[rng.randrange(3, vocab_size) for _ in range(INPUT_LEN)] for _ in range(num_requests)]


def generate(llm: LLM, prompts: list[list[int]], way: str) -> tuple[float, Outputs]:
    """Seconds, and the output of each prompt."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=OUTPUT_LEN, **WAYS[way])
    started = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return seconds, {tuple(answer.prompt_token_ids): answer.outputs[0].token_ids for answer in answers}


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__.partition("\n")[0])
@click.option("--shape", type=click.Choice(list(SHAPES)), default="0.6b", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--way", type=click.Choice(list(WAYS)), default="free", show_default=True, help="What requests ask for.")
@click.option("--num-tokens", default=5, show_default=True, help="Tokens of a draft at most.")
@click.option("--repeat", default=5, show_default=True, help="Runs of each side; the median counts.")
def main(shape: str, dtype: str, way: str, num_tokens: int, repeat: int) -> None:
    click.echo(f"{shape} {dtype}, {way}, {INPUT_LEN} -> {OUTPUT_LEN} tokens, drafts of up to {num_tokens}")
    click.echo(f"{'requests':>8} {'hit rate':>8} {'tok/s':>7} {'without':>7} {'ratio':>6} {'computed':>9} {'right':>6}")
    with tempfile.TemporaryDirectory() as folder:
        if way == "json":
            SHAPES[shape]["vocab_size"] = VOCAB_SIZE
            write_tokenizer(Path(folder))
        llm = LLM(
            write_config(Path(folder), shape),
            dtype=dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_bytes=1 << 30,
            enable_prefix_caching=False,
            num_speculative_tokens=num_tokens,
        )
        for num_requests in NUM_REQUESTS:
            prompts = prompts_of(num_requests, llm.core.info.vocab_size)
            llm.core.scheduler.drafter = Drafter()
            generate(llm, prompts, way)
            _, outputs = generate(llm, prompts, way)
            for hit_rate in (0.0, 0.5, 0.8, 0.95):
                click.echo(row(llm, prompts, way, outputs, hit_rate, repeat))


def row(llm: LLM, prompts: list[list[int]], way: str, outputs: Outputs, hit_rate: float, repeat: int) -> str:
    scheduler, times = llm.core.scheduler, {True: list[float](), False: list[float]()}
    drafters = {True: drafter_for(llm, outputs, hit_rate), False: Drafter()}
    scheduler.drafter = drafters[True]
    generate(llm, prompts, way)  # what steps take is known
    before = scheduler.counters.num_draft_tokens, scheduler.counters.num_accepted_tokens
    for _ in range(repeat):
        for speculates, of_side in times.items():
            scheduler.drafter = drafters[speculates]
            seconds, found = generate(llm, prompts, way)
            assert found == outputs
            of_side.append(seconds)
    num_tokens = len(prompts) * OUTPUT_LEN
    ours, without = (num_tokens / statistics.median(of_side) for of_side in times.values())
    num_drafted = scheduler.counters.num_draft_tokens - before[0]
    num_right = scheduler.counters.num_accepted_tokens - before[1]
    speeds = f"{ours:7.1f} {without:7.1f} {ours / without:6.2f}"
    drafted = f"{num_drafted / (repeat * num_tokens):9.2f} {num_right / max(1, num_drafted):6.2f}"
    return f"{len(prompts):8} {hit_rate:8.2f} {speeds} {drafted}"


if __name__ == "__main__":
    main()
