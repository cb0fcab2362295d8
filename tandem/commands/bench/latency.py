"""`tandem bench latency`: how long the engine takes for one batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tandem.commands.bench.offline import EngineOptions, engine_options, write_json

if TYPE_CHECKING:
    from tandem.offline_bench import LatencyResult


@click.command("latency", short_help="One batch on the engine alone: prefill and time per token.")
@click.option("--batch-size", type=click.IntRange(1, 4096), default=8, show_default=True, help="Requests of the batch.")
@click.option("--input-len", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of each prompt.")
@click.option("--output-len", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens of each answer.")
@click.option("--iterations", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Measured batches.")
@click.option(
    "--warm-up", type=click.IntRange(0, 1000), default=2, show_default=True, help="Batches before, which do not count."
)
@engine_options
def command(
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
    """How long one batch takes on the engine alone: no router, no network, no other requests.

    All requests are queued at once; prefill is the time until the last of them has its first token, token is a step
    after that, which gives every request one. It is the floor under what `tandem bench serve` can show: its TTFT is
    no shorter than the prefill of one request here, its ITL no shorter than a step.

    \b
    Examples:
      tandem bench latency                                    the demo model, 8 requests
      tandem bench latency --batch-size 1 --input-len 2048 --output-len 1 --max-num-batched-tokens 2048
      tandem bench latency --model ./Qwen3-0.6B --load-format dummy --dtype bfloat16 --threads 1
      tandem bench latency --batch-size 32 --iterations 30 --json latency.json
    """
    from tqdm import tqdm

    from tandem.offline_bench import Batch, CannotMeasure, measure_latency

    options = EngineOptions(**engine)
    llm = options.make()
    batch = Batch(batch_size, input_len, output_len)
    with tqdm(total=warm_up + iterations, desc="Measuring", unit="batch", leave=False, disable=None) as progress:
        try:
            result = measure_latency(
                llm, batch, num_iterations=iterations, num_warm_up=warm_up, seed=seed, say=progress.update
            )
        except CannotMeasure as error:
            raise click.ClickException(str(error)) from None
    click.echo("\n".join(table(result)))
    if json_file is not None:
        write_json(json_file, options, {"warm_up": warm_up, "seed": seed}, result.as_dict())


def table(result: LatencyResult) -> list[str]:
    """For people."""
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
        lines.append("no step had all requests past their first token: a longer --output-len shows the time per token")
    return lines
