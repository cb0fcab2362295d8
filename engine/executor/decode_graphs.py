"""Recorded decode steps: a step of single tokens is replayed with one launch instead of some hundreds.

    step of b single tokens ─▶ the least size n >= b ─▶ inputs copied to n fixed rows ─▶ replay ─▶ first b rows
                              (recorded once it is often used)   (the last token repeated)

A repeated token computes and writes what the token itself does, so no block is reserved for it. Other steps run as they
are. On a GPU a recording is a CUDA graph, and all are made before the first request. On CPU it is `LaunchRecorder`'s:

    torch operations ─▶ program of launches ─▶ torch operation ─▶ program … ─▶ the result

Between two launches a model calls torch for memory and views alone, and Python takes as long for that as the kernels of
a small model. A recording keeps what they have to do: the launches with their arguments, which run as one program, and
the torch operations that compute something (the embedding, the angles of RoPE), which are called again. A temporary
keeps its address. Its memory is used again for later temporaries of the step, and by other recordings, of other numbers
of rows too: one step runs at a time. The results of torch operations keep memory of their own in each recording.

The step must read no number on the host, where nothing sees it: its launches have to be the same in every replay.
"""

from __future__ import annotations

import bisect
import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention import AttentionMetadata
from engine.attention.openmp import Launch, LaunchProgram, recording, run_launches_address
from engine.models import Decoder, LastTokens

Step = Callable[[], torch.Tensor]
Capture = Callable[[Step], tuple[Callable[[], object], torch.Tensor]]
"""Records a step: what replays it, and the tensor that has its result after each replay."""


class CudaGraphCapture:
    """A `Capture` for steps on a GPU. Its graphs share the memory of their temporaries: one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # one: cuBLAS keeps a workspace for each stream that it has seen

    def __call__(self, step: Step) -> tuple[Callable[[], object], torch.Tensor]:
        """The step first runs once: what it compiles and allocates at its first call is no part of the graph."""
        current, side = torch.cuda.current_stream(), self._stream
        side.wait_stream(current)
        with torch.cuda.stream(side):
            step()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Threads of a connector may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = step()
        return graph.replay, result


_Inputs = tuple[torch.Tensor, ...]
"""Token ids, positions, slots, lengths, block tables and, with LoRA, adapters: a row for each request."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """One size: its inputs at fixed addresses, and what replays them."""

    inputs: _Inputs
    replay: Callable[[], object]
    hidden: torch.Tensor


def capture_sizes(most: int) -> list[int]:
    """Up to `most`, and that itself: few, since a capture takes time, but close to each other, since repeated rows take
    time in each step."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 3))
    return [*sizes, most]


