"""Aggregated engine against transformers' `generate`, the same random-weight shapes, side by side in one run.

    python -m benchmarks.engine_vs_transformers [--shape 0.6b] [--work 1x32->64] [--repeat 3]

Greedy, forced length. Both sides alternate, the median of the repeats counts, and what is compared is the ratio:
absolute figures drift from machine to machine. Ratios above 1: the engine is faster, or takes less CPU time, which
other work on the machine changes less. --model-impl transformers compares the backend of that name. The roof is the
time to read every weight once per step at the memory bandwidth measured in the same run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
import transformers

from benchmarks.shapes import SHAPES, write_config
from engine import LLM, SamplingParams


@dataclass(frozen=True, slots=True)
class Work:
    """`num_requests` prompts of `input_len` tokens, `output_len` tokens each."""

    num_requests: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.num_requests}x{self.input_len}->{self.output_len}"


WORKS = [Work(1, 32, 64), Work(8, 32, 64), Work(32, 32, 64), Work(1, 512, 1)]


@click.command(help=__doc__)
@click.option(
    "--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)), default=list(SHAPES), show_default=True
)
@click.option("--work", "only", multiple=True, type=click.Choice([str(work) for work in WORKS]), help="Only these.")
@click.option("--repeat", default=3, show_default=True, help="Runs of each side; the median counts.")
@click.option("--threads", default=2, show_default=True, help="Threads of both sides.")
@click.option("--model-impl", type=click.Choice(["native", "transformers"]), default="native", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
def main(
    shapes: tuple[str, ...], only: tuple[str, ...], repeat: int, threads: int, model_impl: str, dtype: str
) -> None:
    bandwidth = measure_bandwidth(threads)
    click.echo(f"memory read {bandwidth / 1e9:.0f} GB/s, {threads} threads, torch {torch.__version__}, {dtype}")
    click.echo(
        f"{'shape':6} {'work':12} {'engine tok/s':>13} {'transformers':>13} {'ratio':>6} {'CPU ms/tok':>11} "
        f"{'theirs':>7} {'ratio':>6} {'of roof':>8}"
    )
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            works = [work for work in WORKS if not only or str(work) in only]
            sides = Sides(write_config(Path(folder), shape), model_impl, dtype, threads)
            for work in works:
                click.echo(f"{shape:6} {sides.row(work, repeat, bandwidth)}")


class Sides:
    """The engine and transformers with random weights of one shape."""

    def __init__(self, folder: Path, model_impl: str, dtype: str, threads: int) -> None:
        torch.manual_seed(0)
        self.llm = make_llm(folder, model_impl, dtype, threads)
        config = transformers.AutoConfig.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        torch.set_num_threads(threads)

    def row(self, work: Work, repeat: int, bandwidth: float) -> str:
        prompts = torch.randint(3, self.llm.core.info.vocab_size, (work.num_requests, work.input_len))
        sides = partial(with_engine, self.llm, prompts, work), partial(with_peer, self.model, prompts, work)
        ours, theirs = alternate(*sides, repeat)
        num_tokens = work.num_requests * (work.output_len if work.output_len > 1 else work.input_len)
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        roof = work.output_len * weight_bytes / bandwidth
        of_roof = f"{roof / ours.wall:8.0%}" if work.num_requests == 1 and work.output_len > 1 else f"{'':8}"
        speeds = f"{num_tokens / ours.wall:13.0f} {num_tokens / theirs.wall:13.0f} {theirs.wall / ours.wall:6.2f}"
        cpu = f"{1e3 * ours.cpu / num_tokens:11.2f} {1e3 * theirs.cpu / num_tokens:7.2f} {theirs.cpu / ours.cpu:6.2f}"
        return f"{work!s:12} {speeds} {cpu} {of_roof}"


def make_llm(folder: Path, model_impl: str, dtype: str, threads: int, quantization: str = "none") -> LLM:
    return LLM(
        folder,
        model_impl=model_impl,
        dtype=dtype,
        quantization=quantization,
        load_format="dummy",
        skip_tokenizer_init=True,
        num_threads=threads,
        kv_cache_bytes=1 << 30,
        enable_prefix_caching=False,
    )


def with_engine(llm: LLM, prompts: torch.Tensor, work: Work) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True)
    answers = llm.generate(prompts.tolist(), params, use_tqdm=False)
    assert all(len(answer.outputs[0].token_ids) == work.output_len for answer in answers)


def with_peer(model: transformers.PreTrainedModel, prompts: torch.Tensor, work: Work) -> None:
    with torch.inference_mode():
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=work.output_len,
            min_new_tokens=work.output_len,
            pad_token_id=0,
        )
    assert ids.shape[1] == work.input_len + work.output_len


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one side, or their medians."""

    wall: float
    cpu: float
    """Of all threads."""


def alternate(ours: Callable[[], None], theirs: Callable[[], None], repeat: int) -> tuple[Seconds, Seconds]:
    """Medians of each, run in turns after one warm-up of each."""
    ours()
    theirs()
    times: tuple[list[Seconds], list[Seconds]] = ([], [])
    for _ in range(repeat):
        for side, run in enumerate((ours, theirs)):
            started, started_cpu = time.perf_counter(), time.process_time()
            run()
            times[side].append(Seconds(time.perf_counter() - started, time.process_time() - started_cpu))
    return _median(times[0]), _median(times[1])


def _median(runs: list[Seconds]) -> Seconds:
    return Seconds(statistics.median(run.wall for run in runs), statistics.median(run.cpu for run in runs))


def measure_bandwidth(threads: int | None = None, device: str = "cpu") -> float:
    """Bytes per second of summing an array that no cache holds."""
    if threads is not None:
        torch.set_num_threads(threads)
    array = torch.ones(1 << 28, dtype=torch.float32, device=device)
    return array.nbytes / min(timed(lambda: array.sum().item()) for _ in range(5))


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
