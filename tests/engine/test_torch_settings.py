"""Torch's settings of the whole process: an `LLM` neither depends on those of the program that calls it, nor changes
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core.messages import AddRequest, EngineRequest, TokensEvent
from engine.errors import UnsupportedModel
from engine.models.linear import PackedLinear, PanelLinear
from engine.models.quantized import QuantizedLinear, QuantizedMatrix
from tests.builders import lively_checkpoint
from tests.oracle import random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = random_prompts(3, longest=50, vocab_size=1000)
DTYPES = (torch.float16, torch.bfloat16, torch.float64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("lively"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("gpt2"), "gpt2")


@contextmanager
def defaults(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Iterator[None]:
    """As a program sets them that builds its own models."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
        assert (torch.get_default_dtype(), torch.get_default_device().type) == (dtype, device)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"dtype": "float32", "num_gpu_blocks_override": 64, **options})


def generate(llm: LLM) -> list[list[int]]:
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    found = [answer.outputs[0].token_ids for answer in answers]
    assert len(set(found[0])) > 3
    return found


# Defaults of new tensors


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"load_format": "dummy"}])
def test_tokens_do_not_depend_on_the_default_dtype(checkpoint: Path, options: dict[str, Any]) -> None:
    expected = generate(make_llm(checkpoint, **options))
    for dtype in DTYPES:
        with defaults(dtype):
            assert generate(make_llm(checkpoint, **options)) == expected


@pytest.mark.parametrize("options", [{}, {"quantization": "int4"}, {"dtype": "bfloat16"}, {"load_format": "dummy"}])
def test_tokens_do_not_depend_on_the_default_device(checkpoint: Path, options: dict[str, Any]) -> None:
    llm = make_llm(checkpoint, **options)
    expected = generate(llm)
    with defaults(device="meta"):
        assert generate(llm) == expected
        assert generate(make_llm(checkpoint, **options)) == expected
    with torch.device("meta"):
        assert generate(make_llm(checkpoint, **options)) == expected


def test_a_model_of_transformers_does_not_depend_on_the_defaults(gpt2: Path) -> None:
    expected = generate(make_llm(gpt2))
    with defaults(torch.bfloat16, "meta"):
        assert generate(make_llm(gpt2)) == expected


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_steps_give_the_kernels_tensors_of_the_types_that_they_read(checkpoint: Path, options: dict[str, Any]) -> None:
    """Of a core that its owner steps without `LLM`."""
    expected = generate(make_llm(checkpoint, **options))
    core, found = make_llm(checkpoint, **options).core, {str(index): list[int]() for index in range(len(PROMPTS))}
    with defaults(torch.bfloat16, "meta"):
        for request_id, prompt in zip(found, PROMPTS, strict=True):
            core.handle(
                AddRequest(EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=GREEDY, seed=1))
            )
        while any(len(token_ids) < len(expected[0]) for token_ids in found.values()):
            for event in core.step():
                assert isinstance(event, TokensEvent)
                assert event.error is None
                found[event.request_id] += event.token_ids
    assert list(found.values()) == expected


LINEAR_LAYERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "packed": PackedLinear,
    "panel": lambda weight: PanelLinear(weight, None),
    "int8": lambda weight: QuantizedLinear(QuantizedMatrix.of(weight, "int8"), None, weight.dtype),
    "int4": lambda weight: QuantizedLinear(QuantizedMatrix.of(weight, "int4"), None, weight.dtype),
}


@pytest.mark.parametrize("kind", LINEAR_LAYERS)
def test_a_layer_without_bias_adds_zeros_whatever_the_defaults_are(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(100, 64, generator=generator), torch.randn(5, 64, generator=generator)
    expected = LINEAR_LAYERS[kind](weight)(x)
    for dtype in DTYPES:
        with defaults(dtype, "meta"):
            found = LINEAR_LAYERS[kind](weight)(x)
        assert torch.equal(found, expected)


# Threads


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch has on a machine of two cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("engine.machine.useful_threads", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """How many its steps compute with."""
    used, step = set[int](), llm.core.step

    def recorded() -> Any:
        used.add(torch.get_num_threads())
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.core, "step", recorded)
        llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    return used


@pytest.mark.usefixtures("two_threads")
def test_an_llm_leaves_torchs_threads_as_they_are(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(checkpoint, num_threads=1)
    assert torch.get_num_threads() == 2
    assert threads_of(llm, monkeypatch) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_each_llm_has_its_own_number_of_threads(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, by_default = (make_llm(checkpoint, num_threads=number) for number in (1, 2, None))
    for _ in range(2):
        assert [threads_of(llm, monkeypatch) for llm in (one, two, by_default)] == [{1}, {2}, {2}]


@pytest.mark.usefixtures("two_threads")
def test_an_llm_that_could_not_be_made_leaves_all_threads_to_the_next(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size is 3"):
        make_llm(checkpoint, tensor_parallel_size=3)
    assert threads_of(make_llm(checkpoint), monkeypatch) == {2}


@pytest.mark.usefixtures("two_threads")
def test_an_error_of_generate_leaves_the_settings_as_they_were(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(checkpoint, num_threads=1)

    def interrupted() -> Any:
        raise KeyboardInterrupt

    with defaults(torch.bfloat16, "meta"), monkeypatch.context() as patch:
        patch.setattr(llm.core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
        assert torch.get_num_threads() == 2
    assert threads_of(llm, monkeypatch) == {1}
