"""The router at three times its pools' capacity, and one tenant's long streams in all slots while another one asks for
its share; the exit status says whether all limits hold.

    python -m benchmarks.overload [--seconds 60]

Needs a quiet machine with two cores: router, stub instances and clients share them.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import click

from tests.fakes.model_folder import write_model_folder
from tests.router.admission.overload import (
    QUEUE_LIMIT_S,
    LongStreams,
    Overload,
    percentile,
    run,
    run_long_streams,
)

_LONG_S = 35.0


def promises(overload: Overload, long: LongStreams) -> dict[str, bool]:
    """Each limit, and whether it holds."""
    refused = overload.over.refused
    return {
        "refusals within 50 ms, p99": percentile(overload.refusals_s, 0.99) <= 0.05,
        "every refusal has a retry hint": all((one.pushback_ms or 0) > 0 and one.retry_info_s for one in refused),
        "goodput at least 90 % of the peak": overload.goodput >= 0.9,
        "no request waits beyond the limit": max(*overload.waits_s, *overload.refusals_s) <= QUEUE_LIMIT_S + 0.1,
        "the well-behaved tenant has 90 % of its share": overload.fair_part >= 0.9,
        "beside long streams a tenant has 90 % of its share within 2 s": long.fair_part >= 0.9,
        "beside long streams refusals within 50 ms, p99": percentile(long.refusals_s, 0.99) <= 0.05,
        "a pause ends no stream": long.num_cut == 0,
        "the router grows by at most 50 MiB": overload.rss[1] - overload.rss[0] <= 50 << 20,
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seconds", type=click.FloatRange(min=5), default=60.0, show_default=True, help="Of overload.")
@click.option("--peak-seconds", type=click.FloatRange(min=5), default=20.0, show_default=True, help="At capacity.")
def main(seconds: float, peak_seconds: float) -> None:
    """Offer a router its capacity, then three times as much."""
    with tempfile.TemporaryDirectory() as folder:
        model_folder = write_model_folder(Path(folder) / "model")
        overload = asyncio.run(run(model_folder, Path(folder), peak_s=peak_seconds, overload_s=seconds))
        long = asyncio.run(run_long_streams(model_folder, Path(folder), seconds=_LONG_S))
    for name, value in {**overload.summary(), **long.summary()}.items():
        click.echo(f"{name:24} {value}")
    kept = promises(overload, long)
    for name, is_kept in kept.items():
        click.echo(f"{'ok    ' if is_kept else 'MISSED'} {name}")
    sys.exit(0 if all(kept.values()) else 1)


if __name__ == "__main__":
    main()
