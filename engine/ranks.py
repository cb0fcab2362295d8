"""How the ranks of one engine exchange tensors while they compute a step.

On CPU the ranks of one host share memory: each writes its tensor into its slot, signals the others by one byte on a
socket, and reads theirs. Sums are added in the order of the ranks, so that their bits depend on nothing else. Compared
with torch.distributed's gloo it needs no port and no threads, its order is fixed for any number of ranks, and a sum of
one row takes a third of the time (docs/decisions/0011). The sockets close with the process that holds them: a rank that
waits for one that has ended gets RankLost at once.

GPUs share no memory: their ranks exchange by torch.distributed, with NCCL. The same code with gloo runs in tests.

        stage 0: rank 0 ◀─ sums ─▶ rank 1          tensor_parallel_size ranks divide each layer
                   │ hidden states   │
        stage 1: rank 2 ◀─ sums ─▶ rank 3          pipeline_parallel_size stages divide the layers
"""

from __future__ import annotations

import datetime
import math
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, Protocol

import torch
import torch.distributed

from engine.errors import EngineError
from engine.partition import Parallelism


class RankLost(EngineError):
    """Another rank has ended: no step can be computed any more."""

    may_pass = True


class RankGroup(Protocol):
    """Ranks that divide the same layers. All call the same methods in the same order with tensors of one dtype."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of `x`, of the same shape everywhere."""

    def columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        """`x` [rows, share of num_columns] of all ranks side by side on the first rank; elsewhere `x` itself."""


