"""Runs a command and stalls it: stops its processes for a moment, again and again, as an overloaded machine does.

    python -m tools.stall [--seconds 1] [--seed 1] -- make test

Half of the stalls stop all processes below the command, the others a single one. Processes that are stopped already,
as tests do, are left alone. A test that fails under it measures time that it does not control (CONTRIBUTING.md).
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time

import click
import psutil

_PAUSE_S = (3.0, 7.0)
"""Between two stalls: least and most."""


@click.command(help=__doc__, context_settings={"ignore_unknown_options": True})
@click.option("--seconds", default=1.0, show_default=True, help="Length of a stall.")
@click.option("--seed", default=1, show_default=True, help="Chooses the moments and the processes.")
@click.argument("command", nargs=-1, required=True)
def main(seconds: float, seed: int, command: tuple[str, ...]) -> None:
    source = random.Random(seed)
    num_stalls = 0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(source.uniform(*_PAUSE_S))
                break
            processes = _running_below(process.pid)
            if processes and source.random() < 0.5:
                processes = [source.choice(processes)]
            _stall(processes, seconds)
            num_stalls += 1
    click.echo(f"{num_stalls} stalls of {seconds:g} s; exit status {process.returncode}", err=True)
    sys.exit(process.returncode)


def _running_below(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                found.append(process)
    return found


def _stall(processes: list[psutil.Process], seconds: float) -> None:
    stopped = []
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                stopped.append(process)
        time.sleep(seconds)
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


if __name__ == "__main__":
    main()
