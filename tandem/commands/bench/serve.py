"""`tandem bench serve`: a load on a running stack or on any OpenAI endpoint, and what its clients see."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tandem.commands.bench.serve_options import arrival_options, endpoint_options, output_options, workload_options
from tandem.commands.secured import given_credentials, secured

_CTRL_C = "Ctrl-C"

if TYPE_CHECKING:
    from tandem.credentials import Credentials
    from tandem.serve_bench.endpoints import Endpoint
    from tandem.serve_bench.options import ServeOptions
    from tandem.serve_bench.results import Results
    from tandem.serve_bench.sweep import Sweep


@click.command("serve", short_help="Latency and throughput under load, over gRPC or at any OpenAI endpoint.")
@endpoint_options
@arrival_options
@workload_options
@output_options
@secured
def command(*, json_file: Path | None, save_requests: bool, plots_folder: Path | None, **options: Any) -> None:
    """Put a load on a running stack, or on any OpenAI endpoint, and say what its clients see.

    Requests are sent when they are due, whether or not others have been answered. TTFT, ITL, TPOT and E2E latency are
    measured here, token by token; what fails or is refused is counted by reason. If this process could not keep its own
    schedule, it says so. Ctrl-C ends it at once and prints what there is.

    \b
    Examples:
      tandem bench serve                                              the running stack, 60 requests, 2 a second
      tandem bench serve --rate 1,2,4,8 --duration 30                 four rates, 30 seconds each
      tandem bench serve --rate 4 --goodput ttft:300 --goodput tpot:50
      tandem bench serve --rate inf --num-requests 200 --max-concurrency 16
      tandem bench serve --prompt-len 256:1024 --output-len 16:128 --arrivals gamma --burstiness 0.5
      tandem bench serve --prefix-len 1024 --num-prefixes 8           shared prefixes, as of system prompts
      tandem bench serve --trace conv.csv.gz --speed 0.1 --max-prompt-len 2000
      tandem bench serve --rate 1,2,4 --json results.json --save-requests --plots plots/
      tandem bench serve --url http://127.0.0.1:8000 --tokenizer ./model   any OpenAI endpoint

    docs/bench_serve.md says how each figure is counted.
    """
    from tandem.errors import TandemError
    from tandem.serve_bench.endpoints import AskFailed
    from tandem.serve_bench.options import ServeOptions, WrongOption
    from tandem.serve_bench.sweep import NothingAnswers

    if save_requests and json_file is None:
        raise click.UsageError("--save-requests goes with --json FILE")
    if plots_folder is not None:
        _check_plots()
    try:
        results = asyncio.run(_run(ServeOptions(**options), given_credentials(options["address"])))
    except WrongOption as error:
        raise click.UsageError(str(error)) from None
    except (AskFailed, TandemError) as error:
        raise click.ClickException(error.message) from None
    except NothingAnswers as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    _write(results, json_file, save_requests, plots_folder)
    if results.stopped_by == _CTRL_C:
        raise click.exceptions.Exit(130)
    if results.stopped_by or not any(point.report.num_succeeded for point in results.points):
        raise click.exceptions.Exit(1)


def _check_plots() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plots needs matplotlib, which is not installed: pip install '.[plots]'")


async def _run(options: ServeOptions, credentials: Credentials | None) -> Results:
    """Finds out what is served, and measures it."""
    from tandem.serve_bench.options import make_endpoint

    sweep = options.sweep()  # first, for it finds mistakes that need no endpoint
    endpoint = make_endpoint(options, credentials)
    try:
        return await _measure(endpoint, options, sweep)
    finally:
        await endpoint.close()


async def _measure(endpoint: Endpoint, options: ServeOptions, sweep: Sweep) -> Results:
    from tandem.serve_bench.options import check_requests, make_workload
    from tandem.serve_bench.results import Results
    from tandem.serve_bench.screen import Screen
    from tandem.serve_bench.sweep import NothingAnswers, run_sweep
    from tandem.serve_bench.table import sweep as sweep_table

    served = await endpoint.served()
    workload = make_workload(options, served)
    results = Results(endpoint.name, served.model, {**options.as_settings(), "workload": str(workload)})
    click.echo(f"{endpoint.name}, model {served.model}; {workload}; seed {options.seed}\n")
    screen, stop = Screen(sweep.objectives), _stop_on_signals()
    try:
        results.points = await run_sweep(
            endpoint, workload, sweep, screen, check=lambda requests: check_requests(requests, served), stop=stop
        )
        results.stopped_by = _CTRL_C if stop.is_set() else ""
    except NothingAnswers as error:
        if not error.points:
            raise
        results.points, results.stopped_by = error.points, str(error)
    finally:
        screen.close()
    results.counting = endpoint.counting
    if len(results.points) > 1:
        click.echo("\n".join(sweep_table(results.points)))
    if results.points:
        click.echo(f"output tokens are counted {results.counting}")
    if results.stopped_by:
        measured = "these are the figures until then" if results.points else "nothing was measured"
        click.echo(f"PARTIAL, stopped: {results.stopped_by}; {measured}")
    return results


def _stop_on_signals() -> asyncio.Event:
    """Set by the first Ctrl-C, or its like; the next one is as rude as ever."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    return stop


def _write(results: Results, json_file: Path | None, save_requests: bool, plots_folder: Path | None) -> None:
    """Raises ClickException for what cannot be written."""
    from tandem.serve_bench.results import write_json

    try:
        if json_file is not None:
            write_json(json_file, results, with_records=save_requests)
            click.echo(f"written: {json_file}")
        if plots_folder is not None and results.points:
            from tandem.serve_bench.plot_files import write_plots

            for path in write_plots(results, plots_folder):
                click.echo(f"written: {path}")
    except OSError as error:
        raise click.ClickException(f"cannot be written: {error}") from None
