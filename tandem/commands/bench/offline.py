"""`tandem bench latency` and `tandem bench throughput`: the engine alone, without services."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.config import MAX_THREADS
from tandem.commands.options import (
    MAX_GIB,
    Choice,
    FloatRange,
    IntRange,
    OutputFile,
    is_terminal,
    option_group,
    write_errors,
)

if TYPE_CHECKING:
    from engine import LLM
    from tandem.bench.offline import LatencyResult, ThroughputResult

_COUNT = IntRange(min=1)
_GIB = 1 << 30


_engine_options = option_group(
    click.option(
        "--model", default="demo", show_default=True, metavar="NAME",
        help="demo, a checkpoint's folder, or owner/name on the Hugging Face hub.",
    ),
    click.option(
        "--load-format", type=Choice(["auto", "dummy"]), default="auto", show_default=True,
        help="dummy: random weights of the shape in config.json, the only file that the folder must then have.",
    ),
    click.option(
        "--dtype", type=Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True,
        help="Of weights and KV; auto: the checkpoint's own.",
    ),
    click.option(
        "--device", type=Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Device of the engine."
    ),
    click.option("--threads", type=IntRange(1, MAX_THREADS), help="Threads; absent: one for each core."),
    click.option("--max-model-len", type=IntRange(min=2), help="Longest prompt + output, tokens."),
    click.option("--max-num-seqs", type=_COUNT, default=64, show_default=True, help="Most requests in one step."),
    click.option(
        "--max-num-batched-tokens", type=_COUNT, default=512, show_default=True,
        help="Most tokens in one step: the chunk of chunked prefill.",
    ),
    click.option(
        "--kv-memory", type=FloatRange(min=0, min_open=True, max=MAX_GIB), metavar="GIB",
        help="KV memory; absent: a part of the free memory.",
    ),
    click.option("--seed", type=IntRange(min=0), default=0, show_default=True, help="Seed of the prompts."),
    click.option(
        "--json", "json_file", type=OutputFile(), help="Also write all figures there, with options and machine."
    ),
)  # fmt: skip


def _make_engine(model: str, *, threads: int | None, kv_memory: float | None, **options: Any) -> LLM:
    """An engine without prefix cache and tokenizer; the other `options` have LLM's names. Raises ClickException."""
    import torch

    from engine import LLM
    from engine.errors import EngineError

    if options.get("device") == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("--device cuda: torch finds no GPU on this machine; omit it to use the CPU")
    try:
        return LLM(
            model,
            num_threads=threads,
            kv_cache_bytes=None if kv_memory is None else round(kv_memory * _GIB),
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            **options,
        )
    except (EngineError, OSError) as error:
        raise click.ClickException(str(error)) from None


@click.command("latency", short_help="One batch on the engine alone: prefill and time per token.")
@click.option("--batch-size", type=IntRange(1, 4096), default=8, show_default=True, help="Requests of the batch.")
@click.option("--input-len", type=_COUNT, default=128, show_default=True, help="Tokens of each prompt.")
@click.option("--output-len", type=_COUNT, default=64, show_default=True, help="Tokens of each answer.")
@click.option(
    "--num-iters", "--iterations", "iterations", type=IntRange(1, 10_000), default=10, show_default=True,
    help="Measured batches.",
)  # fmt: skip
@click.option(
    "--num-iters-warmup", "--warm-up", "warm_up", type=IntRange(0, 1000), default=2, show_default=True,
    help="Batches before, not measured.",
)  # fmt: skip
@_engine_options
def latency(
    *,
    batch_size: int,
    input_len: int,
    output_len: int,
    iterations: int,
    warm_up: int,
    seed: int,
    json_file: Path | None,
    **engine: Any,
) -> None:
    """Measure one batch on the engine alone: no router, no network, no other requests.

    All requests are queued at once. prefill is the time until the last of them has its first token; token is a later
    step, which gives every request one token. These are lower bounds for `tandem bench serve`: its TTFT is at least the
    prefill of one request here, its ITL at least a step, unless its instances speculate.

    \b
    Examples:
      tandem bench latency                                    the demo model, 8 requests
      tandem bench latency --batch-size 1 --input-len 2048 --output-len 1 --max-num-batched-tokens 2048
      tandem bench latency --model ./Qwen3-0.6B --load-format dummy --dtype bfloat16 --threads 1
      tandem bench latency --batch-size 32 --num-iters 30 --json latency.json
    """
    from tqdm import tqdm

    from tandem.bench.offline import Batch, CannotMeasure, measure_latency

    llm = _make_engine(**engine)
    batch = Batch(batch_size, input_len, output_len)
    with tqdm(total=warm_up + iterations, desc="Measuring", unit="batch", leave=False, disable=None) as progress:
        try:
            result = measure_latency(
                llm, batch, num_iterations=iterations, num_warm_up=warm_up, seed=seed, on_progress=progress.update
            )
        except CannotMeasure as error:
            raise click.ClickException(str(error)) from None
    click.echo("\n".join(_latency_table(result)))
    if json_file is not None:
        _write_json(json_file, engine, {"warm_up": warm_up, "seed": seed}, result)


