"""The cost of the KV hand-over for the first and the second token: a split stack against an aggregated one.

    python -m benchmarks.first_token [--shape 0.6b] [--chunk 256] [--prompt 512 --prompt 1024 …] [--connector nixl …]

For each connector both stacks run at the same time and get requests alternately, one at a time, every prompt new; each
instance has one core and one thread, so that the split stack's prefill has the resources of the aggregated one. Prints
medians: TTFT of both and their ratio, the gap between tokens 1 and 2, and how much longer it is than two decode steps.

In a virtual machine the first touch of memory may cost ten times what a copy costs (the host has to back it):
files in the page cache and KV blocks pay this at their first use. `--touch` measures this cost and touches most of the
free memory before the measurement; the host may reclaim it while it is idle.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
from tqdm import tqdm

from benchmarks.shapes import SHAPES, write_config
from engine.config import Device
from engine.machine import available_bytes, usable_cores
from tandem.client.client import Client
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, in seconds."""

    ttft_s: float
    gap_s: float
    """Between tokens 1 and 2."""
    step_s: float
    """Median of the later gaps."""

    @property
    def excess_s(self) -> float:
        """The gap beyond two decode steps."""
        return self.gap_s - 2 * self.step_s


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="0.6b", show_default=True)
@click.option("--connector", "connectors", multiple=True, default=("shared_storage", "nixl"), show_default=True)
@click.option("--prompt", "lengths", multiple=True, type=int, default=(512, 1024, 2048), show_default=True)
@click.option("--chunk", default=256, show_default=True, help="Token budget of one step.")
@click.option("--output", "output_len", default=8, show_default=True, help="Tokens of each answer.")
@click.option("--touch/--no-touch", default=True, show_default=True, help="Touch free memory first.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--repeat", default=5, show_default=True, help="Requests measured at each length, after one warm-up.")
def main(
    shape: str,
    connectors: tuple[str, ...],
    lengths: tuple[int, ...],
    chunk: int,
    output_len: int,
    touch: bool,
    device: Device,
    repeat: int,
) -> None:
    if touch and device == "cpu":
        click.echo(f"fresh memory: {touch_free_memory():.1f} GB/s")
    with tempfile.TemporaryDirectory() as name:
        split = StackSettings(
            model=write_config(Path(name) / "model", shape),
            model_name="random",
            disaggregation="always",
            dtype="bfloat16",
            kv_cache_bytes=1 << 30,
            max_model_len=4096,
            threads=1,
            device=device,
            instance_args=("--load-format", "dummy", "--max-num-batched-tokens", str(chunk)),
        )
        one_core = ("--cpu-cores", f"[{usable_cores()[0]}]") if device == "cpu" else ()
        whole = replace(
            split, num_prefill=0, disaggregation="never", instance_args=(*split.instance_args, *one_core), pin=False
        )
        for connector in connectors:
            with ExitStack() as stack:
                clients = {
                    "aggregated": stack.enter_context(client_of(stack, whole)),
                    connector: stack.enter_context(client_of(stack, replace(split, connector=connector))),
                }
                compare(clients, lengths, SHAPES[shape]["vocab_size"], output_len, repeat)


def touch_free_memory() -> float:
    """Write to two thirds of the memory that is free, and give it back; GB/s."""
    num_bytes = available_bytes() * 2 // 3
    started = time.monotonic()
    np.ones(num_bytes, dtype=np.uint8)
    return num_bytes / 1e9 / (time.monotonic() - started)


def client_of(stack: ExitStack, settings: StackSettings) -> Client:
    """A client of a stack that lives as long as `stack`."""
    return Client(stack.enter_context(LocalStack(settings)).address)


def compare(clients: dict[str, Client], lengths: tuple[int, ...], vocab_size: int, output_len: int, num: int) -> None:
    """Sends requests to all stacks alternately and prints the result."""
    rng = random.Random(0)
    for length in lengths:
        samples: dict[str, list[Sample]] = {name: [] for name in clients}
        for index in tqdm(range(num + 1), desc=f"{length} tokens", leave=False, disable=None):
            for name, client in clients.items():
                prompt = [rng.randrange(3, vocab_size) for _ in range(length)]
                sample = measure(client, prompt, output_len)
                if index:
                    samples[name].append(sample)
        medians = {name: median(some) for name, some in samples.items()}
        base = medians["aggregated"]
        for name, found in medians.items():
            click.echo(
                f"{length:5} tokens  {name:15} TTFT {found.ttft_s * 1e3:6.0f} ms ({found.ttft_s / base.ttft_s:.3f}×)"
                f"  gap 1-2 {found.gap_s * 1e3:5.0f} ms  step {found.step_s * 1e3:4.0f} ms"
                f"  gap - 2 steps {found.excess_s * 1e3:5.0f} ms"
            )


def measure(client: Client, prompt: list[int], output_len: int) -> Sample:
    """One request, alone."""
    started = time.monotonic()
    options = {"temperature": 0.0, "max_tokens": output_len, "ignore_eos": True}
    pieces = client.stream(prompt, **options)  # type: ignore[arg-type]
    times = [time.monotonic() for piece in pieces for _ in piece.token_ids]
    assert len(times) == output_len
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Sample(times[0] - started, gaps[0], statistics.median(gaps[1:]))


def median(samples: list[Sample]) -> Sample:
    return Sample(
        statistics.median(sample.ttft_s for sample in samples),
        statistics.median(sample.gap_s for sample in samples),
        statistics.median(sample.step_s for sample in samples),
    )


if __name__ == "__main__":
    main()
