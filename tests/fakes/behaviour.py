"""What a fake instance does wrong, as data, and what happened to it, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.sampling.constraints import CONSTRAINTS
from protos.tandem.v1 import instance_pb2
from serving.errors import InvalidArgument, Overloaded, ServiceError

FULL = Overloaded("no free blocks", 0.5)
WRONG = InvalidArgument("a fault that the test asked for")


@dataclass
class Behaviour:
    """How a fake instance deviates from a fast and healthy one. Everything may be changed while it runs."""

    prefill_s: float = 0.0
    """Before the first token of a prompt."""
    token_s: float = 0.0
    """Before every further token."""
    permits: asyncio.Semaphore | None = None
    """Taken by every token, one each; None: no token waits for one."""
    load_s: float = 0.0
    """Between the transfer's completion and Loaded."""
    cached_tokens: int = 0
    """Of every prompt that it computes for itself, those that it reports as cached."""
    recomputes: str = ""
    """Why it reports a recomputed block of every hand-over; {} is the transfer's id. Empty: it reports none."""
    reserve_s: float = 0.0
    linger_s: float = 0.0
    """Between the first token of a prefill and the end of its call."""
    refuse: ServiceError | None = None
    """Answer to every new request."""
    die_at: int | None = None
    """Dies (every call broken, the port closed) instead of emitting the token with this index."""
    freeze_at: int | None = None
    """Freezes (no answer, no beat, no end) instead of emitting the token with this index."""
    poison: int | None = None
    """Dies instead of emitting a token of a prompt that begins with this id, from the index `poison_at` on."""
    poison_at: int = 0
    tells: bool = False
    """Before it dies, every call is answered that the engine has crashed, as by a front that has lost its core."""
    fail_at: int | None = None
    """Answers INTERNAL instead of emitting the token with this index."""
    index_error_at: int | None = None
    """Emits the token with this index under the next one's."""
    stale_at: int | None = None
    """Emits rubbish of the stream epoch before, just before the token with this index."""
    mute_logprobs_at: int | None = None
    """Emits the token with this index without the log-probabilities that were asked for."""
    stop_at: int | None = None
    """Ends with STOP at the token with this index, by the request's first stop string or token id if it has one."""
    writes: str = ""
    """Its text, three characters a token, which ends with STOP; empty: that of its tokens."""
    constraints: Sequence[str] = CONSTRAINTS
    """Those that it names; it would ignore others."""
    lora_adapters: Sequence[str] = ()
    """Those that it names; it would not look whether a request's is one of them."""
    weights: int = 0
    """Its tokens are those of the request's seed plus this: another number stands for other weights."""
    streams_tokens: bool = True
    """False: one of a time before token streams, which answers each Decode in its own call."""
    num_batched_tokens: int = 0
    """Of a step; 0: not reported."""
    slots: int | None = None
    """Decode calls that have room at one time, the others wait their turn, and it reports so; None: any number."""
    free_blocks: int = 0
    """It has so many blocks and reports them all as free, whatever it runs; 0: it reports none."""
    beats: bool = True
    draining: bool = False
    moving_out: bool = False
    core_silence_s: float = 0.0
    load_age_s: float = 0.0
    step_s: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0
    num_without_room: int = 0
    step_cost: instance_pb2.StepCost | None = None
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0


@dataclass(frozen=True)
class Record:
    """One thing that happened."""

    what: str
    at_s: float
    request_id: str = ""
    transfer_id: str = ""
    detail: Any = None
