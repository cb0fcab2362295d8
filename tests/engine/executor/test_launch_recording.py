"""A recorded step computes again what its inputs give, in whatever way torch and kernels take turns in it."""

from __future__ import annotations

from functools import partial

import torch

from engine.executor.decode_graphs import LaunchRecorder
from engine.models.elementwise import CompiledElementwise, to_float32

SHAPE = (3, 32)
elementwise = CompiledElementwise()


def replayed(step, *inputs: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    """Records `step(*inputs)`; then it gives what it gives now, for three other fillings of `inputs`."""
    with torch.inference_mode():
        replay, result = LaunchRecorder()(lambda: step(*inputs))
        for seed in range(3):
            torch.manual_seed(seed)
            for given in inputs:
                given.copy_(torch.randn(given.shape))
            expected = step(*(given.clone() for given in inputs))
            replay()
            assert torch.equal(result, expected)


def test_torch_operations_between_kernels_are_repeated() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        residual = x * 2
        first = elementwise.add_rms_norm(None, residual, weight, 1e-6)
        residual += first.cos()
        return elementwise.add_rms_norm(first, residual, weight, 1e-6) + 1

    replayed(step, torch.zeros(SHAPE), torch.zeros(SHAPE[1]))


def test_copies_that_look_like_views_are_repeated() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        columns = x.to(torch.bfloat16).t().contiguous().t()
        wide = to_float32(columns.reshape(-1, 2, 16).flatten(1)[1:])
        first, second = wide.split([1, 1])
        return torch.cat((second.expand(2, -1), first))

    replayed(step, torch.zeros(SHAPE))


def test_a_result_that_no_kernel_writes_is_repeated() -> None:
    replayed(lambda x: (x @ x.t()).softmax(-1), torch.zeros(SHAPE))


def test_temporaries_take_the_memory_of_a_layer_however_many_there_are() -> None:
    def step() -> torch.Tensor:
        hidden = weight.expand(8, -1).contiguous()
        for _ in range(50):
            hidden = elementwise.add_rms_norm(None, hidden, weight, 1e-6)
            addresses.add(hidden.data_ptr())
        return hidden

    weight, addresses = torch.ones(1024), set[int]()
    recorder = LaunchRecorder()
    with torch.inference_mode():
        kept = [recorder(step) for _ in range(3)]
    assert len(addresses) <= 2 + len(kept), "a result keeps its memory, nothing else does"


def test_steps_with_other_numbers_of_rows_share_memory() -> None:
    """As many recordings as there may be streams take what the largest take, not the sum of all."""

    def step(num_rows: int) -> torch.Tensor:
        hidden = weight.expand(num_rows, -1).contiguous()
        for _ in range(5):
            hidden = elementwise.add_rms_norm(None, hidden, weight, 1e-6)
        return hidden[:1].clone()

    weight, recorder = torch.ones(1024), LaunchRecorder()
    with torch.inference_mode():
        kept = [recorder(partial(step, num_rows)) for num_rows in range(1, 65)]
    num_bytes = sum(size * len(free) for size, free in recorder._temporaries._free.items())
    assert len(kept) == 64
    assert num_bytes < 3 * (1 + 1 / 2 + 1 / 4 + 1 / 8) * 64 * weight.nbytes


def test_steps_of_one_recorder_do_not_disturb_each_other() -> None:
    recorder, weight = LaunchRecorder(), torch.ones(SHAPE[1])
    inputs = [torch.randn(SHAPE) for _ in range(4)]

    def step(x: torch.Tensor) -> torch.Tensor:
        normed = elementwise.add_rms_norm(None, x * 3, weight, 1e-6)
        return elementwise.add_rms_norm(normed, normed * 2, weight, 1e-6)

    with torch.inference_mode():
        recorded = [recorder(lambda x=x: step(x)) for x in inputs]  # type: ignore[misc]
        for _ in range(2):
            for replay, _ in recorded:
                replay()
            for (_, result), x in zip(recorded, inputs, strict=True):
                assert torch.equal(result, step(x))
