"""Captured decode steps compute what uncaptured ones do: on CPU, with its recorder and with a stand-in for CUDA's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.attention import AttentionMetadata
from engine.config import EngineConfig
from engine.executor.decode_graphs import Capture, GraphedDecoder, LaunchRecorder, Step, capture_sizes
from engine.executor.executor import OneProcessExecutor
from engine.models import Decoder, read_config
from engine.models.elementwise import CompiledElementwise, to_float32
from tests.builders import lively_checkpoint
from tests.oracle import random_prompts
from tests.prefix_cache import forget_all

SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=3 + 5 * index, ignore_eos=True, logprobs=0) for index in range(7)
]


class Recorder:
    """Stands in for CUDA's capture: a replay runs the step on what is at its inputs' addresses then."""

    def __call__(self, step: Step) -> tuple[Callable[[], object], torch.Tensor]:
        hidden = step()
        return lambda: hidden.copy_(step()), hidden


class Counted:
    """A capture, and the sizes of the steps that were replayed."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.sizes: list[int] = []

    def __call__(self, step: Step) -> tuple[Callable[[], object], torch.Tensor]:
        replay, hidden = self._capture(step)

        def counting() -> None:
            self.sizes.append(len(hidden))
            replay()

        return counting, hidden


def answers(llm: LLM) -> list[tuple[list[int], float | None]]:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in random_prompts(7, longest=60, vocab_size=1000)]
    outputs = [answer.outputs[0] for answer in llm.generate(prompts, SAMPLING, use_tqdm=False)]
    return [(output.token_ids, output.cumulative_logprob) for output in outputs]


def uncaptured(executor: OneProcessExecutor) -> Decoder:
    """The executor's model, as it is without graphs from now on."""
    model = executor._model
    executor._model = model._model if isinstance(model, GraphedDecoder) else model
    return executor._model


CAPTURES: tuple[tuple[Callable[[], Capture], dict[str, Any]], ...] = (
    (Recorder, {"dtype": "float32"}),
    (Recorder, {"dtype": "float32", "attention_backend": "reference"}),
    (LaunchRecorder, {"dtype": "float32"}),
    (LaunchRecorder, {"dtype": "bfloat16"}),
    (LaunchRecorder, {"dtype": "bfloat16", "num_threads": 2}),
    (LaunchRecorder, {"dtype": "bfloat16", "quantization": "int8"}),
    (LaunchRecorder, {"dtype": "float32", "quantization": "int4"}),
)


@pytest.mark.parametrize(
    ("architecture", "capture", "options"),
    [
        *(("qwen3", *capture) for capture in CAPTURES),
        *(pytest.param("qwen2", *capture, marks=pytest.mark.slow) for capture in CAPTURES),
        *(
            (name, *capture)
            for name, capture in product(("qwen3_moe", "gpt_oss"), CAPTURES)
            if "quantization" in capture[1]
        ),
    ],
)
def test_answers_have_the_bits_of_uncaptured_steps(
    tmp_path: Path, architecture: str, capture: Callable[[], Capture], options: dict[str, Any]
) -> None:
    """Seven requests that end one after the other, in steps with chunks and without."""
    folder = lively_checkpoint(tmp_path, architecture, num_hidden_layers=3)
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 50, "enable_prefix_caching": False, **options}
    llm = LLM(folder, skip_tokenizer_init=True, num_blocks=64, max_model_len=128, **options)
    executor = llm.core._executor
    assert isinstance(executor, OneProcessExecutor)
    model = uncaptured(executor)
    expected = answers(llm)
    replayed, sizes = Counted(capture()), [1, 2, 4, 6]
    executor._model = GraphedDecoder(model, replayed, sizes=sizes, max_blocks=8)
    assert answers(llm) == expected
    assert set(replayed.sizes) == set(sizes), "4 and 6 have repeated rows"


