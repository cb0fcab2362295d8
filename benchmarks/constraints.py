"""What constraints cost with a vocabulary of 152 k: masks, the first token, and the neighbours of compilations.

    python -m benchmarks.constraints [--rounds 12] [--schemas 50]

The 33 M shape with a byte-level vocabulary of 151 936 made-up tokens, one compute thread.

- mask: thread CPU time in GrammarMasks.apply, as a share of a step's thread CPU time; batch 16, each with a JSON schema
- first token: thread CPU time that a cached grammar adds before the first token: check, look-up, matcher, mask
- neighbours: gaps between the steps of 4 streams while new schemas compile, against equal windows without, in turns;
  the p99 of all gaps of each side, wall time, and the median of the ratios of two windows side by side

CPU times hardly depend on other work of the machine; wall times do, so that both sides alternate.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from benchmarks.shapes import SHAPES, write_config
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.core.messages import AddRequest, EngineRequest, TokensEvent
from engine.sampling.grammar import GrammarMasks
from engine.sampling.params import SamplingParams
from engine.scheduling.request import Request

VOCAB_SIZE = 151_936
EOS = VOCAB_SIZE - 1
BATCH, NEIGHBOURS, PROMPT = 16, 4, 32
LONG = 2000
_AS_LONG: dict[str, Any] = {"max_tokens": LONG, "temperature": 0.8, "seed": 1}


def schema(number: int) -> str:
    """A new one for each number, with fields of the usual kinds, whose outputs last."""
    fields: dict[str, Any] = {f"text_{number}_{index}": {"type": "string"} for index in range(4)}
    fields |= {f"count_{number}": {"type": "integer"}, f"kind_{number}": {"enum": ["a", "b", None]}}
    row = {"type": "object", "properties": fields, "required": list(fields)}
    return json.dumps({"type": "array", "items": row, "minItems": 99})


def write_tokenizer(folder: Path) -> None:
    """Bytes and made-up words, the beginnings of which are shared as in a real vocabulary."""
    source = random.Random(0)
    pieces = list(pre_tokenizers.ByteLevel.alphabet())
    known, letters = set(pieces), "etaoinshrdlucmfwypvbgkjqxz"
    stems = [""] + ["".join(source.choices(letters[:16], k=3)) for _ in range(3000)]
    while len(pieces) < VOCAB_SIZE - 1:
        word = source.choice(stems) + "".join(source.choices(letters, k=source.randint(1, 7)))
        piece = source.choices(("", "Ġ", "_", "1", ".", '"'), (30, 50, 6, 6, 6, 2))[0] + source.choice(
            (word, word.title())
        )
        if piece not in known:
            known.add(piece)
            pieces.append(piece)
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


class Bench:
    """One engine core, whose steps this thread computes."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(model=str(folder), load_format="dummy", num_blocks=4096, num_threads=1)
        self.core = EngineCore(config, wake=lambda: None)
        self._ids = itertools.count()
        self._source = random.Random(1)

    def add(self, **params: Any) -> str:
        request_id = str(next(self._ids))
        prompt = [self._source.randrange(256) for _ in range(PROMPT)]
        sampling = SamplingParams(**{**_AS_LONG, **params})
        self.core.handle(
            AddRequest(
                EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=sampling, eos_token_ids=(EOS,))
            )
        )
        return request_id

    def step(self) -> set[str]:
        """One step; the requests that got a token."""
        return {event.request_id for event in self.core.step() if isinstance(event, TokensEvent)}

    def until(self, request_ids: Sequence[str]) -> None:
        """Steps until each has had a token."""
        missing = set(request_ids)
        while missing:
            missing -= self.step()

    def clear(self) -> None:
        for request_id in list(self.core.scheduler.requests):
            self.core.scheduler.abort(request_id)
        self.step()


@contextmanager
def timed_masks() -> Iterator[list[float]]:
    """The thread's CPU seconds in each call of GrammarMasks.apply."""
    times, apply = list[float](), GrammarMasks.apply

    def timed(self: GrammarMasks, logits: Tensor, requests: Sequence[Request]) -> None:
        begun_s = time.thread_time()
        apply(self, logits, requests)
        times.append(time.thread_time() - begun_s)

    GrammarMasks.apply = timed  # type: ignore[method-assign]
    try:
        yield times
    finally:
        GrammarMasks.apply = apply  # type: ignore[method-assign]


