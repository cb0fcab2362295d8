"""Records a step on CPU and replays it: its kernels in a few launches instead of some hundreds.

    torch operations ─▶ program of launches ─▶ torch operation ─▶ program … ─▶ the result

Between two launches a model calls torch for memory and views alone, and Python takes as long for that as the kernels of
a small model. A recording keeps what they have to do: the launches with their arguments, which run as one program, and
the torch operations that compute something (the embedding, the angles of RoPE), which are called again. A temporary
keeps its address. Its memory is used again for later temporaries of the step, and by other recordings: one step runs at
a time.

The step must read no number on the host, where nothing sees it: its launches have to be the same in every replay.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.openmp import Launch, LaunchProgram, recording
from engine.attention.openmp_kernels import run_launches_address

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

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
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
    """Calls the operation again, with its result where it was."""
    if func._schema.is_mutable:
        return lambda: func(*args, **kwargs)
    return lambda: result.copy_(func(*args, **kwargs))


class _Temporaries:
    """Memory that is used again as soon as no tensor has it."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of this shape and type."""
        num_bytes = tensor.nbytes
        if not num_bytes:
            return tensor
        free = self._free[num_bytes]
        memory = free.pop() if free else torch.empty(num_bytes, dtype=torch.uint8)
        owner = (ctypes.c_uint8 * num_bytes).from_address(memory.data_ptr())
        weakref.finalize(owner, free.append, memory)  # the tensor's storage keeps its owner
        return torch.frombuffer(owner, dtype=tensor.dtype).view(tensor.shape)
