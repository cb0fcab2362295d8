"""How long a client waits between token 1, which prefill computes, and token 2, which decode computes.

    python -m benchmarks.hand_over_gap [--shape 0.6b] [--prompt 512] [--chunk 128] [--repeat 5]

One prefill and one decode instance on a core each, shared storage, bf16, every prompt new. Prints for each request
TTFT, the gap between tokens 1 and 2, the decode step (median of the later gaps) and the share of the prompt's full
blocks that decode had verified when prefill's last chunk was computed. vLLM 0.32 with files: 418 ms gap for 512 tokens
of the same shape on a machine like the one in benchmarks/LOG.md.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks import first_token
from benchmarks.first_token import Sample
from benchmarks.shapes import SHAPES, write_config
from kv_transfer.secret import ensure_secret
from tandem.client.client import Client
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack

BLOCK_SIZE = 16


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="0.6b", show_default=True)
@click.option("--prompt", "prompt_len", default=512, show_default=True, help="Tokens of each prompt.")
@click.option("--chunk", default=128, show_default=True, help="Token budget of one step.")
@click.option("--output", "output_len", default=16, show_default=True, help="Tokens of each answer.")
@click.option("--repeat", default=5, show_default=True, help="Requests measured, one after another, after one warm-up.")
def main(shape: str, prompt_len: int, chunk: int, output_len: int, repeat: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = folder / "record.jsonl"
        settings = stack_settings(write_config(folder / "model", shape), record, chunk)
        with LocalStack(settings) as stack, Client(stack.address) as client:
            rng = random.Random(0)
            vocab_size = SHAPES[shape]["vocab_size"]
            samples, shares = [], []
            for index in range(repeat + 1):
                prompt = [rng.randrange(3, vocab_size) for _ in range(prompt_len)]
                sample, early_share = measure(client, prompt, output_len, record)
                if index:
                    samples.append(sample)
                    shares.append(early_share)
                    show(sample, early_share)
    click.echo("median:")
    show(first_token.median(samples), statistics.median(shares))


def stack_settings(model: Path, record: Path, chunk: int) -> StackSettings:
    """1P1D, a core each, the recording connector."""
    secret = record.parent / "secret"
    ensure_secret(secret)
    options = json.dumps({"record_file": str(record), "path": str(record.parent / "store"), "digest": True})
    return StackSettings(
        model=model,
        model_name="random",
        disaggregation="always",
        dtype="bfloat16",
        connector="benchmarks.recording_connector:RecordingConnector",
        kv_cache_bytes=1 << 30,
        max_model_len=4096,
        instance_args=(
            *("--load-format", "dummy", "--max-num-batched-tokens", str(chunk)),
            *("--kv-options", options, "--kv-secret-file", str(secret)),
        ),
    )


def measure(client: Client, prompt: list[int], output_len: int, record: Path) -> tuple[Sample, float]:
    """One request, alone, and the share of its blocks that decode had early."""
    seen = len(read(record))
    sample = first_token.measure(client, prompt, output_len)
    lines = read(record)[seen:]
    computed = max(line["at"] for line in lines if line["what"] == "computed")
    num_early = sum(line["what"] == "loaded" and line["at"] <= computed for line in lines)
    return sample, num_early / (len(prompt) // BLOCK_SIZE)


def read(record: Path) -> list[dict[str, Any]]:
    """The record's lines so far."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def show(sample: Sample, early_share: float) -> None:
    click.echo(
        f"TTFT {sample.ttft_s * 1e3:6.0f} ms  gap 1-2 {sample.gap_s * 1e3:5.0f} ms  step {sample.step_s * 1e3:5.1f} ms "
        f" gap - 2 steps {sample.excess_s * 1e3:6.0f} ms  early blocks {early_share:4.0%}"
    )


if __name__ == "__main__":
    main()
