"""The executor's interface, and the executor of one process."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from engine.config import Device, EngineConfig
from engine.errors import CapacityError, DeviceUnavailable, EngineError
from engine.executor.decode_graphs import CudaGraphCapture, GraphedDecoder, LaunchRecorder, capture_sizes
from engine.executor.step import Int64, StepInputs
from engine.kv_layout import KVLayout
from engine.machine import available_bytes, free_host_memory_for_kv
from engine.models import Decoder, load_model
from engine.models.config import DecoderConfig, ModelConfig
from engine.models.elementwise import CompiledElementwise, elementwise_for
from engine.models.linear import are_kernels
from engine.models.llama import LlamaModel


class Executor(Protocol):
    """Runs the model. One call at a time; `check` and `shutdown` between steps."""

    attention_name: str
    warm_up_sizes: Sequence[int]
    """Numbers of requests whose decode steps have to run once before the first request, the largest first."""

    def free_for_kv(self, layout: KVLayout, max_model_len: int) -> int:
        """Bytes that KV may take where its size is not given. Raises CapacityError."""

    def allocate_kv(self, layout: KVLayout, num_blocks: int) -> torch.Tensor:
        """The KV memory [num_blocks, *layout.page_shape], zeros; called once, before the first step. Its pages hold
        all layers and heads, however they are divided among ranks. Raises CapacityError."""

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """One step on all ranks: the final hidden states [num_tokens, hidden_size]."""

    def compute_logits(self, hidden: torch.Tensor, rows: Int64) -> torch.Tensor:
        """float32 [len(rows), vocab_size] of rows of the last step's `hidden`."""

    def check(self) -> None:
        """Raises RankLost if a rank has ended."""

    def shutdown(self) -> None:
        """End the other ranks. Idempotent."""


