"""How the ranks of one engine exchange tensors while they compute a step.

On CPU the ranks of one host share memory: each writes its tensor into its slot, signals the others by one byte on a
socket, and reads theirs. Sums are added in the order of the ranks, so that their bits depend on nothing else. Compared
with torch.distributed's gloo it needs no port and no threads, its order is fixed for any number of ranks, and a sum of
one row takes a third of the time (docs/decisions/0011). The sockets close with the process that holds them: a rank that
waits for one that has ended gets RankLost at once.
"""

from __future__ import annotations

import math
import mmap
import socket
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from engine.errors import EngineError


class RankLost(EngineError):
    """Another rank has ended: no step can be computed any more."""


class RankGroup(Protocol):
    """Ranks that divide the same layers. All call the same methods in the same order with tensors of one dtype."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of `x`, of the same shape everywhere."""

    def columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        """`x` [rows, share of num_columns] of all ranks side by side on the first rank; elsewhere `x` itself."""


class OneRank:
    """No other ranks."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        del num_columns
        return x


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
        starts = [num_columns * rank // self._size for rank in range(self._size + 1)]
        widths = [stop - start for start, stop in pairwise(starts)]
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
                    raise RankLost(f"rank {rank} has ended")
        except OSError as error:
            raise RankLost(f"another rank has ended: {error.strerror}") from error
        return slots.unbind()


def _shaped(slot: torch.Tensor, like: torch.Tensor, *shape: int) -> torch.Tensor:
    """The beginning of a slot as elements of the type of `like`."""
    return slot[: math.prod(shape) * like.element_size()].view(like.dtype).view(shape)
