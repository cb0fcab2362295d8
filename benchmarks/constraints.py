"""What constraints cost with a vocabulary of 152 k: masks, the first token, and the neighbours of compilations.

    python -m benchmarks.constraints [--rounds 9] [--schemas 50] [--threads 1] [--prompt-len 32] [--itl-ms 20]

The 33 M shape with a byte-level vocabulary of 151 936 made-up tokens.

- first constraint: gaps between the steps of 4 streams while the process imports xgrammar and reads the vocabulary
- mask: thread CPU time in GrammarMasks.apply, as a share of a step's thread CPU time; batch 16, each with a JSON schema
- first token: thread CPU time that a cached grammar adds before the first token: check, look-up, matcher, mask
- neighbours: gaps between the steps of 4 streams while new schemas compile and their requests get a token, against the
  same requests at the same steps with a schema that is compiled, and against the streams alone; wall time. A round has
  a window of each, equally long; what counts is the median over the rounds of their p99 and of their ratios.
  `--itl-ms`: every request has this objective, as by `--slo-itl-ms` of a router

CPU times hardly depend on other work of the machine; wall times do, so that the sides alternate.
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
from typing import Any, NamedTuple

import click
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from benchmarks.shapes import SHAPES, write_config
from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.core.messages import AddRequest, EngineRequest, TokensEvent
from engine.machine import set_num_threads
from engine.sampling.grammar_masks import GrammarMasks
from engine.sampling.params import SamplingParams
from engine.scheduling.scheduler_output import LogitsRow

VOCAB_SIZE = 151_936
EOS = VOCAB_SIZE - 1
BATCH, NEIGHBOURS = 16, 4
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

    def __init__(self, folder: Path, num_threads: int, prompt_len: int, itl_ms: float | None) -> None:
        config = EngineConfig(model=str(folder), load_format="dummy", num_blocks=4096)
        set_num_threads(num_threads)
        self.core = EngineCore(config, wake=lambda: None)
        self._prompt_len = prompt_len
        self._itl_s = None if itl_ms is None else itl_ms / 1e3
        self._ids = itertools.count()
        self._source = random.Random(1)

    def add(self, **params: Any) -> str:
        request_id = str(next(self._ids))
        prompt = [self._source.randrange(256) for _ in range(self._prompt_len)]
        spec = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(**{**_AS_LONG, **params}),
            eos_token_ids=(EOS,),
            itl_s=self._itl_s,
        )
        self.core.handle(AddRequest(spec))
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

    def timed(self: GrammarMasks, logits: Tensor, rows: Sequence[LogitsRow]) -> set[int]:
        begun_s = time.thread_time()
        unknown = apply(self, logits, rows)
        times.append(time.thread_time() - begun_s)
        return unknown

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


def arrivals_while_compiling(bench: Bench, schemas: Sequence[str]) -> tuple[list[float], list[int]]:
    """Requests for new schemas: the gaps between steps until all are compiled, and how many requests entered each."""
    num_others = len(bench.core.scheduler.requests)
    for text in schemas:
        bench.add(json_schema=text, max_tokens=1)
    gaps, arrivals = list[float](), list[int]()
    compiling = bench.core.scheduler.compiling
    while compiling:
        num_before = len(compiling)
        gaps.append(_timed_step(bench))
        arrivals.append(num_before - len(compiling))
    while len(bench.core.scheduler.requests) > num_others:
        bench.step()
    return gaps, arrivals


def gaps_of_arrivals(bench: Bench, arrivals: Sequence[int]) -> list[float]:
    """The gaps when the same requests arrive with a schema that is compiled already."""
    num_others = len(bench.core.scheduler.requests)
    gaps = []
    for num_requests in arrivals:
        for _ in range(num_requests):
            bench.add(json_schema=schema(0), max_tokens=1)
        gaps.append(_timed_step(bench))
    while len(bench.core.scheduler.requests) > num_others:
        bench.step()
    return gaps


def _timed_step(bench: Bench) -> float:
    begun_s = time.perf_counter()
    bench.step()
    return time.perf_counter() - begun_s


class Round(NamedTuple):
    """Milliseconds between steps: of the streams alone, with requests whose schema is compiled, with new schemas; and
    the seconds that these took."""

    alone: list[float]
    compiled: list[float]
    new: list[float]
    took_s: float


def measured_first_constraint(bench: Bench) -> tuple[list[float], list[int]]:
    """The gaps while the process imports xgrammar and reads the vocabulary."""
    bench.until([bench.add() for _ in range(NEIGHBOURS)])
    found = arrivals_while_compiling(bench, [schema(0)])
    bench.clear()
    return found


def measured_neighbours(bench: Bench, num_rounds: int, num_schemas: int) -> Iterator[Round]:
    fresh = itertools.count(1000)
    for _ in range(num_rounds):
        bench.clear()
        bench.until([bench.add() for _ in range(NEIGHBOURS)])
        begun_s = time.perf_counter()
        new, arrivals = arrivals_while_compiling(bench, [schema(next(fresh)) for _ in range(num_schemas)])
        took_s = time.perf_counter() - begun_s
        compiled = gaps_of_arrivals(bench, arrivals)
        alone = [_timed_step(bench) for _ in new]
        alone_ms, compiled_ms, new_ms = ([1e3 * gap for gap in gaps] for gaps in (alone, compiled, new))
        yield Round(alone_ms, compiled_ms, new_ms, took_s)
    bench.clear()


def report(rounds: Sequence[Round]) -> Iterator[str]:
    """Each percentile: the median of the rounds, and the least and the most."""
    by_kind = [(one.alone, one.compiled, one.new) for one in rounds]
    for name, value in (("p50", statistics.median), ("p99", _p99)):
        alone, compiled, new = ([value(one[kind]) for one in by_kind] for kind in range(3))
        yield (
            f"{name} {_spread(alone)} ms alone, {_spread(compiled)} with requests whose schema is compiled, "
            f"{_spread(new)} with new schemas"
        )
        for text, others in (("alone", alone), ("compiled", compiled)):
            ratios = [one / other for one, other in zip(new, others, strict=True)]
            yield f"{name}, new schemas / {text}: {_spread(ratios, 2)}"


def _spread(values: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _stolen_ticks() -> int:
    """Hundredths of a second in which the hypervisor let this machine wait (Linux)."""
    return int(Path("/proc/stat").read_text().split()[8])


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


@click.command(help=__doc__)
@click.option("--rounds", default=9, show_default=True, help="Repetitions of the neighbours' windows.")
@click.option("--schemas", default=50, show_default=True, help="New schemas in a window.")
@click.option("--steps", default=100, show_default=True, help="Steps in which masks are measured.")
@click.option("--threads", default=1, show_default=True, help="Threads that compute a step.")
@click.option("--prompt-len", default=32, show_default=True, help="1: nothing to prefill, as where KV is handed over.")
@click.option("--itl-ms", type=float, help="Inter-token objective of every request. By default there is none.")
def main(rounds: int, schemas: int, steps: int, threads: int, prompt_len: int, itl_ms: float | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        SHAPES["33m"]["vocab_size"] = VOCAB_SIZE
        folder = write_config(Path(name), "33m")
        write_tokenizer(folder)
        bench = Bench(folder, threads, prompt_len, itl_ms)
        gaps, _ = measured_first_constraint(bench)
        click.echo(f"first constraint: {sum(gaps):.1f} s, longest gap of neighbours {1e3 * max(gaps):.0f} ms")
        if steps:
            step_ms, mask_ms = measured_mask(bench, steps)
            click.echo(f"mask, batch {BATCH}: {mask_ms:.2f} of {step_ms:.1f} ms CPU a step: {mask_ms / step_ms:.1%}")
            median_ms, most_ms = measured_first_token(bench, 40)
            click.echo(f"first token, cached grammar: {median_ms:.2f} ms CPU more (median; most {most_ms:.2f})")
        stolen = _stolen_ticks()
        found = list(measured_neighbours(bench, rounds, schemas))
        took_s, num_gaps = statistics.median(one.took_s for one in found), sum(len(one.new) for one in found)
        click.echo(
            f"neighbours, {rounds} rounds of {schemas} new schemas in {took_s:.1f} s, {num_gaps} gaps of a kind:"
        )
        for line in report(found):
            click.echo(f"  {line}")
        click.echo(f"  {_stolen_ticks() - stolen} ticks of CPU time were stolen from this machine")
        bench.core.shutdown()


if __name__ == "__main__":
    main()