class OneProcessExecutor:
    """One rank, in the core's process."""

    def __init__(self, config: EngineConfig, model_config: DecoderConfig) -> None:
        """Loads the model. Raises InvalidCheckpoint, UnsupportedModel."""
        self._config = config
        self._device = torch.device(config.device)
        self._dtype = getattr(torch, model_config.resolve_dtype(config.dtype))
        self._model: Decoder = load_model(model_config, config)
        self._kv_cache: torch.Tensor
        self.attention_name = self._model.attention_name
        self._uses_graphs = self.uses_graphs(config, model_config, self.attention_name)
        longest = min(config.max_model_len or model_config.max_model_len, model_config.max_model_len)
        self._max_blocks = -(-longest // config.block_size)
        is_captured = self._uses_graphs and self._device.type != "cpu"
        self.warm_up_sizes: Sequence[int] = capture_sizes(config.max_num_seqs)[::-1] if is_captured else ()

    @staticmethod
    def uses_graphs(config: EngineConfig, model_config: DecoderConfig, attention_name: str) -> bool:
        """Where a forward of single tokens reads nothing on the host: not with the reference, in the transformers
        backend, which is not known, or with experts on a GPU, whose numbers of tokens are read. On CPU it is worth it
        where the layers are kernels of our own: a recording keeps the memory of torch's operations."""
        if not isinstance(model_config, ModelConfig):
            return False
        if config.device == "cpu":
            dtype = getattr(torch, model_config.resolve_dtype(config.dtype))
            row_sizes = (model_config.hidden_size, *model_config.intermediate_sizes)
            elementwise = elementwise_for(
                torch.device("cpu"), dtype, row_sizes=row_sizes, head_dim=model_config.head_dim
            )
            is_ours = isinstance(elementwise, CompiledElementwise) and are_kernels(dtype, config.quantization)
            return is_ours and attention_name == "cpu"
        return model_config.experts is None and attention_name in ("triton", "flash") and not config.enforce_eager

    def free_for_kv(self, layout: KVLayout, max_model_len: int) -> int:
        if self._device.type == "cpu":
            return free_host_memory_for_kv()
        step = partial(self.compute_largest_step, layout, max_model_len)
        return bytes_for_kv(torch.cuda, self._config.gpu_memory_utilization, step)

    def compute_largest_step(self, layout: KVLayout, max_model_len: int) -> torch.Tensor:
        """Logits of the largest step of prompts that the settings allow. All have their KV in one block: the pages of a
        real step are in the KV memory that this step is to find the size of. All tokens have the first adapter, if
        there is one."""
        config, longest = self._config, max(1, min(max_model_len, self._config.max_num_batched_tokens))
        num_whole, rest = divmod(config.max_num_batched_tokens, longest)
        lens = [*[longest] * num_whole, *([rest] if rest else [])][: config.max_num_seqs]
        token_ids, starts = np.zeros(sum(lens), np.int64), np.zeros(len(lens), np.int64)
        block_tables = np.zeros((len(lens), -(-longest // layout.block_size)), np.int32)
        inputs = StepInputs.of(token_ids, starts, np.array(lens), block_tables, layout.block_size)
        kv_cache = torch.zeros((1, *layout.page_shape), dtype=self._dtype, device=self._device)
        ids, positions, metadata = inputs.tensors(self._device)
        adapters = torch.zeros_like(ids) if config.lora_adapters else None
        hidden = self._model.forward(ids, positions, kv_cache, metadata, None, adapters)
        return self.compute_logits(hidden, np.arange(min(config.max_num_seqs, len(positions))))

    def allocate_kv(self, layout: KVLayout, num_blocks: int) -> torch.Tensor:
        self._kv_cache = zeroed_memory((num_blocks, *layout.page_shape), self._dtype, self._device)
        if self._uses_graphs:
            # Kernels have room for the longest request: of a long context much more than the KV that there is.
            self._model = self._with_graphs(self._model, min(self._max_blocks, num_blocks))
        return self._kv_cache

    def _with_graphs(self, model: Decoder, max_blocks: int) -> GraphedDecoder:
        if self._device.type != "cpu":
            return GraphedDecoder(model, CudaGraphCapture(), sizes=self.warm_up_sizes[::-1], max_blocks=max_blocks)
        # Each row takes time there, and a recording that of some ten steps of a small model.
        sizes = range(1, self._config.max_num_seqs + 1)
        return GraphedDecoder(
            model,
            LaunchRecorder(),
            sizes=sizes,
            max_blocks=max_blocks,
            num_uncaptured=10,
            records_adapters=isinstance(model, LlamaModel) and model.records_adapters,
        )

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        token_ids, positions, metadata = inputs.tensors(self._device)
        needed, adapters = inputs.last_tokens(metadata), inputs.token_adapters(self._device)
        return self._model.forward(token_ids, positions, self._kv_cache, metadata, needed, adapters)

    def compute_logits(self, hidden: torch.Tensor, rows: Int64) -> torch.Tensor:
        return self._model.compute_logits(hidden[torch.from_numpy(rows).to(self._device)])

    def check(self) -> None:
        return None

    def shutdown(self) -> None:
        return None


class DeviceMemory(Protocol):
    """The functions of `torch.cuda` that `bytes_for_kv` calls."""

    def mem_get_info(self) -> tuple[int, int]:
        """Bytes free and in all, for every process on the device."""

    def empty_cache(self) -> None: ...
    def reset_peak_memory_stats(self) -> None: ...
    def max_memory_allocated(self) -> int: ...
    def memory_allocated(self) -> int: ...


def bytes_for_kv(device: DeviceMemory, utilization: float, largest_step: Callable[[], object]) -> int:
    """What the engine's part of a GPU's memory leaves beside weights and the largest step of prompts. `utilization`:
    the part for this engine and all that is there already; the rest is for CUDA graphs and what decoding takes beyond
    such a step.

    Raises CapacityError where weights and a step need all of it."""
    device.empty_cache()
    device.reset_peak_memory_stats()
    largest_step()
    for_steps = device.max_memory_allocated() - device.memory_allocated()
    device.empty_cache()  # what the step has left in torch's cache is free
    free, total = device.mem_get_info()
    left = int(total * utilization) - (total - free) - for_steps
    if left <= 0:
        raise CapacityError(
            f"the GPU has no memory for KV: of {total} bytes {utilization:.0%} may be used, {total - free} are used "
            f"and a step needs {for_steps}; raise gpu_memory_utilization, or lower max_num_batched_tokens"
        )
    return left


def check_gpu(device: Device) -> None:
    """Raises EngineError where torch has no CUDA, DeviceUnavailable where it cannot use this thread's GPU."""
    if device != "cuda":
        return
    try:
        torch.cuda.init()
        torch.empty(1, device="cuda")  # a GPU that another process has for itself is found only here
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError) as error:  # AssertionError: a torch for CPUs
        kind = EngineError if isinstance(error, AssertionError) else DeviceUnavailable
        first = str(error).partition("\n")[0].rstrip(". ")
        raise kind(
            f"engine.device is cuda: torch cannot use a GPU: {first}; it needs a torch for CUDA (this is "
            f"{torch.__version__}), a driver for its version and a free GPU: `nvidia-smi` shows driver and processes; "
            "without a GPU set engine.device (--device) to cpu"
        ) from None


@contextlib.contextmanager
def explained_out_of_memory() -> Iterator[None]:
    """Raises CapacityError where a GPU has no memory left, for weights, the largest step or CUDA graphs."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = ". ".join(str(error).split(". ")[:2])  # that it is out of memory, and how much was wanted
        raise CapacityError(
            f"the GPU has no memory left: {first}; take a smaller model, lower max_num_batched_tokens or max_num_seqs, "
            "or end what else uses this GPU"
        ) from None


def are_finite(kv_cache: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
    """Whether keys and values in these full blocks, one at least, are finite: a bool on their device.

    By those of the last layer. Values of a token that are not finite in an earlier one make its hidden state so, which
    the residual carries on; also that of tokens before it in the step, since a weight of 0 does not remove them. A
    minimum and a maximum are NaN where one number is, and take a hundredth of the time of `isfinite`."""
    pages = kv_cache[:, -1].index_select(0, torch.tensor(block_ids, device=kv_cache.device))
    least, greatest = pages.aminmax()
    return least.isfinite() & greatest.isfinite()


def zeroed_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On CPU the system zeroes each page at its first touch: writing 2 GiB here would take seconds. Large pages,
    where the system has them, make decoding of long contexts 3 % faster."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu":
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            raise no_kv_memory(num_bytes, torch.cuda.mem_get_info(device)[0]) from None
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise no_kv_memory(num_bytes, available_bytes()) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def no_kv_memory(num_bytes: int, num_free: int) -> CapacityError:
    """The error for KV memory of this size."""
    return CapacityError(
        f"cannot allocate {num_bytes / 2**30:.1f} GiB of KV memory: {num_free / 2**30:.1f} GiB free; "
        "lower kv_cache_bytes or num_blocks"
    )