class Stages(Protocol):
    """The pipeline stages next to this one. A step's hidden states come from the stage before, which all but the first
    stage have, and go to the stage after, which all but the last have."""

    def receive(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        """What the stage before has sent, [num_rows, num_columns] on this rank's device."""

    def send(self, x: torch.Tensor) -> None:
        """`x` to the stage after. Returns when it has taken `x`, but for what fits into the system's buffers."""


class OneRank:
    """No other ranks."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        del num_columns
        return x


class OneStage:
    """No other stages."""

    def receive(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("the first stage receives nothing")

    def send(self, x: torch.Tensor) -> None:
        raise AssertionError("the last stage sends nothing")


@dataclass(slots=True)
class Ends:
    """One rank's ends of its connections to other ranks."""

    peers: dict[int, socket.socket] = field(default_factory=dict)
    """By tensor rank, within its stage."""
    before: socket.socket | None = None
    """To the same tensor rank of the stage before; None: there is none."""
    after: socket.socket | None = None

    @property
    def sockets(self) -> list[socket.socket]:
        return [*self.peers.values(), *(sock for sock in (self.before, self.after) if sock is not None)]


def connect_all(parallelism: Parallelism) -> list[Ends]:
    """The ends of all ranks, by rank."""
    size, all_ends = parallelism.tensor_parallel_size, [Ends() for _ in range(parallelism.num_ranks)]
    for first in range(0, len(all_ends), size):
        for one, other in combinations(range(size), 2):
            all_ends[first + one].peers[other], all_ends[first + other].peers[one] = socket.socketpair()
    for before, after in zip(all_ends, all_ends[size:], strict=False):
        before.after, after.before = socket.socketpair()
    return all_ends


def close_all(all_ends: Iterable[Ends]) -> None:
    """Idempotent. A socket ends only when no process has it any more."""
    for sock in (sock for ends in all_ends for sock in ends.sockets):
        sock.close()


class SocketStages:
    """The ends of one rank: a stream socket to the same tensor rank of each stage next to it. Used by one thread.

    Bytes alone: both sides know the shape from the step. A stage computes while the next one still receives, so that
    no exchange is needed before the next step.
    """

    def __init__(self, before: socket.socket | None, after: socket.socket | None) -> None:
        """None where there is no such stage."""
        self._before = before
        self._after = after

    def receive(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._before is not None
        x = torch.empty(num_rows, num_columns, dtype=dtype, device="cpu")
        left = _bytes_of(x)
        while left:
            try:
                num_received = self._before.recv_into(left)
            except OSError as error:
                raise _stage_lost("before", str(error)) from error
            if not num_received:
                raise _stage_lost("before")
            left = left[num_received:]
        return x

    def send(self, x: torch.Tensor) -> None:
        assert self._after is not None
        try:
            self._after.sendall(_bytes_of(x.contiguous()))
        except OSError as error:
            raise _stage_lost("after", str(error)) from error


def _bytes_of(x: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    data: memoryview = x.view(torch.uint8).numpy().data
    return data.cast("B")


def _stage_lost(which: str, reason: str = "it has closed the connection") -> RankLost:
    return RankLost(f"the pipeline stage {which} this one has ended: {reason}")


SLOT_BYTES = 1 << 20
"""Of one rank for one exchange. Larger tensors go in pieces."""


class SharedMemoryRanks:
    """The end of one rank. Used by one thread.

        write own slot ─▶ a byte to every other rank ─▶ a byte from every other rank ─▶ read all slots

    Exchanges use two sets of slots in turn: a rank that has begun exchange n has read the slots of n - 2.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], memory: mmap.mmap) -> None:
        """`peers`: a connected socket for every other rank; `memory`: `memory_bytes` shared by all."""
        self._rank = rank
        self._size = len(peers) + 1
        self._peers = peers
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(2, self._size, SLOT_BYTES)
        self._turn = 0

    @staticmethod
    def memory_bytes(num_ranks: int) -> int:
        return 2 * num_ranks * SLOT_BYTES

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1)
        total = torch.empty_like(flat)
        num_elements = SLOT_BYTES // x.element_size()
        for source, target in zip(flat.split(num_elements), total.split(num_elements), strict=True):
            first, second, *others = (_shaped(slot, source, len(source)) for slot in self._exchange(source))
            torch.add(first, second, out=target)
            for other in others:
                target += other
        return total.view(x.shape)

    def columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        widths = _widths(num_columns, self._size)
        num_rows = SLOT_BYTES // (max(widths) * x.element_size())
        whole = x.new_empty(x.shape[0], num_columns if self._rank == 0 else 0)
        for source, target in zip(x.split(num_rows), whole.split(num_rows), strict=True):
            slots = self._exchange(source)
            if self._rank == 0:
                for slot, columns in zip(slots, target.split(widths, dim=1), strict=True):
                    columns.copy_(_shaped(slot, source, *columns.shape))
        return whole if self._rank == 0 else x

    def _exchange(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """The ranks' slots, bytes, valid until the next exchange but one. Sizes may differ."""
        self._turn ^= 1
        slots = self._slots[self._turn]
        _shaped(slots[self._rank], x, *x.shape).copy_(x)
        try:
            for peer in self._peers.values():
                peer.send(b"x")
            for rank, peer in self._peers.items():
                if not peer.recv(1):
                    raise RankLost(f"tensor rank {rank} has ended")
        except OSError as error:
            raise RankLost(f"another rank has ended: {error.strerror}") from error
        return slots.unbind()


def _widths(num_columns: int, size: int) -> list[int]:
    """The columns of each rank (`Part.share`)."""
    return [stop - start for start, stop in pairwise(num_columns * rank // size for rank in range(size + 1))]


def _shaped(slot: torch.Tensor, like: torch.Tensor, *shape: int) -> torch.Tensor:
    """The beginning of a slot as elements of the type of `like`."""
    return slot[: math.prod(shape) * like.element_size()].view(like.dtype).view(shape)


_MEETING_POLL_S = 0.01
_CONNECT_S = 60.0
"""For ranks that have met."""
_OPERATION_S = 3600.0
"""Longer than any step. A rank that ends closes its connections before."""


@dataclass
class ProcessGroup:
    """Some ranks of an engine in torch.distributed. They meet in the inherited file `fd`, which is open as long as the
    process lives, and connect at their first exchange, when all have come to it: none waits in the library for one that
    could not. Used by one thread."""

    name: str
    """Of the group in the file."""
    fd: int
    rank: int
    """In the group."""
    size: int
    device: torch.device
    check: Callable[[], None]
    """Raises RankLost once another rank has ended; called while this one waits for them."""
    _backend: Any = None

    def connect(self) -> Any:
        """NCCL on CUDA, which no GPU has run (docs/gpu.md); gloo on CPU. Both on this host alone. Raises RankLost."""
        distributed: Any = torch.distributed
        file = distributed.FileStore(f"/proc/self/fd/{self.fd}")
        store, timeout = distributed.PrefixStore(self.name, file), datetime.timedelta(seconds=_OPERATION_S)
        self._meet(store)
        if self.device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return distributed.ProcessGroupNCCL(store, self.rank, self.size, options)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = distributed.ProcessGroupGloo(store, self.rank, self.size, datetime.timedelta(seconds=_CONNECT_S))
        backend._set_default_timeout(timeout)
        return backend

    def _meet(self, store: Any) -> None:
        """Until all ranks of the group are here. The library's own wait cannot be ended."""
        store.set(f"here {self.rank}", "")
        while not store.check([f"here {rank}" for rank in range(self.size)]):
            self.check()
            time.sleep(_MEETING_POLL_S)

    def run(self, start: Callable[[Any], Any]) -> None:
        """An exchange: `start` begins it with the backend. Raises RankLost, torch.OutOfMemoryError."""
        try:
            self._backend = self._backend or self.connect()
            start(self._backend).wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RankLost(f"another rank has ended: {str(error).splitlines()[0]}") from error


class DistributedRanks:
    """The end of one rank of `group`, which divide the same layers. The library adds in an order of its own."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self._group.run(lambda backend: backend.allreduce([total]))
        return total

    def columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        widths = _widths(num_columns, self._group.size)
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths]
        self._group.run(lambda backend: backend.allgather([parts], [padded]))
        if self._group.rank:
            return x
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)


class DistributedStages:
    """The end of one rank of `group`, which has all ranks of the engine; `distance`: to that of the next stage."""

    def __init__(self, group: ProcessGroup, distance: int) -> None:
        self._group = group
        self._distance = distance

    def receive(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.empty(num_rows, num_columns, dtype=dtype, device=self._group.device)
        self._group.run(lambda backend: backend.recv([x], self._group.rank - self._distance, 0))
        return x

    def send(self, x: torch.Tensor) -> None:
        self._group.run(lambda backend: backend.send([x.contiguous()], self._group.rank + self._distance, 0))
