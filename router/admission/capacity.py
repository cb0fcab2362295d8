"""The capacity of the pools, the part of it that this router may use, and what its requests in flight use of it.

    views of both pools ──capacity_of──▶ Capacity ──limits_of──▶ Limits ──Usage.exceeded_limit──▶ admitted or not

An amount that an instance does not report limits nothing. Instances come and go, and the limits follow with the next
snapshot. A request is charged what it is expected to use, not the most that it may (OutputLengths in controller.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.admission.settings import AdmissionSettings
from router.pools.instance_info import InstanceView, Role
from router.request.generation_request import GenerationRequest

_WINDOW_S = 1.0
_GUARANTEED_PART_OF_BLOCKS = 0.5


@dataclass(frozen=True, slots=True)
class Capacity:
    """The totals of the ready instances. None: at least one of them does not report the amount."""

    num_instances: int = 0
    """Decode instances that may be picked."""
    num_sequences: int | None = None
    """Choices that the decode instances run at one time."""
    num_blocks: int | None = None
    """KV blocks of the decode instances."""
    block_size: int = 1
    """Tokens in a block."""
    num_batched_tokens: int | None = None
    """Prompt tokens that the prefilling instances compute in one step."""
    used_sequences: int = 0
    """Choices at the decode instances, of all routers."""
    used_blocks: int = 0
    """Blocks of the decode instances in use."""
    prefilled_by: Role = "decode"
    """The pool whose instances compute the prompts."""
    puts_late_last: bool = False
    """Those instances all compute prompts that miss their TTFT behind the others. They report what steps cost, by which
    they know them."""
    used_prefill_tokens: int = 0
    """Prompt tokens that the prefilling instances have yet to compute, of all routers. This router's own that no report
    counts yet are left out where it may not count them itself, since they are overdue."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What this router may have in flight."""

    num_requests: float = math.inf
    num_tokens: float = math.inf
    num_sequences: float = math.inf
    num_blocks: float = math.inf
    num_prefill_tokens: float = math.inf
    """Prompt tokens without a first token yet; another prompt may begin while there are fewer."""
    prefilled_by: Role = "decode"
    """The pool that computes these prompts."""


def capacity_of(decode: Sequence[InstanceView], prefill: Sequence[InstanceView]) -> Capacity:
    """Sums over the instances that may be picked. Without prefill instances the decode instances prefill."""
    ready = [view for view in decode if view.out is None]
    ready_prefill = [view for view in prefill if view.out is None]
    prefilling = ready_prefill or ready
    puts_late_last = bool(prefilling) and all(view.load.step_cost is not None for view in prefilling)
    num_to_prefill = sum(map(_num_to_prefill, prefilling))
    if not puts_late_last:
        num_to_prefill += sum(view.num_unreported_to_prefill for view in prefilling)
    return Capacity(
        num_instances=len(ready),
        num_sequences=_total(view.info.max_num_seqs for view in ready),
        num_blocks=_total(view.info.num_blocks for view in ready),
        block_size=max((view.info.identity.block_size for view in ready), default=0) or 1,
        num_batched_tokens=_total(view.info.max_num_batched_tokens for view in prefilling),
        used_sequences=sum(view.num_requests for view in ready),
        used_blocks=sum(view.num_used_blocks for view in ready),
        used_prefill_tokens=num_to_prefill,
        prefilled_by="prefill" if ready_prefill else "decode",
        puts_late_last=puts_late_last,
    )


def _num_to_prefill(view: InstanceView) -> int:
    """Prompt tokens that the instance reports to have yet to compute, without those of late prompts where it puts these
    last."""
    load = view.load
    num_waiting = 0 if load.step_cost is not None else load.num_waiting_tokens  # vLLM's report no uncomputed ones
    return max(load.num_uncomputed_tokens, num_waiting)


def limits_of(capacity: Capacity, external: Usage, settings: AdmissionSettings, num_routers: int = 1) -> Limits:
    """What one of `num_routers` routers may use of `capacity`; `external`: what others use.

    Each is guaranteed its equal part of the sequences and of the prompts, and takes what the others leave. Of the
    blocks it is guaranteed half its part: use beyond what was expected may be its own.
    """
    sequences = _times(settings.sequence_fraction, capacity.num_sequences)
    blocks = _times(settings.block_fraction, capacity.num_blocks)
    prefill_tokens = _times(settings.prefill_steps, capacity.num_batched_tokens)
    part = 1 / num_routers
    return Limits(
        num_requests=settings.max_requests,
        num_tokens=settings.max_tokens,
        num_sequences=max(sequences - external.num_sequences, sequences * part),
        num_blocks=max(blocks - external.num_blocks, blocks * part * _GUARANTEED_PART_OF_BLOCKS),
        num_prefill_tokens=max(prefill_tokens - external.num_prefill_tokens, prefill_tokens * part),
        prefilled_by=capacity.prefilled_by,
    )


