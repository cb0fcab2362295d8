"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.transfer_bench.measure import Figures, Result

_WIDTH = 30
LEGEND = """\
GB/s    all blocks at once, 10^9 bytes a second, median of the rounds; min-max in brackets
of raw  the raw reading's median time over the connector's, measured in the same rounds
p50 p99 one block alone, from "it is ready" to "its request may run"
save    until a reader could read"""


def table(result: Result) -> list[str]:
    """A headline, then one line for each way of reading."""
    shape = result.shape
    lines = [
        f"{result.medium}, {shape.num_blocks} blocks of {shape.block_bytes / 1e6:.2f} MB, "
        f"{len(result.figures[0].all_s)} rounds" + (f", over {result.where}" if result.where else ""),
        f"  {'':{_WIDTH}}{'GB/s':>6} {'(min-max)':>13} {'of raw':>7} {'goal':>6}"
        f" {'p50 ms':>8} {'p99 ms':>8} {'save':>6}",
    ]
    lines += [_line(result, figures) for figures in result.figures]
    return lines


def _line(result: Result, figures: Figures) -> str:
    label = f"digests {figures.way}" if figures.way in ("off", "on") else figures.way
    num_bytes = result.shape.num_bytes
    span = f"({num_bytes / max(figures.all_s) / 1e9:.2f}-{num_bytes / min(figures.all_s) / 1e9:.2f})"
    share, goal, save = result.share(figures), result.goals.get(figures.way), result.save_gb_s(figures)
    return (
        f"  {label:{_WIDTH}}{result.gb_s(figures):6.2f} {span:>13} {_percent(share):>7} {_percent(goal):>6}"
        f" {figures.one_ms(0.5):8.2f} {figures.one_ms(0.99):8.2f} {'' if save is None else f'{save:.2f}':>6}"
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def write_json(path: Path, results: Sequence[Result]) -> None:
    """Everything that was measured, each round too, and on what machine."""
    content = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "load": os.getloadavg()},
        "results": [_as_dict(result) for result in results],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _as_dict(result: Result) -> dict[str, Any]:
    return {
        "connector": result.medium,
        "over": result.where,
        "num_blocks": result.shape.num_blocks,
        "block_bytes": result.shape.block_bytes,
        "ways": [
            {
                "way": figures.way,
                "gb_s": result.gb_s(figures),
                "share_of_raw": result.share(figures),
                "goal": result.goals.get(figures.way),
                "one_block_p50_ms": figures.one_ms(0.5),
                "one_block_p99_ms": figures.one_ms(0.99),
                "save_gb_s": result.save_gb_s(figures),
                "all_blocks_s": figures.all_s,
                "one_block_s": figures.one_s,
                "save_s": figures.save_s,
            }
            for figures in result.figures
        ],
    }
