"""One card in one command: both phases, tokens with and without CUDA graphs, tokens/s beside transformers.

    python -m benchmarks.gpu [--shape 0.6b] [--requests 256] [--attention-backend triton]

Random weights of one shape. The throughput is nano-vllm's bench: `requests` prompts of 100 to 1024 random tokens, 100
to 1024 tokens each; beside it transformers' continuous batching (`generate_batch`) on the same prompts. `--device cpu`
runs it anywhere, without graphs.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import transformers

from benchmarks.engine_vs_transformers import measure_bandwidth, timed
from benchmarks.shapes import SHAPES, write_config
from engine import LLM, SamplingParams

_DECODED = 64


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="0.6b", show_default=True)
@click.option("--requests", "num_requests", default=256, show_default=True)
@click.option("--longest", default=1024, show_default=True, help="Tokens of a prompt, and of an answer.")
@click.option("--attention-backend", default="auto", show_default=True)
@click.option("--peer/--no-peer", default=True, show_default=True, help="Run transformers too.")
def main(device: str, shape: str, num_requests: int, longest: int, attention_backend: str, peer: bool) -> None:
    work = prompts_and_lengths(num_requests, longest, SHAPES[shape]["vocab_size"])
    num_tokens = sum(length for _, length in work)
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), shape)
        options: dict[str, Any] = {"device": device, "attention_backend": attention_backend, "max_model_len": 4096}
        options |= {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
        answers = []
        for eager in (True, False) if device == "cuda" else (True,):
            llm = LLM(
                config, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=eager, **options
            )
            name = f"{llm.core.info.attention_backend}, {'eager' if eager else 'graphs'}"
            share = bandwidth_share(llm, config, device)
            generate(llm, work[:1])
            answers.append(generate(llm, work[: max(1, num_requests // 8)]))
            seconds = timed(partial(generate, llm, work))
            click.echo(f"{name}: {num_tokens / seconds:.0f} tok/s, decode at batch 1 at {share:.0%} of the bandwidth")
            click.echo(phases(llm, num_requests, longest // 2, SHAPES[shape]["vocab_size"]))
            del llm
            gc.collect()
        if len(answers) > 1:
            same = sum(one == other for one, other in zip(*answers, strict=True))
            click.echo(f"answers that are the same with and without graphs: {same} of {len(answers[0])}")
        if peer:
            click.echo(f"transformers: {num_tokens / timed(peer_on(config, work, device)):.0f} tok/s")


def prompts_and_lengths(num_requests: int, longest: int, vocab_size: int) -> list[tuple[list[int], int]]:
    source, least = random.Random(0), min(100, longest)
    lengths = [(source.randint(least, longest), source.randint(least, longest)) for _ in range(num_requests)]
    return [([source.randrange(3, vocab_size) for _ in range(prompt)], answer) for prompt, answer in lengths]


def generate(llm: LLM, work: list[tuple[list[int], int]]) -> list[list[int]]:
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for _, length in work]
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work], params, use_tqdm=False)
    return [answer.outputs[0].token_ids for answer in answers]


def phases(llm: LLM, num_requests: int, prompt_len: int, vocab_size: int) -> str:
    """Prompts alone, and decode steps of all requests together."""
    source, seconds = random.Random(1), []
    for length in (1, 1, 1 + _DECODED):
        prompts = [[source.randrange(3, vocab_size) for _ in range(prompt_len)] for _ in range(num_requests)]
        seconds.append(timed(partial(generate, llm, [(prompt, length) for prompt in prompts])))
    _, prefill_s, whole_s = seconds
    step_s = (whole_s - prefill_s) / _DECODED
    return (
        f"  {num_requests} prompts of {prompt_len} tokens: {num_requests * prompt_len / prefill_s:.0f} tok/s; "
        f"their decode steps: {step_s * 1e3:.2f} ms, {num_requests / step_s:.0f} tok/s"
    )


def bandwidth_share(llm: LLM, folder: Path, device: str) -> float:
    """Of the memory's bandwidth, as measured here: every weight but the embedding's rows, once per token."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    num_bytes: int = 2 * sum(weight.numel() for weight in model.parameters())
    prompt = [([5, 6, 7], _DECODED)]
    generate(llm, prompt)
    return num_bytes * _DECODED / timed(lambda: generate(llm, prompt)) / measure_bandwidth(device=device)


def peer_on(folder: Path, work: list[tuple[list[int], int]], device: str) -> Callable[[], object]:
    """transformers' continuous batching. All answers are as long as the mean: it has one length for all."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().to(device)
    mean = sum(length for _, length in work) // len(work)
    generation = transformers.GenerationConfig(max_new_tokens=mean, do_sample=False, eos_token_id=-1)
    return lambda: model.generate_batch(inputs=[prompt for prompt, _ in work], generation_config=generation)


if __name__ == "__main__":
    main()
