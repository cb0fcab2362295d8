"""What a hand-over between two vLLMs costs, against a vLLM that prefills and decodes itself.

    python -m benchmarks.vllm_hand_over [--vllm-python .venv-vllm/bin/python] [--connector nixl] [--shape 33m]

A stack of one prefill and one decode instance and one of a single instance, float32, one thread each, asked in turns;
every prompt is new, and nothing else runs at the time: a stack is asked when the other's processes, which poll for a
second after an answer, are asleep. Prints medians, and the least, of what `first_token` measures: TTFT of both, the gap
between tokens 1 and 2 of the first, and the decode step.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from benchmarks.first_token import Sample, measure
from benchmarks.peers import vllm_python_option
from benchmarks.shapes import SHAPES, write_config
from tandem.client.client import Client
from tandem.client.health import instances_out
from tandem.demo import MODEL_DIR
from tandem.local_stack.settings import Disaggregation, StackSettings
from tandem.local_stack.stack import LocalStack

OUTPUT_LEN = 24
PAUSE_S = 1.5
"""Before each request."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""Of the demo's model, whose vocabulary is smaller: vLLM does not start without."""


@click.command(help=__doc__)
@vllm_python_option
@click.option("--connector", default="shared_storage", show_default=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="33m", show_default=True)
@click.option("--prompt", "prompt_len", default=1500, show_default=True, help="Tokens of each prompt.")
@click.option("--chunk", default=512, show_default=True, help="Token budget of one step.")
@click.option("--repeat", default=15, show_default=True, help="Requests to each stack, after two to warm up.")
def main(vllm_python: Path, connector: str, shape: str, prompt_len: int, chunk: int, repeat: int) -> None:
    split, whole = compare(str(vllm_python), connector, shape, prompt_len, chunk, repeat)
    show(split, whole)


def compare(
    interpreter: str, connector: str, shape: str, prompt_len: int, chunk: int, repeat: int
) -> tuple[list[Sample], list[Sample]]:
    """Handed over, aggregated: `repeat` requests to each, after two to warm up."""
    rng, vocab_size = random.Random(0), SHAPES[shape]["vocab_size"]
    found: tuple[list[Sample], list[Sample]] = ([], [])
    with tempfile.TemporaryDirectory() as name, ExitStack() as stacks:
        model = write_config(Path(name) / "model", shape)
        for file in _TOKENIZER_FILES:
            shutil.copy(MODEL_DIR / file, model)
        split = stacks.enter_context(stack(model, interpreter, chunk, connector, "always"))
        whole = stacks.enter_context(stack(model, interpreter, chunk, connector, "never"))
        for _ in range(repeat + 2):
            for client, samples in zip((split, whole), found, strict=True):
                time.sleep(PAUSE_S)
                prompt = [rng.randrange(3, vocab_size) for _ in range(prompt_len)]
                samples.append(measure(client, prompt, OUTPUT_LEN))
    return found[0][2:], found[1][2:]


@contextmanager
def stack(
    model: Path, interpreter: str, chunk: int, connector: str, disaggregation: Disaggregation
) -> Iterator[Client]:
    """Its weights are random, the same in every instance."""
    sizes = ("--load-format", "dummy", "--block-size", "32", "--max-num-batched-tokens", str(chunk))
    settings = StackSettings(
        model=model,
        model_name="random",
        engine="vllm",
        engine_python=interpreter,
        num_prefill=int(disaggregation == "always"),
        connector=connector,
        disaggregation=disaggregation,
        dtype="float32",
        max_model_len=4096,
        num_blocks=512,
        threads=1,
        pin=False,  # vLLM's processes spin while they wait: on one core they would take it from each other
        instance_args=sizes,
        router_args=("--pools-beat-timeout-s", "20", "--pools-core-silence-timeout-s", "20"),
    )
    with LocalStack(settings) as running, Client(running.address) as client:
        while instances_out(running.admin_address):
            time.sleep(0.1)
        yield client


def show(split: list[Sample], whole: list[Sample]) -> None:
    figures = {
        "TTFT handed over": [times.ttft_s for times in split],
        "TTFT aggregated": [times.ttft_s for times in whole],
        "token 1 to 2": [times.gap_s for times in split],
        "decode step": [times.step_s for times in split],
    }
    for name, seconds in figures.items():
        click.echo(f"{name:17} median {statistics.median(seconds) * 1e3:6.1f} ms, least {min(seconds) * 1e3:6.1f} ms")
    ratio = statistics.median(times.ttft_s for times in split) / statistics.median(times.ttft_s for times in whole)
    click.echo(f"TTFT handed over / aggregated: {ratio:.2f}")


if __name__ == "__main__":
    main()
