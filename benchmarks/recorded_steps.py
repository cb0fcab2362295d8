"""Decode steps as they are and recorded (decision 0019), in turns in one engine.

    python -m benchmarks.recorded_steps [--shape 33m] [--threads 2] [--dtype bfloat16] [--quantization int8]

The time of a step is that of an answer's tokens behind the first, divided by their number. Medians of the repeats;
above 1 the recorded step is faster. Needs nothing else running.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path

import click
import torch

from benchmarks.engine_vs_transformers import Work, make_llm, timed, with_engine
from benchmarks.shapes import SHAPES, write_config
from engine import LLM
from engine.executor.decode_graphs import GraphedDecoder
from engine.executor.executor import OneProcessExecutor

_BATCHES = (1, 2, 8, 32)
_INPUT_LEN = 32


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="33m", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--quantization", type=click.Choice(["none", "int8", "int4"]), default="none", show_default=True)
@click.option("--threads", default=2, show_default=True, help="Of the engine.")
@click.option("--tokens", type=click.IntRange(min=20), default=64, show_default=True, help="Of an answer.")
@click.option("--repeat", default=5, show_default=True, help="Turns, after one to warm up.")
def main(shape: str, dtype: str, quantization: str, threads: int, tokens: int, repeat: int) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        llm = make_llm(write_config(Path(folder), shape), "native", dtype, threads, quantization)
    executor = llm.core._executor
    assert isinstance(executor, OneProcessExecutor)
    recorded = executor._model
    if not isinstance(recorded, GraphedDecoder):
        raise click.ClickException(
            f"steps of {dtype} are not recorded on this processor, where torch computes the layers: take bfloat16, or "
            "--quantization int8"
        )
    for batch in _BATCHES:
        times: dict[str, list[float]] = {"as it is": [], "recorded": []}
        for turn in range(repeat + 1):
            for name, model in (("as it is", recorded._model), ("recorded", recorded)):
                executor._model = model
                step_ms = _step_ms(llm, batch, tokens)
                if turn:
                    times[name].append(step_ms)
        before, after = times.values()
        ratio = statistics.median(old / new for old, new in zip(before, after, strict=True))
        click.echo(
            f"{shape} {dtype} {quantization}, {threads} threads, batch {batch}: "
            f"{statistics.median(before):.2f} → {statistics.median(after):.2f} ms, {ratio:.2f}"
        )


def _step_ms(llm: LLM, batch: int, num_tokens: int) -> float:
    prompts = torch.randint(3, llm.core.info.vocab_size, (batch, _INPUT_LEN))
    first_s, all_s = (
        timed(partial(with_engine, llm, prompts, Work(batch, _INPUT_LEN, output_len))) for output_len in (1, num_tokens)
    )
    return 1000 * (all_s - first_s) / (num_tokens - 1)


if __name__ == "__main__":
    main()