@pytest.mark.parametrize(
    ("architecture", "options", "is_graphed"),
    [
        ("qwen2", {}, True),
        ("qwen2", {"enforce_eager": True}, False),
        ("qwen3_moe", {}, False),
        ("qwen2", {"attention_backend": "reference"}, False),
        ("qwen2", {"device": "cpu", "dtype": "float32", "quantization": "int8"}, True),
        ("qwen2", {"device": "cpu", "dtype": "float16"}, False),
        ("qwen3_moe", {"device": "cpu", "dtype": "float32", "quantization": "int8"}, True),
        (
            "qwen2",
            {"device": "cpu", "dtype": "float32", "quantization": "int8", "sizes": {"intermediate_size": 72}},
            False,
        ),
        ("qwen2", {"device": "cpu", "quantization": "int8", "attention_backend": "reference"}, False),
    ],
)
def test_graphs_are_for_native_models_that_read_nothing_on_the_host(
    tmp_path: Path, architecture: str, options: dict[str, Any], is_graphed: bool
) -> None:
    sizes = options.pop("sizes", {})
    folder = lively_checkpoint(tmp_path, architecture, num_hidden_layers=1, **sizes)
    config = EngineConfig(model=str(folder), **{"device": "cuda", **options})
    attention = "reference" if "attention_backend" in options else {"cuda": "triton", "cpu": "cpu"}[config.device]
    assert OneProcessExecutor.uses_graphs(config, read_config(folder), attention) is is_graphed


class SeenByKernels:
    """A model that remembers the memory of its metadata, which kernels of a captured step read in every replay."""

    attention_name = "flash"

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *others: None,
    ) -> torch.Tensor:
        assert set(others) <= {None}
        read = (metadata.query_start_loc, metadata.seq_lens, metadata.block_tables, metadata.slot_mapping)
        self.tensors += [weakref.ref(one.untyped_storage()) for one in (token_ids, positions, *read)]
        return torch.zeros(len(token_ids), 4)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_what_a_captured_step_reads_lives_as_long_as_it() -> None:
    def capture(step: Step) -> tuple[Callable[[], object], torch.Tensor]:
        hidden = step()
        return lambda: None, hidden  # as CUDA's: the step itself is gone

    model: Any = SeenByKernels()
    decoder = GraphedDecoder(model, capture, sizes=[1, 2, 4], max_blocks=8)
    for size in (4, 2, 1):
        ids, lens = torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.int32)
        starts = torch.arange(size + 1, dtype=torch.int32)
        metadata = AttentionMetadata(starts, lens, torch.zeros(size, 1, dtype=torch.int32), ids.clone(), 1, 1)
        decoder.forward(ids, ids.clone(), torch.zeros(4, 1, 2, 1, 16, 16), metadata)
    assert len(model.tensors) == 18
    assert all(tensor() is not None for tensor in model.tensors)


def test_captured_steps_have_room_for_what_fits_into_the_kv(tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    llm = LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", quantization="int8", num_blocks=6, block_size=16)
    executor = llm.core._executor
    assert isinstance(executor, OneProcessExecutor)
    assert isinstance(executor._model, GraphedDecoder)
    assert executor._model._max_blocks == 6


def test_few_sizes_are_captured_and_few_rows_repeated() -> None:
    for most in (*range(1, 300), 512, 1024):
        sizes = capture_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert len(sizes) <= 30
        for num_rows in range(1, most + 1):
            size = next(size for size in sizes if size >= num_rows)
            assert size < num_rows + max(8, num_rows / 4)


def test_the_warm_up_captures_what_streams_would_wait_for(tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", num_blocks=64, max_model_len=128, max_num_seqs=6)
    expected = answers(llm)
    executor = llm.core._executor
    assert isinstance(executor, OneProcessExecutor)
    captured: list[int] = []

    def capture(step: Step) -> tuple[Callable[[], object], torch.Tensor]:
        replay, hidden = Recorder()(step)
        captured.append(len(hidden))
        return replay, hidden

    sizes = executor.warm_up_sizes = capture_sizes(6)[::-1]
    executor._model = GraphedDecoder(uncaptured(executor), capture, sizes=sizes[::-1], max_blocks=8)
    llm.core._runner.warm_up()
    assert captured == sizes == [6, 4, 2, 1]
    forget_all(llm.core.scheduler.kv.pool)
    assert answers(llm) == expected
    assert captured == sizes


# A recorded step computes again what its inputs give, in whatever way torch and kernels take turns in it.

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


def test_an_operation_with_two_results_is_repeated() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        greatest, places = x.topk(4, dim=-1)
        return torch.cat((greatest, places.to(x.dtype)))

    replayed(step, torch.zeros(SHAPE))


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
