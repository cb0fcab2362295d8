"""The plots of one `tandem bench serve` as PNG files. Needs the extra `plots` (matplotlib)."""

from __future__ import annotations

from pathlib import Path

from tandem.serve_bench.plots import goodput_over_rate, itl_over_time, latency_cdfs, latency_over_rate, png
from tandem.serve_bench.results import Results
from tandem.serve_bench.table import rate_words


def write_plots(results: Results, folder: Path) -> list[Path]:
    """Writes what `results` has data for into `folder`, which is made; returns the files. Raises OSError.

    Latency and goodput over rate need several rates; the others show each rate as a run of its own.
    """
    records = {rate_words(point.rate): point.records for point in results.points}
    figures = {"latency_cdfs": latency_cdfs(records), "itl_over_time": itl_over_time(records)}
    sweeps = {results.model: results.points}
    if len(results.points) > 1:
        figures["latency_over_rate"] = latency_over_rate(sweeps)
        if any(point.report.goodput_per_s is not None for point in results.points):
            figures["goodput_over_rate"] = goodput_over_rate(sweeps)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        written.append(folder / f"{name}.png")
        written[-1].write_bytes(png(figure))
    return written