def _latency_table(result: LatencyResult) -> list[str]:
    batch = result.batch
    lines = [
        f"{batch.size} x {batch.input_len} tokens in, {batch.output_len} out; {result.num_iterations} iterations",
        f"{'ms':9}{'mean':>10}{'p50':>10}{'p99':>10}{'max':>10}{'of':>7}",
    ]
    for name in ("prefill", "token", "total"):
        one = getattr(result, name)
        if one.count:
            lines.append(f"{name:9}{one.mean:10.2f}{one.p50:10.2f}{one.p99:10.2f}{one.max:10.2f}{one.count:7}")
    lines.append(
        f"at the median: {result.prefill_tokens_per_s:.0f} prompt tokens/s in prefill"
        + (f", {result.output_tokens_per_s:.0f} output tokens/s in decode" if result.token.count else "")
    )
    if not result.token.count:
        lines.append("no step had all requests past their first token: raise --output-len for the time per token")
    return lines


@click.command("throughput", short_help="Many requests on the engine alone: requests/s and tokens/s.")
@click.option(
    "--num-prompts", "--requests", "requests", type=IntRange(1, 1_000_000), default=64, show_default=True,
    help="Number of requests.",
)  # fmt: skip
@click.option("--input-len", type=_COUNT, default=128, show_default=True, help="Tokens of a prompt.")
@click.option("--output-len", type=_COUNT, default=64, show_default=True, help="Tokens of an answer.")
@click.option(
    "--spread", type=FloatRange(0, 1), default=0.0, show_default=True,
    help="Lengths are uniform within ± this share of their mean; 0.5: from half to one and a half.",
)  # fmt: skip
@click.option("--warm-up", type=IntRange(0, 1000), default=2, show_default=True, help="Requests before, not measured.")
@_engine_options
def throughput(
    *,
    requests: int,
    input_len: int,
    output_len: int,
    spread: float,
    warm_up: int,
    seed: int,
    json_file: Path | None,
    **engine: Any,
) -> None:
    """Measure the throughput of the engine alone (`engine.LLM`) with all requests queued from the start.

    It is the upper bound for one aggregated instance at any latency. Every prompt is new and the prefix cache is off.

    \b
    Examples:
      tandem bench throughput                                 the demo model, 64 requests
      tandem bench throughput --num-prompts 500 --input-len 512 --output-len 128 --spread 0.5
      tandem bench throughput --output-len 1                  prefill alone
      tandem bench throughput --model ./Qwen3-0.6B --load-format dummy --dtype bfloat16 --json throughput.json
    """
    from tandem.bench.offline import CannotMeasure, measure_throughput, spread_lengths

    llm = _make_engine(**engine)
    lengths = spread_lengths(requests, input_len, output_len, spread, seed)
    shows = is_terminal(sys.stderr)
    try:
        result = measure_throughput(llm, lengths, num_warm_up=warm_up, seed=seed, show_progress=shows)
    except CannotMeasure as error:
        raise click.ClickException(str(error)) from None
    click.echo(
        f"{result.num_requests} requests, {result.num_prompt_tokens} prompt and {result.num_output_tokens} output "
        f"tokens in {result.duration_s:.2f} s\n"
        f"{'requests/s':20}{result.requests_per_s:12.2f}\n"
        f"{'prompt tokens/s':20}{result.prompt_tokens_per_s:12.1f}\n"
        f"{'output tokens/s':20}{result.output_tokens_per_s:12.1f}"
    )
    if json_file is not None:
        workload = {
            "input_len": input_len,
            "output_len": output_len,
            "spread": spread,
            "warm_up": warm_up,
            "seed": seed,
        }
        _write_json(json_file, engine, workload, result)


def _write_json(
    path: Path, options: Mapping[str, Any], workload: Mapping[str, Any], result: LatencyResult | ThroughputResult
) -> None:
    """Writes the figures with options, workload, versions and machine."""
    from tandem.bench.serve.report import machine, versions

    context = {"options": options, "workload": workload, "versions": versions(), "machine": machine()}
    with write_errors():
        path.write_text(json.dumps({**context, **asdict(result)}, indent=2) + "\n")
    click.echo(f"written: {path}")
