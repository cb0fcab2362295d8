"""KV memory as bytes, page by page, for threads that read and write pages outside the step loop.

On a CPU a page of a single array is a view of the KV memory: nothing is copied. From one array for each layer, even if
there is only one, its spans are gathered into memory of its own, and scattered again. On a GPU it is copied through
host memory, on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from engine.kv_connector import KVMemory


class PageMemory(Protocol):
    """Thread-safe for different blocks."""

    def page_out(self, block_id: int) -> memoryview:
        """The bytes of a block that is not being written."""

    def page_in(self, block_id: int) -> memoryview:
        """Memory for a block's new bytes; the block must not be used until `commit` has returned."""

    def commit(self, block_id: int, page: memoryview) -> None:
        """Make the bytes in `page`, from `page_in`, the block's."""


class HostPages:
    """Pages of a KV memory [num_blocks, *page_shape] on the CPU."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        pages = _as_bytes(kv_cache)
        self._num_blocks, self.page_bytes = pages.shape
        self._bytes = pages.view(-1).numpy().data

    def page_out(self, block_id: int) -> memoryview:
        return self.page_in(block_id).toreadonly()

    def page_in(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"block {block_id} of {self._num_blocks}")
        return self._bytes[block_id * self.page_bytes : (block_id + 1) * self.page_bytes]

    def commit(self, block_id: int, page: memoryview) -> None:
        del block_id, page


class LayeredHostPages:
    """Pages of a KV memory on the CPU with one array for each layer."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = [HostPages(layer) for layer in layers]
        self._bounds = _bounds([layer.page_bytes for layer in self._layers])

    def page_out(self, block_id: int) -> memoryview:
        page = memoryview(bytearray(self._bounds[-1][1]))
        for layer, (start, end) in zip(self._layers, self._bounds, strict=True):
            page[start:end] = layer.page_out(block_id)
        return page

    def page_in(self, block_id: int) -> memoryview:
        del block_id
        return memoryview(bytearray(self._bounds[-1][1]))

    def commit(self, block_id: int, page: memoryview) -> None:
        for layer, (start, end) in zip(self._layers, self._bounds, strict=True):
            layer.page_in(block_id)[:] = page[start:end]


class DevicePages:
    """Pages of a KV memory on a GPU, copied while steps run. The engine core waits for the end of a step before its
    blocks are announced or freed: no step that has been given to the device writes a block that is copied, or reads one
    that is loaded. Only the memory's zeros may still be on their way.

    Made on the model's thread: its current stream is the model's, which in vLLM is not the default one.

    With `follows_steps` a copy follows all steps that the model's stream has been given until then: the caller may have
    one in flight over blocks that it has freed."""

    def __init__(self, layers: Sequence[torch.Tensor], *, follows_steps: bool) -> None:
        import torch

        self._torch = torch
        self._layers = [_as_bytes(layer) for layer in layers]
        self._bounds = _bounds([layer.shape[1] for layer in self._layers])
        self._steps = torch.cuda.current_stream(layers[0].device)
        self._stream = torch.cuda.Stream(layers[0].device)
        self._stream.wait_stream(self._steps)
        self._follows_steps = follows_steps

    def page_out(self, block_id: int) -> memoryview:
        host = self._staging()
        self._copy((host[start:end], layer[block_id]) for layer, (start, end) in self._spans())
        return host.numpy().data

    def page_in(self, block_id: int) -> memoryview:
        del block_id
        return self._staging().numpy().data

    def commit(self, block_id: int, page: memoryview) -> None:
        host = self._torch.frombuffer(page, dtype=self._torch.uint8)
        self._copy((layer[block_id], host[start:end]) for layer, (start, end) in self._spans())

    def _spans(self) -> Iterator[tuple[torch.Tensor, tuple[int, int]]]:
        return zip(self._layers, self._bounds, strict=True)

    def _staging(self) -> torch.Tensor:
        return self._torch.empty(self._bounds[-1][1], dtype=self._torch.uint8, pin_memory=True)

    def _copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self._follows_steps:
            self._stream.wait_stream(self._steps)
        with self._torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()


def layers_of(kv_cache: KVMemory) -> Sequence[torch.Tensor]:
    """The arrays of a KV memory, on one device."""
    return kv_cache if isinstance(kv_cache, Sequence) else [kv_cache]


def make_page_memory(kv_cache: KVMemory) -> PageMemory:
    """Pages of a KV memory on a CPU or GPU, each array of which is contiguous. Several arrays are vLLM's, whose worker
    may begin a step before the last one has ended."""
    layers = layers_of(kv_cache)
    if layers[0].device.type != "cpu":
        return DevicePages(layers, follows_steps=isinstance(kv_cache, Sequence))
    return LayeredHostPages(layers) if isinstance(kv_cache, Sequence) else HostPages(kv_cache)


def write_page(memory: PageMemory, block_id: int, content: bytes | bytearray) -> None:
    page = memory.page_in(block_id)
    page[:] = content
    memory.commit(block_id, page)


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each span begins and ends in a page."""
    return list(pairwise(accumulate(sizes, initial=0)))


def _as_bytes(kv_cache: torch.Tensor) -> torch.Tensor:
    """[num_blocks, bytes per page] over the same memory."""
    import torch

    if not kv_cache.is_contiguous():
        raise ValueError("the KV memory is not contiguous")
    return kv_cache.view(kv_cache.shape[0], -1).view(torch.uint8)
