"""Pages are the KV memory's own bytes, on the CPU without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kv_transfer.page.memory import DevicePages, make_page_memory
from tests.kv_transfer.harness import LAYOUT


def kv_memory(device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((5, *LAYOUT.page_shape), generator=generator).to(dtype).to(device)


def bytes_of(kv: torch.Tensor, block_id: int) -> bytes:
    return kv[block_id].cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_page_leaves_one_memory_and_enters_another(device: str, dtype: torch.dtype) -> None:
    source, target = kv_memory(device, dtype), torch.zeros_like(kv_memory(device, dtype))
    page = make_page_memory(source).page_out(3)
    assert bytes(page) == bytes_of(source, 3)
    pages = make_page_memory(target)
    entering = pages.page_in(1)
    entering[:] = page
    pages.commit(1, entering)
    assert torch.equal(target[1], source[3])
    assert not target[[0, 2, 3, 4]].any()


def test_page_on_the_cpu_is_a_view_and_cannot_be_written_on_its_way_out() -> None:
    kv = kv_memory("cpu")
    page = make_page_memory(kv).page_out(0)
    kv[0].zero_()
    assert not any(page)
    assert page.readonly


@pytest.mark.parametrize("block_id", [-1, 5])
def test_block_that_is_not_there_is_an_error(block_id: int) -> None:
    with pytest.raises(IndexError):
        make_page_memory(kv_memory("cpu")).page_in(block_id)


def test_memory_that_is_not_contiguous_is_rejected() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        make_page_memory(kv_memory("cpu").transpose(1, 2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_page_of_layers_is_that_of_one_array_with_the_same_contents(device: str) -> None:
    source = kv_memory(device)
    layers = [source[:, layer].contiguous() for layer in range(source.shape[1])]
    page = make_page_memory(layers).page_out(3)
    assert bytes(page) == bytes_of(source, 3)
    targets = [torch.zeros_like(layer) for layer in layers]
    pages = make_page_memory(targets)
    entering = pages.page_in(1)
    entering[:] = page
    pages.commit(1, entering)
    for target, layer in zip(targets, layers, strict=True):
        assert torch.equal(target[1], layer[3])
        assert not target[[0, 2, 3, 4]].any()


class Streams:
    """Stands in for torch with CUDA: copies happen at once, and the calls that order them are kept."""

    uint8, frombuffer = torch.uint8, staticmethod(torch.frombuffer)

    def __init__(self) -> None:
        self.cuda = self
        self.calls: list[str] = []

    def current_stream(self, device: torch.device) -> str:
        return f"steps on {device}"

    def Stream(self, device: torch.device) -> Streams:
        return self

    def wait_stream(self, other: str) -> None:
        self.calls.append(f"wait for {other}")

    @contextmanager
    def stream(self, stream: Streams) -> Iterator[None]:
        self.calls.append("copy")
        yield

    def record_event(self) -> Streams:
        self.calls.append("record")
        return self

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty(self, size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return torch.empty(size, dtype=dtype)


@pytest.mark.parametrize(
    ("follows_steps", "at_each_copy"), [(False, []), (True, ["wait for steps on cpu"])], ids=["built-in", "vllm"]
)
def test_copies_of_a_gpu_follow_its_zeros_and_end_before_the_page_is_used(
    follows_steps: bool, at_each_copy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams()
    monkeypatch.setattr(torch, "cuda", streams)
    source, target = kv_memory("cpu"), torch.zeros_like(kv_memory("cpu"))
    pages, targets = (DevicePages([one], follows_steps=follows_steps) for one in (source, target))
    assert streams.calls == ["wait for steps on cpu"] * 2, "the zeros"
    streams.calls.clear()
    pages._torch = targets._torch = streams  # type: ignore[assignment]
    page = pages.page_out(3)
    assert bytes(page) == bytes_of(source, 3)
    entering = targets.page_in(1)
    entering[:] = page
    targets.commit(1, entering)
    assert torch.equal(target[1], source[3])
    assert streams.calls == [*at_each_copy, "copy", "record", "synchronize"] * 2


def test_copies_wait_for_a_step_that_runs_only_where_memory_is_divided_into_layers_as_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams()
    monkeypatch.setattr(torch, "cuda", streams)
    kv = kv_memory("meta")
    waits = []
    for memory in (kv, [kv]):
        pages = make_page_memory(memory)
        assert isinstance(pages, DevicePages)
        pages._torch = streams  # type: ignore[assignment]
        streams.calls.clear()
        pages._copy(())
        waits.append("wait for steps on meta" in streams.calls)
    assert waits == [False, True]


@pytest.mark.parametrize("block_id", [-1, 5])
def test_a_block_that_layers_do_not_have_is_an_error(block_id: int) -> None:
    with pytest.raises(IndexError):
        make_page_memory([torch.zeros(5, 3) for _ in range(2)]).page_out(block_id)
