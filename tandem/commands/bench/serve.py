"""`tandem bench serve`: puts load on a running stack or any OpenAI endpoint and measures it as its clients do."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import click

from engine.errors import to_install
from tandem.bench.serve.report import (
    Objectives,
    Point,
    Results,
    format_rate,
    late_warning,
    page,
    sweep_table,
    write_json,
)
from tandem.commands.options import (
    INTERRUPTED,
    Choice,
    FloatRange,
    IntRange,
    OutputFile,
    OutputFolder,
    credential_options,
    echo_or_drop,
    end_signals,
    given_credentials,
    given_options,
    is_terminal,
    option_group,
    write_errors,
)

if TYPE_CHECKING:
    from tqdm import tqdm

    from tandem.bench.serve.endpoint import Endpoint, PlannedRequest
    from tandem.bench.serve.load import Progress, Sweep
    from tandem.bench.serve.options import ServeOptions
    from tandem.client.credentials import Credentials

_POSITIVE = FloatRange(min=0, min_open=True)
_COUNT = IntRange(min=1)


def _parse_rates(context: click.Context, option: click.Parameter, text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (math.nan,)
    if not all(rate > 0 for rate in rates):
        raise click.BadParameter(
            f"{text!r}: write requests per second, such as 2, several such as 1,2,4, or inf: all at once"
        )
    return rates


_endpoint_options = option_group(
    click.option("--address", metavar="HOST:PORT", help="A Tandem router.  [default: the local stack]"),
    click.option("--url", metavar="URL", help="An OpenAI endpoint instead, such as http://127.0.0.1:8000."),
    click.option(
        "--model", default="", metavar="NAME",
        help="Model to request, or one of its LoRA adapters.  [default: the served one]",
    ),
    click.option(
        "--connections", type=IntRange(1, 256), default=4, show_default=True,
        help="gRPC connections; each carries many requests at a time.",
    ),
    click.option(
        "--prompt-as", type=Choice(["ids", "text"]), default="ids", show_default=True,
        help="Form of the prompts for --url; text requires --tokenizer; the server's usage then gives their lengths.",
    ),
    click.option(
        "--header", "headers", multiple=True, metavar="'NAME: VALUE'",
        help="HTTP header for --url; may be given several times. OPENAI_API_KEY is sent if set.",
    ),
    click.option("--extra-body", metavar="JSON", help="Merged into each request for --url; null removes a key."),
)  # fmt: skip
_arrival_options = option_group(
    click.option(
        "--rate", "--request-rate", "rates", callback=_parse_rates, metavar="R[,R…]",
        help="Requests per second; several run one after another; inf: all at once.  [default: 2, or the trace's]",
    ),
    click.option(
        "--arrivals", type=Choice(["poisson", "gamma", "even"]), default="poisson", show_default=True,
        help="The arrival process at that rate.",
    ),
    click.option(
        "--burstiness", type=_POSITIVE, metavar="SHAPE",
        help="With --arrivals gamma: 1 is Poisson, less is burstier, more is more even.",
    ),
    click.option(
        "--num-requests", "--num-prompts", type=_COUNT, help="At each rate.  [default: 60, or all of a trace]"
    ),
    click.option(
        "--duration", "duration_s", type=_POSITIVE, metavar="SECONDS",
        help="Time of sending at each rate; requests in flight then finish.",
    ),
    click.option("--max-concurrency", type=_COUNT, help="Most requests in flight.  [default: no limit]"),
    click.option(
        "--timeout", "timeout_s", type=_POSITIVE, default=600.0, show_default=True, help="Seconds for each request."
    ),
    click.option(
        "--warm-up", type=IntRange(min=0), metavar="N",
        help="Requests before each rate that are not measured.  [default: 4, or one for each shared prefix]",
    ),
    click.option(
        "--pause", "pause_s", type=FloatRange(min=0), default=1.0, show_default=True,
        help="Idle seconds before each rate.",
    ),
    click.option("--seed", type=IntRange(min=0), help="Equal seeds send equal requests.  [default: a new one]"),
)  # fmt: skip
_workload_options = option_group(
    click.option(
        "--prompt-len", "--input-len", default="512", show_default=True, metavar="N|MIN:MAX", help="Tokens of a prompt."
    ),
    click.option(
        "--output-len", default="64", show_default=True, metavar="N|MIN:MAX",
        help="Tokens of an answer, which continues past end-of-sequence.",
    ),
    click.option(
        "--prefix-len", type=IntRange(min=0), default=0, show_default=True,
        help="Shared tokens in front of the prompt.",
    ),
    click.option("--num-prefixes", type=_COUNT, default=1, show_default=True, help="Different shared prefixes."),
    click.option(
        "--turns", type=_COUNT, default=1, show_default=True,
        help="Turns of a conversation: the prompts of one repeat everything before and add --prompt-len tokens.",
    ),
    click.option(
        "--tokenizer", type=click.Path(exists=True, path_type=Path), metavar="FOLDER",
        help="With a tokenizer.json: prompts of its ordinary tokens.  [default: the vocabulary's middle]",
    ),
    click.option("--vocab-size", type=_COUNT, help="Required without --tokenizer if the endpoint does not report it."),
    click.option(
        "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
        help="Lengths, shared prefixes and (without --rate) times of a trace: Azure CSV or Mooncake JSONL (.gz)",
    ),
    click.option(
        "--speed", type=_POSITIVE, default=1.0, show_default=True, help="Factor of a trace's rate in the replay.",
    ),
    click.option(
        "--trace-from", "trace_from_s", type=FloatRange(min=0), default=0.0, metavar="SECONDS",
        help="Start within the trace.  [default: 0]",
    ),
    click.option(
        "--trace-for", "trace_for_s", type=_POSITIVE, metavar="SECONDS",
        help="Length of the part to replay.  [default: the rest]",
    ),
    click.option("--length-scale", type=_POSITIVE, default=1.0, show_default=True, help="Factor of a trace's lengths."),
    click.option(
        "--hash-block-len", type=_COUNT, default=512, show_default=True,
        help="Tokens that each of a trace's hash ids stands for.",
    ),
    click.option("--max-prompt-len", type=_COUNT, help="Cap on a trace's prompts."),
    click.option("--max-output-len", type=_COUNT, help="Cap on a trace's answers."),
    click.option(
        "--too-long", type=Choice(["cut", "skip"]), default="cut", show_default=True,
        help="What to do with requests of a trace above a cap.",
    ),
)  # fmt: skip
_output_options = option_group(
    click.option(
        "--goodput", multiple=True, metavar="WHAT:MS",
        help="An objective: ttft, tpot or e2e, in milliseconds; may be given several times.",
    ),
    click.option(
        "--json", "json_file", type=OutputFile(),
        help="Write all figures there, with settings, versions and machine.",
    ),
    click.option("--save-requests", is_flag=True, help="With --json: also every request with the times of its tokens."),
    click.option(
        "--plots", "plots_folder", type=OutputFolder(), metavar="FOLDER",
        help="Write PNG plots there: latency and goodput over rate, ITL over time, CDFs.",
    ),
)  # fmt: skip


_STOPPED_BY = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
_OF_A_ROUTER = ("connections", "server_name", "token_file")
_OF_TLS = ("ca_file", "cert_file", "key_file")
_OF_A_TRACE = (
    "speed", "length_scale", "trace_from_s", "trace_for_s", "hash_block_len", "max_prompt_len", "max_output_len",
    "too_long",
)  # fmt: skip
_OF_RANDOM_PROMPTS = ("prompt_len", "output_len", "prefix_len", "num_prefixes", "turns")


@click.command("serve", short_help="Latency and throughput under load, over gRPC or at any OpenAI endpoint.")
@_endpoint_options
@_arrival_options
@_workload_options
@_output_options
@credential_options
def command(*, json_file: Path | None, save_requests: bool, plots_folder: Path | None, **options: Any) -> None:
    """Put load on a running stack, or on any OpenAI endpoint, and measure what its clients see.

    Requests are sent when they are due, whether or not earlier ones have been answered. TTFT, ITL, TPOT and E2E latency
    are measured here, token by token; failed and rejected requests are counted by reason. A warning reports when this
    process could not keep its own schedule. The share of prompt tokens that came from caches is as the endpoint reports
    it. Ctrl-C ends the load at once and prints the figures so far.

    \b
    Examples:
      tandem bench serve                                              the running stack, 60 requests, 2 per second
      tandem bench serve --rate 1,2,4,8 --duration 30                 four rates, 30 seconds each
      tandem bench serve --rate 4 --goodput ttft:300 --goodput tpot:50
      tandem bench serve --rate inf --num-requests 200 --max-concurrency 16
      tandem bench serve --prompt-len 256:1024 --output-len 16:128 --arrivals gamma --burstiness 0.5
      tandem bench serve --prefix-len 1024 --num-prefixes 8           shared prefixes, as of system prompts
      tandem bench serve --prefix-len 1024 --turns 4 --prompt-len 64  conversations that begin with one
      tandem bench serve --trace conv.csv.gz --speed 0.1 --max-prompt-len 2000
      tandem bench serve --rate 1,2,4 --json results.json --save-requests --plots plots/
      tandem bench serve --url http://127.0.0.1:8000 --tokenizer ./model   any OpenAI endpoint

    docs/bench_serve.md defines every figure.
    """
    from tandem.bench.serve.endpoint import RequestFailed
    from tandem.bench.serve.load import WarmUpFailed
    from tandem.bench.serve.options import InvalidOption, ServeOptions
    from tandem.bench.serve.workload import TooManyRequests
    from tandem.client.errors import TandemError

    if save_requests and json_file is None:
        raise click.UsageError("--save-requests goes with --json FILE")
    if plots_folder is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError(f"--plots needs matplotlib, which is not installed: {to_install('plots')}")
    if options["url"] is not None:
        _reject(_OF_A_ROUTER, "{} is for a Tandem router (--address), not for --url; a token goes into --header")
    if options["trace"] is None:
        _reject(_OF_A_TRACE, "{} and other options of a trace go with --trace FILE")
    else:
        _reject(
            _OF_RANDOM_PROMPTS,
            "{} is of random prompts; a trace has lengths and prefixes of its own: --length-scale, --max-prompt-len "
            "and --max-output-len change them",
        )
        if "rates" in [one.name for one in given_options(click.get_current_context())]:
            _reject(("speed",), "{} changes the times of a trace, which --rate replaces")
    try:
        results, is_printed = asyncio.run(
            _bench(ServeOptions(**options), _credentials(options["address"], options["url"]))
        )
    except (InvalidOption, TooManyRequests) as error:
        raise click.UsageError(str(error)) from None
    except (RequestFailed, TandemError) as error:
        raise click.ClickException(error.message) from None
    except WarmUpFailed as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    _write(results, json_file, save_requests, plots_folder)
    if results.stopped_by in _STOPPED_BY.values():
        raise click.exceptions.Exit(INTERRUPTED)
    if results.stopped_by or not is_printed or not any(point.report.num_succeeded for point in results.points):
        raise click.exceptions.Exit(1)


def _credentials(address: str | None, url: str | None) -> Credentials | None:
    """Those of the environment are for routers alone: an endpoint of others may have a public CA."""
    if url is None:
        return given_credentials(address)
    if not url.lower().startswith("https:"):
        _reject(_OF_TLS, "{} is for TLS: --url https://…")
    return given_credentials(None, from_environment=False)


def _reject(names: Sequence[str], problem: str) -> None:
    """Options of the environment are not meant for this call: they are ignored where they have no effect."""
    for option in given_options(click.get_current_context()):
        if option.name in names:
            raise click.UsageError(problem.format(option.opts[0]))


async def _bench(options: ServeOptions, credentials: Credentials | None) -> tuple[Results, bool]:
    from tandem.bench.serve.options import make_endpoint

    sweep = options.sweep()  # first: it finds mistakes without an endpoint
    endpoint = make_endpoint(options, credentials)
    try:
        return await _measure(endpoint, options, sweep)
    finally:
        await endpoint.close()


async def _measure(endpoint: Endpoint, options: ServeOptions, sweep: Sweep) -> tuple[Results, bool]:
    """The results, and whether all figures were printed."""
    from tandem.bench.serve.load import WarmUpFailed, run_sweep
    from tandem.bench.serve.options import check_requests, make_workload

    served = await endpoint.served_model()
    workload = make_workload(options, served)
    results = Results(endpoint.name, served.model, {**options.as_settings(), "workload": str(workload)})
    stop = _stop_on_signals(results)
    display = LoadDisplay(sweep.objectives, results, stop)
    click.echo(f"{endpoint.name}, model {served.model}; {workload}; seed {options.seed}\n")
    try:
        results.points = await run_sweep(
            endpoint, workload, sweep, display, check=lambda requests: check_requests(requests, served), stop=stop
        )
    except WarmUpFailed as error:
        if not error.points:
            raise
        results.points, results.stopped_by = error.points, str(error)
    finally:
        display.close()
    if display.problem and len(results.points) < len(sweep.rates):
        results.stopped_by = results.stopped_by or display.problem
    results.counting = endpoint.counting
    if len(results.points) > 1:
        display.show(sweep_table(results.points))
    if results.points:
        display.show([f"output tokens are counted {results.counting}", *late_warning(results.points)])
    if results.stopped_by:
        measured = "figures until then" if results.has_figures else "nothing was measured"
        echo_or_drop(f"PARTIAL, stopped: {results.stopped_by}; {measured}")
    return results, not display.problem


def _stop_on_signals(results: Results) -> asyncio.Event:
    """Set by the first Ctrl-C, or a like signal, which `results` name; a second one has its default effect, but for a
    SIGHUP after another."""
    stop, loop, numbers = asyncio.Event(), asyncio.get_running_loop(), end_signals()

    def on_signal(name: str) -> None:
        results.stopped_by = name
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)
        if name == _STOPPED_BY[signal.SIGHUP]:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    for number in numbers:
        loop.add_signal_handler(number, on_signal, _STOPPED_BY[number])
    return stop


def _write(results: Results, json_file: Path | None, save_requests: bool, plots_folder: Path | None) -> None:
    """Without figures the files of an earlier run stay. Raises ClickException for a file that cannot be written."""
    if not results.has_figures:
        return
    with write_errors():
        if json_file is not None:
            write_json(json_file, results, with_records=save_requests)
            echo_or_drop(f"written: {json_file}")
        if plots_folder is not None:
            from tandem.bench.serve.plots import write_plots

            for path in write_plots(results, plots_folder):
                echo_or_drop(f"written: {path}")


class LoadDisplay:
    """Progress on standard error (a bar on a terminal, else a line for each run); figures on standard output.

    Figures that cannot be printed end the load, which keeps what was measured; progress that cannot is dropped.
    """

    def __init__(self, objectives: Objectives, results: Results, stop: asyncio.Event) -> None:
        self._objectives = objectives
        self._results = results
        self._stop = stop
        self._bar: tqdm[Never] | None = None
        self.problem = ""
        """Why figures could not be printed; empty if all were."""

    def warm_up(self, rate: float | None, num_requests: int) -> None:
        echo_or_drop(f"{format_rate(rate)}: warming up with {num_requests} requests …", err=True)

    def begin(self, rate: float | None, requests: Sequence[PlannedRequest]) -> None:
        echo_or_drop(f"{format_rate(rate)}: {len(requests)} requests …", err=True)
        if is_terminal(sys.stderr):
            from tqdm import tqdm

            self._bar = tqdm(total=len(requests), unit="request", miniters=0, leave=False, file=sys.stderr)

    def progress(self, progress: Progress) -> None:
        if self._bar is not None:
            self._bar.set_postfix(in_flight=progress.in_flight, failed=progress.failed, refresh=False)
            self._bar.update(progress.done - self._bar.n)

    def end(self, point: Point) -> None:
        self.close()
        self.show([format_rate(point.rate), *page(point.report, self._objectives), ""])

    def show(self, figures: Sequence[str]) -> None:
        """One line for each."""
        problem = echo_or_drop("\n".join(figures))
        if problem and not (self.problem or self._results.stopped_by):
            self.problem = f"standard output cannot be written: {problem}"
            self._stop.set()
            echo_or_drop(f"Error: {self.problem}", err=True)

    def close(self) -> None:
        """Removes the bar. Idempotent."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
