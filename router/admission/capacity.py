"""What the pools can carry, from what their instances say of themselves, and how much of it this router may use.

Pure: two snapshots in, a `Capacity` out; a `Capacity` and the settings in, `Limits` out. What an instance does not tell
bounds nothing. Instances come and go and the limits follow with the next look.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.config import AdmissionSettings
from router.pools.instances import InstanceView

_WINDOW_S = 1.0
_LEAST_OF_BLOCKS = 0.5


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the ready instances of both pools have. None: at least one of them does not tell."""

    num_instances: int = 0
    """Decode instances that may be picked."""
    num_sequences: int | None = None
    """Choices that the decode instances run at one time."""
    num_blocks: int | None = None
    """KV blocks of the decode instances."""
    block_size: int = 1
    """Tokens in a block."""
    num_batched_tokens: int | None = None
    """Prompt tokens that the instances which prefill compute in one step."""
    used_sequences: int = 0
    """Choices at the decode instances, whoever sent them."""
    used_blocks: int = 0
    """Blocks of the decode instances that are in use."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """What the instances report beyond what this router has there."""

    num_sequences: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What this router may have in flight."""

    num_requests: float = math.inf
    num_tokens: float = math.inf
    num_sequences: float = math.inf
    num_blocks: float = math.inf
    num_prefill_tokens: float = math.inf
    """Prompt tokens without a first token yet; another prompt may begin while there are fewer."""


def capacity_of(decode: Sequence[InstanceView], prefill: Sequence[InstanceView]) -> Capacity:
    """Sums over the instances that may be picked. Without prefill instances the decode instances prefill."""
    ready = [view for view in decode if view.out is None]
    prefilling = [view for view in prefill if view.out is None] or ready
    num_blocks = _told(view.info.num_blocks for view in ready)
    return Capacity(
        num_instances=len(ready),
        num_sequences=_told(view.info.max_num_seqs for view in ready),
        num_blocks=num_blocks,
        block_size=max((view.info.identity.block_size for view in ready), default=0) or 1,
        num_batched_tokens=_told(view.info.max_num_batched_tokens for view in prefilling),
        used_sequences=sum(map(_num_sequences, ready)),
        used_blocks=sum(view.info.num_blocks - view.load.free_blocks - view.load.cached_blocks for view in ready),
    )


def limits_of(capacity: Capacity, foreign: Foreign, settings: AdmissionSettings) -> Limits:
    """What one of `settings.num_routers` routers may use of `capacity`.

    Each is sure of its equal part of the sequences and takes what the others leave. Of the blocks it is sure of half
    its part: use beyond what was expected may be its own.
    """
    sequences = _times(settings.sequence_fraction, capacity.num_sequences)
    blocks = _times(settings.block_fraction, capacity.num_blocks)
    part = 1 / settings.num_routers
    return Limits(
        num_requests=settings.max_requests,
        num_tokens=settings.max_tokens,
        num_sequences=max(sequences - foreign.num_sequences, sequences * part),
        num_blocks=max(blocks - foreign.num_blocks, blocks * part * _LEAST_OF_BLOCKS),
        num_prefill_tokens=_times(settings.prefill_steps * part, capacity.num_batched_tokens),
    )


class ForeignLoad:
    """What others use, as far as it lasted: the least of the last second, since a report is always a little old."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Foreign]] = deque()

    def observe(self, capacity: Capacity, num_own_sequences: int, num_own_blocks: int, now_s: float) -> Foreign:
        """Sets a look at the instances against what this router has in flight."""
        num_sequences = max(capacity.used_sequences - num_own_sequences, 0)
        num_blocks = max(capacity.used_blocks - num_own_blocks, 0)
        while self._seen and now_s - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        is_new = not self._seen
        self._seen.append((now_s, Foreign(num_sequences, num_blocks)))
        if is_new:
            return Foreign()
        seen = [foreign for _, foreign in self._seen]
        return Foreign(min(one.num_sequences for one in seen), min(one.num_blocks for one in seen))


def _num_sequences(view: InstanceView) -> int:
    """At one instance now: its last report, corrected by what this router has sent and seen end since."""
    load = view.load
    running = max(load.num_running + load.num_loading - view.num_ended, 0)
    return load.num_waiting + view.num_unreported + running


def _told(values: Iterable[int]) -> int | None:
    """The sum, None where somebody says nothing."""
    listed = list(values)
    return sum(listed) if listed and all(listed) else None


def _times(factor: float, amount: int | None) -> float:
    return math.inf if amount is None else factor * amount