class ExternalLoadEstimator:
    """The load that instances report beyond what this router has sent them: the least of the last second, since a
    report is always a little old. A first sample may be this router's own load; where it has had none for as long, the
    sample is that of the others."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Usage]] = deque()

    def observe(self, capacity: Capacity, own: Usage, now_s: float, idle_s: float = 0.0) -> Usage:
        """Compares the reported use with `own`, what this router has in flight; it has had nothing for `idle_s`."""
        while self._samples and now_s - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        is_first = not self._samples
        sample = Usage(
            num_sequences=max(capacity.used_sequences - own.num_sequences, 0),
            num_blocks=max(capacity.used_blocks - own.num_blocks, 0),
            num_prefill_tokens=max(capacity.used_prefill_tokens - own.num_prefill_tokens, 0),
        )
        self._samples.append((now_s, sample))
        if is_first:
            return sample if idle_s > _WINDOW_S else Usage()
        samples = [one for _, one in self._samples]
        return Usage(
            num_sequences=min(one.num_sequences for one in samples),
            num_blocks=min(one.num_blocks for one in samples),
            num_prefill_tokens=min(one.num_prefill_tokens for one in samples),
        )


class Charge(NamedTuple):
    """What one request counts for while it is in flight."""

    num_sequences: int
    num_tokens: int
    """Prompt and expected output of every choice."""
    num_blocks: int
    num_prefill_tokens: int
    """Until the first token."""

    def times(self, number: int) -> Charge:
        """Of so many such requests."""
        return Charge(*(amount * number for amount in self))

    @property
    def num_output_tokens(self) -> int:
        """Expected of all choices."""
        return self.num_tokens - self.num_sequences * self.num_prefill_tokens

    @classmethod
    def of(cls, request: GenerationRequest, num_output_tokens: int, block_size: int) -> Charge:
        """For `request`, each of whose choices is expected to have `num_output_tokens` in the end."""
        num_choices, num_known = request.num_choices_left, request.num_prompt_tokens + request.num_resumed_tokens
        num_tokens = max(request.num_prompt_tokens + num_output_tokens, num_known)
        num_blocks = -(-num_tokens // block_size)
        return cls(num_choices, num_choices * num_tokens, num_choices * num_blocks, num_known)


@dataclass(slots=True)
class Usage:
    """The sum of the charges in flight, or what other routers use of the pools. Every charge that is added is removed
    once."""

    num_requests: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_blocks: int = 0
    num_prefill_tokens: int = 0

    def add(self, charge: Charge) -> None:
        self._add(charge, 1)
        self.num_prefill_tokens += charge.num_prefill_tokens

    def prefilled(self, charge: Charge) -> None:
        self.num_prefill_tokens -= charge.num_prefill_tokens

    def remove(self, charge: Charge) -> None:
        """A request is over; `prefilled` has been called."""
        self._add(charge, -1)

    def part_of(self, limits: Limits) -> float:
        """The largest part of a limit that is used up. Prompts are left out: they are soon computed."""
        return max(
            self.num_requests / limits.num_requests,
            self.num_tokens / limits.num_tokens,
            self.num_sequences / limits.num_sequences,
            self.num_blocks / limits.num_blocks,
        )

    def exceeded_limit(self, charge: Charge, limits: Limits) -> str | None:
        """Which limit one more request would exceed; None if it fits. A single request always fits."""
        if not self.num_requests:
            return None
        if self.num_requests >= limits.num_requests:
            return f"{self.num_requests} requests are in flight, the most allowed"
        for name, used, more, limit in (
            ("tokens", self.num_tokens, charge.num_tokens, limits.num_tokens),
            ("choices", self.num_sequences, charge.num_sequences, limits.num_sequences),
            ("KV blocks", self.num_blocks, charge.num_blocks, limits.num_blocks),
        ):
            if used + more > limit:
                return f"{more} {name} more than the {used} in flight would exceed {limit:.0f}"
        if self.num_prefill_tokens >= limits.num_prefill_tokens:
            return f"{self.num_prefill_tokens} prompt tokens are being prefilled, the most allowed"
        return None

    def _add(self, charge: Charge, sign: int) -> None:
        self.num_requests += sign
        self.num_sequences += sign * charge.num_sequences
        self.num_tokens += sign * charge.num_tokens
        self.num_blocks += sign * charge.num_blocks


def _total(values: Iterable[int]) -> int | None:
    """The sum; None if a value is missing."""
    listed = list(values)
    return sum(listed) if listed and all(listed) else None


def _times(factor: float, amount: int | None) -> float:
    return math.inf if amount is None else factor * amount
