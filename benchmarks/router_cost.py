"""The cost of the router: CPU for each token, and the delay of a token.

    python -m benchmarks.router_cost [--rate 4000] [--streams 64] [--pattern steps] [--rounds 5] [--window 4]

A stub decode instance emits a token for each stream, either for all at once, as after an engine's step, or for each at
its own times (`spread`, which costs more: no messages are handled together). Clients read the streams through the
router (`python -m router`) and, in alternating windows of the same run, through a bare grpc.aio relay that checks
nothing, or from the stub itself. Each is a separate process. CPU is what the kernel reports for the relay's process,
user and system, all threads, at full and at half `--rate`; the delay is measured at half of it. A stream that still
writes as the stub's next step comes misses that step. A message has one token, but where the client or the router is
behind.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
from tqdm import tqdm

from benchmarks.relay_windows import Load, Sample, Way, Windows, running

_MAX_CPU_US = 50.0
_MAX_RATIO = 1.7
_MAX_ADDED_P50_MS = 0.5
_MAX_ADDED_P99_MS = 3.0
_FULL: tuple[Way, ...] = ("bare", "router")
_HALF: tuple[Way, ...] = ("direct", "router", "bare")

Round = dict[Way, Sample]
"""One window of each way, one after the other."""


@click.command(help=__doc__)
@click.option("--rate", default=4000.0, show_default=True, help="Tokens a second in all, at full load.")
@click.option("--streams", default=64, show_default=True, help="Streams that are read at once.")
@click.option("--pattern", type=click.Choice(["steps", "spread", "both"]), default="both", show_default=True)
@click.option("--clients", default=1, show_default=True, help="Client processes.")
@click.option("--connections", default=1, show_default=True, help="Connections of each client process.")
@click.option("--workers", default=1, show_default=True, help="Processes of the router.")
@click.option("--rounds", default=5, show_default=True, help="Windows of each kind.")
@click.option("--window", "window_s", default=4.0, show_default=True, help="Seconds of one window.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Writes every window there.")
def main(
    rate: float,
    streams: int,
    pattern: str,
    rounds: int,
    window_s: float,
    json_file: Path | None,
    **processes: int,
) -> None:
    every: list[Sample] = []
    with running(**processes) as windows:
        for in_steps in [name == "steps" for name in ("steps", "spread") if pattern in (name, "both")]:
            full, half = (Load(part * rate, streams, in_steps) for part in (1.0, 0.5))
            name = "steps" if in_steps else "spread"
            at_full = measured(windows, _FULL, full, rounds, window_s, f"{name}, full load")
            at_half = measured(windows, _HALF, half, rounds, window_s, f"{name}, half load")
            click.echo(f"\n{name}, {streams} streams, medians of {rounds} windows of {window_s:g} s")
            show(at_full)
            show(at_half)
            judge(at_full, at_half)
            every += [sample for one in (*at_full, *at_half) for sample in one.values()]
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(sample) for sample in every], indent=1))


def measured(
    windows: Windows, ways: tuple[Way, ...], load: Load, rounds: int, window_s: float, title: str
) -> list[Round]:
    """`rounds` times one window of each way, in turn."""
    return [
        {way: windows.measure(way, load, window_s) for way in ways}
        for _ in tqdm(range(rounds), desc=title, leave=False, disable=None)
    ]


def show(rounds: list[Round]) -> None:
    """One line for each way."""
    for way in rounds[0]:
        click.echo(
            f"  {way:7} {median(rounds, lambda one, way=way: one[way].tokens_per_s):6.0f} tokens/s"
            f"  {median(rounds, lambda one, way=way: one[way].tokens_per_message):5.2f} a message"
            f"  CPU {median(rounds, lambda one, way=way: one[way].cpu_us):6.1f} µs"
            f"  age p50 {median(rounds, lambda one, way=way: one[way].p50_ms):6.3f}"
            f"  p99 {median(rounds, lambda one, way=way: one[way].p99_ms):7.3f} ms"
        )


def judge(at_full: list[Round], at_half: list[Round]) -> None:
    """The figures that the router is held to; ratios and differences are taken within a round."""
    found = [
        ("CPU of a token, µs", median(at_full, lambda one: one["router"].cpu_us), _MAX_CPU_US),
        ("… in bare relays", median(at_full, lambda one: one["router"].cpu_us / one["bare"].cpu_us), _MAX_RATIO),
        ("added p50, ms", median(at_half, lambda one: one["router"].p50_ms - one["direct"].p50_ms), _MAX_ADDED_P50_MS),
        ("added p99, ms", median(at_half, lambda one: one["router"].p99_ms - one["direct"].p99_ms), _MAX_ADDED_P99_MS),
    ]
    for name, value, limit in found:
        click.echo(f"  {name:28} {value:7.2f}  (aim {limit:g}{'' if value <= limit else ', MISSED'})")


def median(rounds: list[Round], value: Callable[[Round], float]) -> float:
    """Of all rounds."""
    return statistics.median(map(value, rounds))


if __name__ == "__main__":
    main()