class GraphedDecoder:
    """A decoder whose steps of single tokens are captured. For models that read nothing on the host in a forward."""

    def __init__(
        self,
        model: Decoder,
        capture: Capture,
        *,
        sizes: Sequence[int],
        max_blocks: int,
        num_uncaptured: int = 0,
        records_adapters: bool = False,
    ) -> None:
        """`sizes`: numbers of tokens, ascending; `max_blocks`: of one request; `num_uncaptured`: steps of each size
        before it is worth a capture; `records_adapters`: steps with adapters are captured too."""
        self.attention_name = model.attention_name
        self._model = model
        self._capture = capture
        self._sizes = sizes
        self._max_blocks = max_blocks
        self._records_adapters = records_adapters
        self._num_uncaptured = {(size, adapts): num_uncaptured for size in sizes for adapts in (False, True)}
        self._inputs: _Inputs | None = None
        self._starts: torch.Tensor
        """Of one token each. Graphs read it for as long as they are replayed."""
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        """By size, and whether with adapters."""

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        needed: LastTokens | None = None,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`. `kv_cache` is the same in every call; a step of single tokens is computed whole."""
        num_tokens, adapts = len(token_ids), adapters is not None
        is_captured = metadata.max_query_len == 1 and num_tokens <= self._sizes[-1]
        if not is_captured or (adapts and not self._records_adapters):
            return self._model.forward(token_ids, positions, kv_cache, metadata, needed, adapters)
        key = self._sizes[bisect.bisect_left(self._sizes, num_tokens)], adapts
        if self._num_uncaptured[key]:
            self._num_uncaptured[key] -= 1
            return self._model.forward(token_ids, positions, kv_cache, metadata, needed, adapters)
        given: _Inputs = (token_ids, positions, metadata.slot_mapping, metadata.seq_lens, metadata.block_tables)
        given += () if adapters is None else (adapters,)
        graph = self._graphs.get(key)
        if graph is None:
            inputs = tuple(rows[: key[0]] for rows in self._rows(given)[: len(given)])
            graph = self._graphs[key] = self._captured(inputs, given, kv_cache)
        else:
            _fill(graph.inputs, given)
        graph.replay()
        return graph.hidden[:num_tokens].clone()  # the next replay overwrites it

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.compute_logits`."""
        return self._model.compute_logits(hidden)

    def _rows(self, given: _Inputs) -> _Inputs:
        """The rows of the inputs of all graphs."""
        if self._inputs is None:
            largest = self._sizes[-1]
            token_ids, positions, slots, seq_lens, tables = given[:5]
            by_row = (one.new_zeros(largest) for one in (token_ids, positions, slots, seq_lens))
            self._inputs = (*by_row, tables.new_zeros((largest, self._max_blocks)), token_ids.new_zeros(largest))
            self._starts = torch.arange(largest + 1, dtype=torch.int32, device=tables.device)
        return self._inputs

    def _captured(self, inputs: _Inputs, given: _Inputs, kv_cache: torch.Tensor) -> _Graph:
        _fill(inputs, given)
        token_ids, positions, slots, seq_lens, tables, *adapters = inputs
        starts = self._starts[: len(token_ids) + 1]
        max_seq_len = self._max_blocks * kv_cache.shape[4]

        def step() -> torch.Tensor:
            # New for each call: a backend keeps what it has made of an object that it knows.
            metadata = AttentionMetadata(starts, seq_lens, tables, slots, 1, max_seq_len)
            return self._model.forward(token_ids, positions, kv_cache, metadata, None, *adapters)

        replay, hidden = self._capture(step)
        return _Graph(inputs, replay, hidden)


def _fill(inputs: _Inputs, given: _Inputs) -> None:
    """The given rows, and the last one again in the rows that are left. Block tables may be narrower."""
    for target, source in zip(inputs, given, strict=True):
        rows = target[:, : source.shape[1]] if source.dim() > 1 else target
        rows[: len(source)].copy_(source)
        if len(source) < len(rows):
            rows[len(source) :] = source[-1]


# Recordings on CPU


_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}


class LaunchRecorder:
    """A `Capture` for steps on CPU. Its recordings share the memory of their temporaries."""

    def __init__(self) -> None:
        self._temporaries = _Temporaries()
        run_launches_address()  # compiled now, not while streams wait for their next token

    def __call__(self, step: Step) -> tuple[Callable[[], object], torch.Tensor]:
        """Records `step`; what it computes meanwhile is undefined."""
        recorded = _Recorded(self._temporaries)
        with recording(recorded.launches), recorded:
            result = step()
        recorded.end_program()

        def replay() -> None:
            for action in recorded.actions:
                action()

        return replay, result


class _Recorded(TorchDispatchMode):
    """Sees the torch operations of a step, and in `launches` the kernels launched since the last one."""

    def __init__(self, temporaries: _Temporaries) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._temporaries = temporaries
        self.launches: list[Launch] = []
        self.actions: list[Callable[[], object]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, to leave this class out, while a stream waits for a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return self._temporaries.empty_like(result)
        if not _is_view(func, (*args, *kwargs.values()), result):
            self.end_program()
            self.actions.append(_again(func, args, kwargs, result))
        return result

    def end_program(self) -> None:
        """The launches so far run before whatever follows."""
        if self.launches:
            self.actions.append(LaunchProgram(self.launches).run)
            self.launches.clear()


def _is_view(func: Any, inputs: tuple[Any, ...], result: Any) -> bool:
    """Whether the operation has computed nothing. Its schema does not say so: `to` may copy."""
    if func._schema.is_mutable:
        return False
    one = result[0] if isinstance(result, list | tuple) else result
    # oneDNN's packed weights have another layout, and no address.
    tensors = [given for given in inputs if isinstance(given, torch.Tensor) and given.layout == torch.strided]
    return any(given.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for given in tensors)


def _again(func: Any, args: Any, kwargs: Any, result: Any) -> Callable[[], object]:
    """Calls the operation again, with its result, or its several results, where they were."""
    if func._schema.is_mutable:
        return lambda: func(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return lambda: result.copy_(func(*args, **kwargs))
    return lambda: [one.copy_(now) for one, now in zip(result, func(*args, **kwargs), strict=True)]


class _Temporaries:
    """Memory that is used again as soon as no tensor has it."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of this shape and type."""
        num_bytes = tensor.nbytes
        if not num_bytes:
            return tensor
        size = 1 << (num_bytes - 1).bit_length()  # steps of other numbers of rows share the memory
        free = self._free[size]
        memory = free.pop() if free else torch.empty(size, dtype=torch.uint8, device="cpu")
        owner = (ctypes.c_uint8 * num_bytes).from_address(memory.data_ptr())
        weakref.finalize(owner, free.append, memory)  # the tensor's storage keeps its owner
        return torch.frombuffer(owner, dtype=tensor.dtype).view(tensor.shape)
