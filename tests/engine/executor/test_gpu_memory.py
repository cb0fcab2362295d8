"""KV takes what a GPU has left beside the weights and the largest step: with a CPU model and counted memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from engine.config import EngineConfig
from engine.core.core import EngineCore
from engine.errors import CapacityError, EngineError, may_pass
from engine.executor.executor import OneProcessExecutor, bytes_for_kv, check_gpu
from engine.model_runner import ModelRunner
from engine.models import read_config
from tests.builders import lively_checkpoint, write_adapter


@dataclass
class CountedMemory:
    """A device as torch sees it: freed memory stays in a cache until that is emptied."""

    total: int
    others: int
    weights: int
    cached: int = 0
    peak: int = 0

    def step_of(self, num_bytes: int) -> Callable[[], None]:
        def step() -> None:
            self.peak, self.cached = max(self.peak, self.weights + num_bytes), num_bytes

        return step

    def mem_get_info(self) -> tuple[int, int]:
        return self.total - self.others - self.weights - self.cached, self.total

    def empty_cache(self) -> None:
        self.cached = 0

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.weights

    def max_memory_allocated(self) -> int:
        return self.peak

    def memory_allocated(self) -> int:
        return self.weights


def test_kv_takes_what_is_left_beside_weights_step_and_others() -> None:
    memory = CountedMemory(total=1000, others=100, weights=300, cached=50, peak=900)
    left = bytes_for_kv(memory, 0.9, memory.step_of(200))
    assert left == 900 - 100 - 300 - 200
    memory.weights += left
    free, _ = memory.mem_get_info()
    assert free - 200 == 100, "while a step runs, a tenth is free"


def test_a_gpu_without_room_is_refused_with_the_figures() -> None:
    memory = CountedMemory(total=1000, others=100, weights=500)
    with pytest.raises(
        CapacityError, match="of 1000 bytes 80% may be used, 600 are used and a step needs 200; raise gpu"
    ):
        bytes_for_kv(memory, 0.8, memory.step_of(200))


def test_a_gpu_that_runs_out_at_the_start_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs_out(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …")

    monkeypatch.setattr(ModelRunner, "warm_up", runs_out)
    config = EngineConfig(model=str(lively_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)), num_blocks=16)
    with pytest.raises(CapacityError, match=r"left: CUDA out of memory\. Tried to allocate 20\.00 GiB; take a smaller"):
        EngineCore(config, lambda: None)


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "max_model_len", "num_rows"), [(50, 8, 32, 8), (64, 8, 16, 8), (8, 64, 100, 8)]
)
def test_the_largest_step_computes_the_whole_budget_within_the_longest_request(
    tmp_path: Path, budget: int, max_num_seqs: int, max_model_len: int, num_rows: int
) -> None:
    folder = lively_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    config = EngineConfig(model=str(folder), dtype="float32", max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    model = read_config(folder)
    executor = OneProcessExecutor(config, model)
    seen = []
    forward = executor._model.forward
    executor._model.forward = lambda *step: (seen.append(step), forward(*step))[1]  # type: ignore[func-returns-value, method-assign]
    logits = executor.compute_largest_step(model.kv_layout(dtype="float32", block_size=16), max_model_len)
    assert logits.shape == (num_rows, model.vocab_size)
    assert logits.isfinite().all()
    [(token_ids, positions, kv_cache, metadata, _, adapters)] = seen
    assert len(token_ids) == budget
    assert int(positions.max()) + 1 == metadata.max_seq_len <= max_model_len
    assert adapters is None
    assert len(kv_cache) == 1, "a step's pages are in the KV memory, not beside it"


def test_all_tokens_of_the_largest_step_have_an_adapter(tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1)
    adapters = {name: str(write_adapter(tmp_path / name, folder)) for name in "ab"}
    config = EngineConfig(model=str(folder), dtype="float32", max_num_batched_tokens=50, lora_adapters=adapters)
    model = read_config(folder)
    executor = OneProcessExecutor(config, model)
    with patch.object(executor._model, "forward", wraps=executor._model.forward) as forward:
        executor.compute_largest_step(model.kv_layout(dtype="float32", block_size=16), 32)
    assert forward.call_args.args[5].tolist() == [0] * 50


class Gpus:
    """Stands in for `torch.cuda`."""

    def __init__(self, problem: Exception | None) -> None:
        self.problem = problem

    def init(self) -> None:
        if self.problem is not None:
            raise self.problem


@pytest.mark.parametrize(
    ("problem", "passes", "hints"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), False, ["not compiled with CUDA enabled; it needs"]),
        (
            RuntimeError("The NVIDIA driver on your system is too old (12020).\nUpdate it"),
            True,
            ["too old (12020); it"],
        ),
        (RuntimeError("No CUDA GPUs are available"), True, ["nvidia-smi", "engine.device (--device) to cpu"]),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, passes: bool, hints: list[str]
) -> None:
    monkeypatch.setattr(torch, "cuda", Gpus(problem))
    with pytest.raises(EngineError, match=r"engine\.device is cuda: torch cannot use a GPU: ") as raised:
        check_gpu("cuda")
    for hint in hints:
        assert hint in str(raised.value)
    assert "Update it" not in str(raised.value)
    assert may_pass(raised.value) == passes
    check_gpu("cpu")


def test_a_gpu_that_others_have_taken_is_found_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*shape: int, device: str) -> torch.Tensor:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nFor debugging consider …")

    monkeypatch.setattr(torch, "cuda", Gpus(None))
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(EngineError, match=r"torch cannot use a GPU: CUDA error: .* busy or unavailable; it needs"):
        check_gpu("cuda")


@pytest.mark.parametrize(
    ("problem", "kind", "text"),
    [
        (RuntimeError("No CUDA GPUs are available"), EngineError, "cannot use a GPU: No CUDA GPUs are available; it"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB."), CapacityError, "no memory left: CUDA"),
    ],
)
def test_an_engine_on_a_gpu_that_it_cannot_use_does_not_load_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, kind: type[Exception], text: str
) -> None:
    monkeypatch.setattr(torch, "cuda", Gpus(problem))
    config = EngineConfig(model=str(lively_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)), device="cuda")
    with pytest.raises(kind, match=text):
        EngineCore(config, lambda: None)
