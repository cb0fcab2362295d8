"""Captured decode steps compute what uncaptured ones do: with a capture that calls the recorded step again, on CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.executor.decode_graphs import GraphedDecoder, Step
from engine.executor.executor import OneProcessExecutor
from engine.models import read_config
from tests.builders import lively_checkpoint
from tests.oracle import random_prompts

SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=3 + 5 * index, ignore_eos=True, logprobs=0) for index in range(7)
]


class Recorder:
    """Stands in for CUDA's capture: a replay runs the step on what is at its inputs' addresses then."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def __call__(self, step: Step) -> tuple[Callable[[], None], torch.Tensor]:
        hidden = step()

        def replay() -> None:
            self.replayed.append(len(hidden))
            hidden.copy_(step())

        return replay, hidden


def answers(llm: LLM) -> list[tuple[list[int], float | None]]:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in random_prompts(7, longest=60, vocab_size=1000)]
    outputs = [answer.outputs[0] for answer in llm.generate(prompts, SAMPLING, use_tqdm=False)]
    return [(output.token_ids, output.cumulative_logprob) for output in outputs]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_answers_have_the_bits_of_uncaptured_steps(tmp_path: Path, backend: str) -> None:
    """Seven requests that end one after the other, in steps with chunks and without."""
    folder = lively_checkpoint(tmp_path, "qwen2", num_hidden_layers=2)
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "attention_backend": backend, "max_num_seqs": 6}
    llm = LLM(folder, skip_tokenizer_init=True, max_num_batched_tokens=50, max_model_len=128, **options)
    expected = answers(llm)
    llm = LLM(folder, skip_tokenizer_init=True, max_num_batched_tokens=50, max_model_len=128, **options)
    executor, recorder = llm.core._executor, Recorder()
    assert isinstance(executor, OneProcessExecutor)
    executor._model = GraphedDecoder(executor._model, recorder, max_num_seqs=6, max_blocks=8)
    assert answers(llm) == expected
    assert set(recorder.replayed) == {1, 2, 4, 6}, "sizes, of which 4 and 6 have repeated rows"


@pytest.mark.parametrize(
    ("architecture", "options", "is_graphed"),
    [
        ("qwen2", {"enforce_eager": False}, True),
        ("qwen2", {}, False),
        ("qwen3_moe", {"enforce_eager": False}, False),
        ("qwen2", {"enforce_eager": False, "attention_backend": "reference"}, False),
        ("qwen2", {"enforce_eager": False, "device": "cpu"}, False),
    ],
)
def test_graphs_are_for_dense_native_models_on_cuda(
    tmp_path: Path, architecture: str, options: dict[str, Any], is_graphed: bool
) -> None:
    folder = lively_checkpoint(tmp_path, architecture, num_hidden_layers=1)
    config = EngineConfig(model=str(folder), **{"device": "cuda", **options})
    attention = "reference" if "attention_backend" in options else "triton"
    assert OneProcessExecutor.uses_graphs(config, read_config(folder), attention) is is_graphed
