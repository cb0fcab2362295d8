"""One request as the scheduler sees it: tokens, and how many of them have KV.

There is no phase. Every step closes the gap between `num_computed_tokens` and `num_tokens`; prefill, chunked prefill,
prefix hits, decode and resumption after preemption are all that one subtraction.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from engine.block_hash import extend_block_hashes, root_hash
from engine.messages import EngineRequest, FinishReason


class RequestStatus(enum.Enum):
    """Where a request stands. `waiting → (loading →) running ⇄ preempted → finished`."""

    WAITING = "waiting"
    LOADING = "loading"  # blocks reserved; KV or seed still to come from elsewhere, or KV sought there
    RUNNING = "running"
    PREEMPTED = "preempted"  # blocks given up; computes again from what the prefix cache still has
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """The one mutable record of a request. Owned by the scheduler; others read it."""

    spec: EngineRequest
    arrival: int
    """Ordinal of arrival; first come, first served within a priority."""
    token_ids: list[int]
    """Prompt, then output."""
    num_initial_tokens: int
    """Prompt plus the output that was emitted before this engine had the request: what KV moves between instances."""
    root_hash: bytes
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_recomputed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    seeded: bool = False
    loaded: bool = False
    deadline: float | None = None
    """Monotonic time at which a request that waits for room, KV or seed is given up."""
    arrived_s: float = field(default_factory=time.monotonic)
    queue_s: float | None = None
    """Seconds from arrival until it first ran, for room, KV or seed; None: it has not run yet."""
    finish_reason: FinishReason | None = None

    @classmethod
    def from_spec(cls, spec: EngineRequest, *, arrival: int, fingerprint: str) -> Request:
        """A fresh request. `fingerprint` goes into its block hashes."""
        token_ids = [*spec.prompt_token_ids, *spec.output_token_ids]
        root = root_hash(fingerprint, cache_salt=spec.cache_salt)
        return cls(spec=spec, arrival=arrival, token_ids=token_ids, num_initial_tokens=len(token_ids), root_hash=root)

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those emitted elsewhere included."""
        return len(self.token_ids) - len(self.spec.prompt_token_ids)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts requests: higher priority first, then first come, first served."""
        return (-self.spec.priority, self.arrival)

    @property
    def moves_kv(self) -> bool:
        """KV of this request is written to, or read from, elsewhere: its blocks are all allocated at once and it is
        not preempted."""
        return self.spec.hold_kv is not None or self.awaits_kv

    @property
    def awaits_kv(self) -> bool:
        """Its KV is promised by another instance, and not all that will come has come."""
        return self.spec.remote_kv is not None and not self.loaded

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def runs(self) -> None:
        """It has blocks, KV and seed: from here on steps compute it."""
        self.status = RequestStatus.RUNNING
        if self.queue_s is None:
            self.queue_s = time.monotonic() - self.arrived_s

    def update_block_hashes(self, block_size: int) -> None:
        """Hash the full blocks that have come since the last call."""
        extend_block_hashes(self.block_hashes, self.root_hash, self.token_ids, block_size)
