"""The options of `tandem bench serve`, in four groups; `tandem.serve_bench.options` checks how they go together."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
_POSITIVE = click.FloatRange(min=0, min_open=True)
_COUNT = click.IntRange(min=1)


class _Rates(click.ParamType[tuple[float, ...]]):
    """`2`, `1,2,4`, `inf`."""

    name = "rates"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Raises click's own error for what is no rate."""
        if isinstance(value, tuple):  # the default
            return value
        try:
            rates = tuple(float(part) for part in value.split(","))
        except ValueError:
            rates = (math.nan,)
        if not all(rate > 0 for rate in rates):
            self.fail(
                f"{value!r}: write requests a second, such as 2, several such as 1,2,4, or inf: all at once", param
            )
        return rates


def _all(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Decorators as one, listed by --help in their order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


endpoint_options = _all(
    click.option("--address", metavar="HOST:PORT", help="A Tandem router.  [default: the stack that runs here]"),
    click.option("--url", metavar="URL", help="An OpenAI endpoint instead, such as http://127.0.0.1:8000."),
    click.option("--model", default="", metavar="NAME", help="Model to ask for.  [default: the one that is served]"),
    click.option(
        "--connections", type=click.IntRange(1, 256), default=4, show_default=True,
        help="gRPC connections; each carries many requests at a time.",
    ),
    click.option(
        "--prompt-as", type=click.Choice(["ids", "text"]), default="ids", show_default=True,
        help="How prompts go to --url; text goes with --tokenizer, and the server's usage says how long they are.",
    ),
    click.option(
        "--header", "headers", multiple=True, metavar="'NAME: VALUE'",
        help="HTTP header for --url; may be given several times. OPENAI_API_KEY is sent where it is set.",
    ),
    click.option("--extra-body", metavar="JSON", help="Merged into what --url is sent; null takes a key out."),
)  # fmt: skip
arrival_options = _all(
    click.option(
        "--rate", "--request-rate", "rates", type=_Rates(), default=(), metavar="R[,R…]",
        help="Requests a second; several take turns; inf: all at once.  [default: 2; of a trace, its own]",
    ),
    click.option(
        "--arrivals", type=click.Choice(["poisson", "gamma", "even"]), default="poisson", show_default=True,
        help="How requests come at that rate.",
    ),
    click.option(
        "--burstiness", type=_POSITIVE, metavar="SHAPE",
        help="With --arrivals gamma: 1 is Poisson, below comes in bursts, above more evenly.",
    ),
    click.option(
        "--num-requests", "--num-prompts", type=_COUNT, help="At each rate.  [default: 60, or all of a trace]"
    ),
    click.option(
        "--duration", "duration_s", type=_POSITIVE, metavar="SECONDS",
        help="Of sending, at each rate; what was sent is waited for.",
    ),
    click.option("--max-concurrency", type=_COUNT, help="Requests in flight at the most.  [default: any number]"),
    click.option(
        "--timeout", "timeout_s", type=_POSITIVE, default=600.0, show_default=True, help="Seconds, of each request."
    ),
    click.option(
        "--warm-up", type=click.IntRange(min=0), metavar="N",
        help="Requests before each rate that are not measured.  [default: 4, or one for each shared prefix]",
    ),
    click.option(
        "--pause", "pause_s", type=click.FloatRange(min=0), default=1.0, show_default=True,
        help="Seconds of quiet before each rate.",
    ),
    click.option("--seed", type=click.IntRange(min=0), help="Equal seeds send equal requests.  [default: a new one]"),
)  # fmt: skip
workload_options = _all(
    click.option(
        "--prompt-len", "--input-len", default="512", show_default=True, metavar="N|MIN:MAX", help="Tokens of a prompt."
    ),
    click.option(
        "--output-len", default="64", show_default=True, metavar="N|MIN:MAX",
        help="Tokens of an answer, which goes on past end-of-sequence.",
    ),
    click.option(
        "--prefix-len", type=click.IntRange(min=0), default=0, show_default=True,
        help="Tokens in front of the prompt that requests share.",
    ),
    click.option("--num-prefixes", type=_COUNT, default=1, show_default=True, help="Different shared prefixes."),
    click.option(
        "--tokenizer", type=click.Path(exists=True, path_type=Path), metavar="FOLDER",
        help="With a tokenizer.json: prompts are made of its ordinary tokens.  [default: of the vocabulary's middle]",
    ),
    click.option("--vocab-size", type=_COUNT, help="Where the endpoint does not say it and there is no --tokenizer."),
    click.option(
        "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
        help="Lengths, shared prefixes and (without --rate) times of a trace: Azure CSV or Mooncake JSONL, .gz too.",
    ),
    click.option("--speed", type=_POSITIVE, default=1.0, show_default=True, help="Of the replay of a trace."),
    click.option(
        "--trace-from", "trace_from_s", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS",
        help="Where in the trace to begin.  [default: 0]",
    ),
    click.option(
        "--trace-for", "trace_for_s", type=_POSITIVE, default=math.inf, metavar="SECONDS",
        help="How much of the trace to take.  [default: the rest]",
    ),
    click.option("--length-scale", type=_POSITIVE, default=1.0, show_default=True, help="Factor of a trace's lengths"),
    click.option("--max-prompt-len", type=_COUNT, help="Cap on a trace's prompts."),
    click.option("--max-output-len", type=_COUNT, help="Cap on a trace's answers."),
    click.option(
        "--too-long", type=click.Choice(["cut", "skip"]), default="cut", show_default=True,
        help="What becomes of a trace's requests above a cap.",
    ),
)  # fmt: skip
output_options = _all(
    click.option(
        "--goodput", multiple=True, metavar="WHAT:MS",
        help="An objective: ttft, tpot or e2e, in milliseconds; may be given several times.",
    ),
    click.option(
        "--json", "json_file", type=click.Path(dir_okay=False, writable=True, path_type=Path),
        help="Write every figure there, with settings, versions and machine.",
    ),
    click.option("--save-requests", is_flag=True, help="With --json: every request and the moments of its tokens too."),
    click.option(
        "--plots", "plots_folder", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
        help="Write PNG plots there: latency and goodput over rate, ITL over time, CDFs.",
    ),
)  # fmt: skip
