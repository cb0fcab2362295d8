"""KV memory as bytes, page by page, for threads that read and write pages outside the step loop.

On a CPU a page is a view of the KV memory: nothing is copied. On a GPU it is copied through host memory, on a stream of
its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


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
        self._num_blocks, self._page_bytes = pages.shape
        self._bytes = pages.view(-1).numpy().data

    def page_out(self, block_id: int) -> memoryview:
        return self._page(block_id).toreadonly()

    def page_in(self, block_id: int) -> memoryview:
        return self._page(block_id)

    def commit(self, block_id: int, page: memoryview) -> None:
        del block_id, page

    def _page(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"block {block_id} of {self._num_blocks}")
        return self._bytes[block_id * self._page_bytes : (block_id + 1) * self._page_bytes]


class DevicePages:
    """Pages of a KV memory on a GPU. A block is read only after the step that wrote it has ended on the host."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        import torch

        self._torch = torch
        self._pages = _as_bytes(kv_cache)
        self._stream = torch.cuda.Stream(kv_cache.device)

    def page_out(self, block_id: int) -> memoryview:
        host = self._staging()
        self._copy(host, self._pages[block_id])
        return host.numpy().data

    def page_in(self, block_id: int) -> memoryview:
        del block_id
        return self._staging().numpy().data

    def commit(self, block_id: int, page: memoryview) -> None:
        self._copy(self._pages[block_id], self._torch.frombuffer(page, dtype=self._torch.uint8))

    def _staging(self) -> torch.Tensor:
        return self._torch.empty(self._pages.shape[1], dtype=self._torch.uint8, pin_memory=True)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()


def make_page_memory(kv_cache: torch.Tensor) -> PageMemory:
    """Pages of a contiguous KV memory on a CPU or GPU."""
    return HostPages(kv_cache) if kv_cache.device.type == "cpu" else DevicePages(kv_cache)


def write_page(memory: PageMemory, block_id: int, content: bytes | bytearray) -> None:
    page = memory.page_in(block_id)
    page[:] = content
    memory.commit(block_id, page)


def _as_bytes(kv_cache: torch.Tensor) -> torch.Tensor:
    """[num_blocks, bytes per page] over the same memory."""
    import torch

    if not kv_cache.is_contiguous():
        raise ValueError("the KV memory is not contiguous")
    return kv_cache.view(kv_cache.shape[0], -1).view(torch.uint8)