def measured_mask(bench: Bench, num_steps: int) -> tuple[float, float]:
    """CPU milliseconds of a step and of its masks, medians."""
    bench.until([bench.add(json_schema=schema(index % 4)) for index in range(BATCH)])
    steps = list[float]()
    with timed_masks() as masks:
        for _ in range(num_steps):
            begun_s = time.thread_time()
            tokens = bench.step()
            steps.append(time.thread_time() - begun_s)
            assert len(tokens) == BATCH, f"{BATCH - len(tokens)} outputs have ended"
    bench.clear()
    return 1e3 * statistics.median(steps), 1e3 * statistics.median(masks)


def measured_first_token(bench: Bench, num_requests: int) -> tuple[float, float]:
    """CPU milliseconds that a cached grammar adds before the first token, median and most: the check of the schema, the
    look-up, the matcher and the mask."""
    params, times = SamplingParams(json_schema=schema(0)), list[float]()
    for _ in range(num_requests):
        begun_s = time.thread_time()
        constraint = params.constraint
        assert constraint is not None
        assert bench.core._grammars.compiled(constraint).done()
        looked_up_s = time.thread_time() - begun_s
        with timed_masks() as masks:
            bench.until([bench.add(json_schema=schema(0))])
        times.append(looked_up_s + masks[0])
        bench.clear()
    return 1e3 * statistics.median(times), 1e3 * max(times)


def gaps_of(bench: Bench, num_steps: int) -> list[float]:
    found = []
    for _ in range(num_steps):
        begun_s = time.perf_counter()
        bench.step()
        found.append(time.perf_counter() - begun_s)
    return found


def measured_neighbours(bench: Bench, num_rounds: int, num_schemas: int) -> tuple[float, float, float, float]:
    """The p99 without and with compilations in ms, the median of the ratios of windows, and the seconds that
    `num_schemas` took, the median."""
    fresh = itertools.count(1000)
    bench.until([bench.add() for _ in range(NEIGHBOURS)])
    quiet, busy, ratios, took_s = list[float](), list[float](), list[float](), list[float]()
    for _ in range(num_rounds):
        begun_s = time.perf_counter()
        waiting = [bench.add(json_schema=schema(next(fresh)), max_tokens=1) for _ in range(num_schemas)]
        window: list[float] = []
        while any(request_id in bench.core.scheduler.compiling for request_id in waiting):
            window += gaps_of(bench, 1)
        took_s.append(time.perf_counter() - begun_s)
        while any(request_id in bench.core.scheduler.requests for request_id in waiting):
            bench.step()  # the prompts of the last ones
        other = gaps_of(bench, len(window))
        busy, quiet = busy + window, quiet + other
        ratios.append(_p99(window) / _p99(other))
        if len(bench.core.scheduler.requests) < NEIGHBOURS or any(
            len(one.token_ids) > LONG // 2 for one in bench.core.scheduler.requests.values()
        ):
            bench.clear()
            bench.until([bench.add() for _ in range(NEIGHBOURS)])
    bench.clear()
    return 1e3 * _p99(quiet), 1e3 * _p99(busy), statistics.median(ratios), statistics.median(took_s)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


@click.command(help=__doc__)
@click.option("--rounds", default=12, show_default=True, help="Alternations of the neighbours' windows.")
@click.option("--schemas", default=50, show_default=True, help="New schemas in a window.")
@click.option("--steps", default=100, show_default=True, help="Steps in which masks are measured.")
def main(rounds: int, schemas: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        SHAPES["33m"]["vocab_size"] = VOCAB_SIZE
        folder = write_config(Path(name), "33m")
        write_tokenizer(folder)
        bench = Bench(folder)
        step_ms, mask_ms = measured_mask(bench, steps)
        click.echo(f"mask, batch {BATCH}: {mask_ms:.2f} of {step_ms:.1f} ms CPU a step: {mask_ms / step_ms:.1%}")
        median_ms, most_ms = measured_first_token(bench, 40)
        click.echo(f"first token, cached grammar: {median_ms:.2f} ms CPU more (median; most {most_ms:.2f})")
        quiet_ms, busy_ms, ratio, took_s = measured_neighbours(bench, rounds, schemas)
        click.echo(
            f"neighbours, {schemas} new schemas in {took_s:.1f} s: p99 {quiet_ms:.1f} ms without, {busy_ms:.1f} with"
        )
        click.echo(f"median of the ratios of {rounds} windows: {ratio:.2f}")
        bench.core.shutdown()


if __name__ == "__main__":
    main()
