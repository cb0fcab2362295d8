"""The same endpoint measured by `vllm bench serve` and by `tandem bench serve`, in turns, side by side.

    python -m benchmarks.peers.vllm_bench_serve --url http://127.0.0.1:8000 --tokenizer ./model

Both send random prompts of equal lengths as text, Poisson arrivals, answers past end-of-sequence, so that what differs
is the client. Each round runs both, and they take turns in going first; a figure is the median over the rounds.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

_PERCENTILES = (50, 90, 95, 99)
_METRICS = {"ttft": "ttft", "itl": "itl", "tpot": "tpot", "e2e": "e2el"}
"""Our name and vLLM's."""
_RATES = {
    "requests_per_s": "request_throughput",
    "output_tokens_per_s": "output_throughput",
    "num_succeeded": "completed",
    "num_output_tokens": "total_output_tokens",
}
_MISSING = (
    "`{vllm}` was not found. Install it (pip install vllm; CPU machines need vLLM's CPU build), or give its path: "
    "--vllm PATH"
)


@dataclass(frozen=True, slots=True)
class Run:
    """The load of both programs."""

    url: str
    model: str
    tokenizer: Path
    rate: float
    num_requests: int
    prompt_len: int
    output_len: int


def vllms_command(vllm: str, run: Run, folder: Path, seed: int) -> list[str]:
    """Its result is written to `folder`/vllm.json."""
    return [
        vllm, "bench", "serve", "--backend", "openai", "--base-url", run.url, "--model", run.model,
        "--tokenizer", str(run.tokenizer), "--dataset-name", "random", "--ignore-eos", "--disable-tqdm",
        "--random-input-len", str(run.prompt_len), "--random-output-len", str(run.output_len),
        "--num-prompts", str(run.num_requests), "--request-rate", str(run.rate), "--seed", str(seed),
        "--percentile-metrics", ",".join(_METRICS.values()),
        "--metric-percentiles", ",".join(map(str, _PERCENTILES)),
        "--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json",
    ]  # fmt: skip


def ours_command(run: Run, folder: Path, seed: int) -> list[str]:
    """Its result is written to `folder`/tandem.json."""
    return [
        sys.executable, "-m", "tandem.cli", "bench", "serve", "--url", run.url, "--model", run.model,
        "--tokenizer", str(run.tokenizer), "--prompt-as", "text", "--prompt-len", str(run.prompt_len),
        "--output-len", str(run.output_len), "--num-requests", str(run.num_requests), "--rate", str(run.rate),
        "--seed", str(seed), "--json", str(folder / "tandem.json"),
    ]  # fmt: skip


def vllms_figures(result: Mapping[str, Any]) -> dict[str, float]:
    """By our names."""
    figures = {ours: float(result[theirs]) for ours, theirs in _RATES.items()}
    for ours, theirs in _METRICS.items():
        figures[f"{ours} mean"] = float(result[f"mean_{theirs}_ms"])
        figures |= {f"{ours} p{percent}": float(result[f"p{percent}_{theirs}_ms"]) for percent in _PERCENTILES}
    return figures


def our_figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Of a result with one rate."""
    (point,) = result["points"]
    figures = {name: float(point[name]) for name in _RATES}
    for name in _METRICS:
        figures |= {f"{name} {column}": point[name][column] for column in ("mean", "p50", "p90", "p95", "p99")}
    return figures


def side_by_side(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> list[str]:
    """Medians over the rounds, and the ratio of ours to theirs."""
    lines = [f"{'':22}{'tandem':>12}{'vllm':>12}{'ratio':>8}"]
    for name in ours[0]:
        one, other = (statistics.median(figures[name] for figures in rounds) for rounds in (ours, theirs))
        lines.append(f"{name:22}{one:12.2f}{other:12.2f}" + (f"{one / other:8.3f}" if other else f"{'-':>8}"))
    return lines


def measured_by_us(run: Run, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return our_figures(_result(ours_command(run, Path(folder), seed), Path(folder) / "tandem.json"))


def measured_by_vllm(vllm: str, run: Run, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return vllms_figures(_result(vllms_command(vllm, run, Path(folder), seed), Path(folder) / "vllm.json"))


def _result(command: list[str], file: Path) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not file.is_file():
        raise click.ClickException(f"{' '.join(command[:5])} … failed ({done.returncode}):\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", required=True, help="The OpenAI endpoint, such as http://127.0.0.1:8000.")
@click.option("--model", required=True, help="Its name there.")
@click.option("--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True)
@click.option("--num-requests", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--prompt-len", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--output-len", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--vllm", default="vllm", show_default=True, help="The command.")
def main(*, vllm: str, rounds: int, **options: Any) -> None:
    """Measure one endpoint with both, in turns."""
    if shutil.which(vllm) is None:
        raise click.ClickException(_MISSING.format(vllm=vllm))
    run = Run(**options)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(rounds):
        if number % 2 == 0:
            ours.append(measured_by_us(run, number))
        theirs.append(measured_by_vllm(vllm, run, number))
        if number % 2 == 1:
            ours.append(measured_by_us(run, number))
    print("\n".join(side_by_side(ours, theirs)))


if __name__ == "__main__":
    main()
