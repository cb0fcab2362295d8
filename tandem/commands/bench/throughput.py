"""`tandem bench throughput`: how much of many requests the engine gets through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tandem.commands.bench.offline import EngineOptions, engine_options, write_json


@click.command("throughput", short_help="Many requests on the engine alone: requests/s and tokens/s.")
@click.option("--requests", type=click.IntRange(1, 1_000_000), default=64, show_default=True, help="In all.")
@click.option("--input-len", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of a prompt.")
@click.option("--output-len", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens of an answer.")
@click.option(
    "--spread",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Lengths are uniform within so much above and below; 0.5: from half to one and a half.",
)
@click.option(
    "--warm-up", type=click.IntRange(0, 1000), default=2, show_default=True, help="Requests before, not counted."
)
@engine_options
def command(
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
    """How much the engine alone gets through when all requests are there from the beginning, by `engine.LLM`.

    That is the ceiling over what one aggregated instance can serve, whatever the latency. Every prompt is new and the
    prefix cache is off.

    \b
    Examples:
      tandem bench throughput                                 the demo model, 64 requests
      tandem bench throughput --requests 500 --input-len 512 --output-len 128 --spread 0.5
      tandem bench throughput --output-len 1                  prefill alone
      tandem bench throughput --model ./Qwen3-0.6B --load-format dummy --dtype bfloat16 --json throughput.json
    """
    from tandem.offline_bench import CannotMeasure, measure_throughput, spread_lengths

    options = EngineOptions(**engine)
    llm = options.make()
    lengths = spread_lengths(requests, input_len, output_len, spread, seed)
    try:
        result = measure_throughput(llm, lengths, num_warm_up=warm_up, seed=seed, show_progress=True)
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
        write_json(json_file, options, workload, result.as_dict())
