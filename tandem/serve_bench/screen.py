"""How far a load is, on standard error: a progress bar on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Never

import click
from tqdm import tqdm

from tandem.serve_bench.load import Progress
from tandem.serve_bench.records import PlannedRequest
from tandem.serve_bench.report import Objectives
from tandem.serve_bench.results import Point
from tandem.serve_bench.table import page, rate_words


class Screen:
    """The `View` of the command line: the figures of each run go to standard output as soon as it has ended."""

    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives
        self._bar: tqdm[Never] | None = None

    def warm_up(self, rate: float | None, num_requests: int) -> None:
        click.echo(f"{rate_words(rate)}: warming up with {num_requests} requests …", err=True)

    def begin(self, rate: float | None, requests: Sequence[PlannedRequest]) -> None:
        click.echo(f"{rate_words(rate)}: {len(requests)} requests …", err=True)
        if sys.stderr.isatty():
            self._bar = tqdm(total=len(requests), unit="request", miniters=0, leave=False, file=sys.stderr)

    def progress(self, progress: Progress) -> None:
        if self._bar is not None:
            self._bar.set_postfix(in_flight=progress.in_flight, failed=progress.failed, refresh=False)
            self._bar.update(progress.done - self._bar.n)

    def end(self, point: Point) -> None:
        self.close()
        click.echo(f"{rate_words(point.rate)}")
        click.echo("\n".join(page(point.report, self._objectives)) + "\n")

    def close(self) -> None:
        """Takes the bar away. Idempotent."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
