"""A request in the scheduler: its tokens, and how many of them have KV.

There are no phases. Every step reduces the difference between `num_computed_tokens` and `num_tokens`; prefill, chunked
prefill, prefix hits, decode and resumption after preemption are all that one subtraction.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine.core.messages import EngineRequest, ErrorKind, FinishReason
from engine.errors import CapacityError
from engine.scheduling import step_budget
from engine.scheduling.block_hash import extend_block_hashes, root_hash
from engine.scheduling.step_budget import Prompt, Stream


class RequestStatus(enum.Enum):
    """`(waiting for grammar →) waiting → (loading →) running ⇄ preempted → finished`."""

    WAITING_FOR_GRAMMAR = "waiting for grammar"  # it is compiled, or follows the output that came with the request
    WAITING = "waiting"
    LOADING = "loading"  # blocks reserved; KV or seed awaited, or KV looked up in a store
    RUNNING = "running"
    PREEMPTED = "preempted"  # blocks released; resumes from what the prefix cache still has
    FINISHED = "finished"


def constraint_error(error: BaseException) -> tuple[str, ErrorKind]:
    """That of a request whose constraint could not be compiled because of `error`."""
    return str(error), "no_room" if isinstance(error, CapacityError) else "invalid_constraint"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """The mutable record of a request. Owned by the scheduler; others only read it."""

    spec: EngineRequest
    arrival: int
    """Ordinal of arrival: first come, first served within a priority."""
    token_ids: list[int]
    """Prompt, then output."""
    num_initial_tokens: int
    """Prompt plus output emitted before this engine got the request: the tokens whose KV moves between instances."""
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
    """Monotonic time at which waiting for blocks, KV, seed or a grammar ends with an error."""
    arrived_s: float = field(default_factory=time.monotonic)
    queue_s: float | None = None
    """Seconds from arrival until the first step that computes tokens of it; None: there was none yet."""
    stream_from: tuple[float, int] | None = None
    """When it was first scheduled as a stream, and its output tokens then."""
    is_late: bool = False
    """It is predicted to miss its TTFT, and goes behind those that can meet theirs."""
    is_entering: bool = False
    """It has waited for its grammar and has no token yet: its prompt is paced."""
    is_offered: bool = False
    """The connector knows its blocks, which stay the same from now on."""
    finish_reason: FinishReason | None = None
    grammar: Future[Any] | None = None
    """The compiled constraint (sampling/grammar.py), or its InvalidRequest or CapacityError; None: no constraint."""
    is_replayed: bool = True
    """Its grammar has followed the output that came with it, as far as it may."""

    @classmethod
    def from_spec(
        cls, spec: EngineRequest, *, arrival: int, fingerprint: str, grammar: Future[Any] | None = None
    ) -> Request:
        """A new request. `fingerprint` is part of its block hashes."""
        token_ids = [*spec.prompt_token_ids, *spec.output_token_ids]
        root = root_hash(fingerprint, cache_salt=spec.cache_salt, lora=spec.lora)
        return cls(
            spec=spec,
            arrival=arrival,
            token_ids=token_ids,
            num_initial_tokens=len(token_ids),
            root_hash=root,
            grammar=grammar,
            is_replayed=not spec.output_token_ids,
        )

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
        return len(self.token_ids) - len(self.spec.prompt_token_ids)

    @property
    def order(self) -> tuple[int, bool, int]:
        """Sorts requests: higher priority first, then those that are not late, then first come, first served."""
        return (-self.spec.priority, self.is_late, self.arrival)

    @property
    def is_handed_over(self) -> bool:
        """Its tokens go on at another instance."""
        return self.spec.hold_kv is not None

    @property
    def moves_kv(self) -> bool:
        """KV of this request is transferred: its blocks are all allocated at once and it is not preempted."""
        return self.spec.hold_kv is not None or self.awaits_kv

    @property
    def awaits_kv(self) -> bool:
        """Its KV comes from another instance and is not loaded yet."""
        return self.spec.remote_kv is not None and not self.loaded

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prompt(self) -> bool:
        """More than the one token of a stream has to be computed before the next is sampled."""
        return self.num_uncomputed_tokens > 1

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Its next token must come with log-probabilities of its whole prompt."""
        is_asked = self.spec.params.prompt_logprobs is not None and self.spec.returns_prompt_logprobs
        return is_asked and self.num_output_tokens == 0

    @property
    def ttft_s(self) -> float:
        """The objective of its first token; infinite without one, and where that token does not come from here."""
        if self.spec.ttft_s is None or self.spec.remote_kv is not None or self.num_output_tokens:
            return math.inf
        return self.spec.ttft_s

    @property
    def has_ttft(self) -> bool:
        return self.ttft_s < math.inf

    @property
    def waits_on_time(self) -> bool:
        """No step has computed anything of it, and its first token may still come in time."""
        return self.has_ttft and self.status is RequestStatus.WAITING and not self.is_late

    @property
    def is_compiled(self) -> bool:
        """It has no constraint, or its grammar is there and has followed the output that came with it."""
        return self.grammar is None or (self._has_grammar and self.is_replayed)

    @property
    def awaits_replay(self) -> bool:
        return self._has_grammar and not self.is_replayed

    @property
    def _has_grammar(self) -> bool:
        return self.grammar is not None and self.grammar.done() and self.grammar.exception() is None

    @property
    def is_untouched(self) -> bool:
        """Nothing has been computed for it, here or elsewhere: its blocks can be taken, and nothing is wasted."""
        return self.queue_s is None and self.spec.remote_kv is None and not self.num_output_tokens

    def begin(self) -> None:
        """A step computes tokens of it."""
        if self.queue_s is None:
            self.queue_s = time.monotonic() - self.arrived_s

    def skip(self, num_tokens: int) -> None:
        """Others have computed the next `num_tokens` tokens. Of the prompt they count as cached, once."""
        self.num_computed_tokens += num_tokens
        if self.num_tokens == self.num_initial_tokens:
            most = self.num_computed_tokens - self.num_external_tokens  # less than the sum after a preemption
            self.num_cached_tokens = max(self.num_cached_tokens, min(self.num_cached_tokens + num_tokens, most))

    def paced(self, now: float) -> Stream:
        """Of a stream with an inter-token objective, how much time its next token has."""
        assert self.spec.itl_s is not None
        if self.stream_from is None:
            self.stream_from = (now, self.num_output_tokens)
        since_s, num_before = self.stream_from
        num_due = self.num_output_tokens - num_before + 1
        return Stream(self.spec.itl_s, step_budget.slack_s(self.spec.itl_s, since_s, num_due, now))

    def planned(self, now: float) -> Prompt:
        """Of a prompt, what is left to compute, and in what time."""
        return Prompt(self.num_uncomputed_tokens, self.arrived_s + self.ttft_s - now)

    def constraint_failure(self) -> tuple[str, ErrorKind] | None:
        """The error of a request whose constraint could not be compiled."""
        error = self.grammar.exception() if self.grammar is not None and self.grammar.done() else None
        return None if error is None else constraint_error(error)

    def nothing_allowed(self) -> tuple[str, ErrorKind]:
        """The error of a request for which no token could be sampled."""
        return (
            "allowed_token_ids, bad_words, logit_bias, min_tokens and the constraint exclude every token, "
            "or the constraint is too ambiguous to be followed in time, "
            f"or repetition_penalty={self.spec.params.repetition_penalty} makes logits that are not finite"
        ), "nothing_allowed"

    def expired(self, now: float) -> tuple[str, ErrorKind] | None:
        """The error of a request that has waited too long for a step, or for what it lacks."""
        begin_s = self.spec.begin_s
        if begin_s is not None and self.is_untouched and now >= self.arrived_s + begin_s:
            return f"no step began the prompt within {begin_s:.3g} s", "no_room"
        if self.deadline is None or now < self.deadline:
            return None
        match self.status:
            case RequestStatus.WAITING_FOR_GRAMMAR:
                return "the constraint was not compiled in time", "no_room"
            case RequestStatus.WAITING | RequestStatus.PREEMPTED:
                return "no room within the reservation time", "no_room"
            case _:
                return f"no {'KV' if self.seeded else 'seed'} within the reservation time", "timeout"

    def append(self, token_ids: Sequence[int], max_model_len: int) -> tuple[FinishReason | None, int | None]:
        """Append what a step has sampled. All but the last were drafted: their KV is computed, and none of them ends
        the request. Returns what `check_stop` says of the last; a request that is handed over has no other reason."""
        self.token_ids += token_ids
        self.num_computed_tokens += len(token_ids) - 1
        self.is_entering = self.is_late = False
        reason, stop_token_id = self.check_stop(max_model_len)
        if reason is None and self.is_handed_over:
            reason = "hand_over"
        return reason, stop_token_id

    def check_stop(self, max_model_len: int) -> tuple[FinishReason | None, int | None]:
        """Why the newest token ends the request, None if it does not; and that token if it is one of `stop_token_ids`.

        Before `min_tokens` only a length limit ends it, or a grammar that allowed nothing else; a stop token at the
        length limit is a stop.
        """
        token_id, params, num_output = self.token_ids[-1], self.spec.params, self.num_output_tokens
        if num_output >= params.min_tokens or self.grammar is not None:
            if token_id in params.stop_token_ids:
                return "stop", token_id
            if token_id in self.spec.eos_token_ids and not params.ignore_eos:
                return "stop", None
        if self.num_tokens >= max_model_len or (params.max_tokens is not None and num_output >= params.max_tokens):
            return "length", None
        return None, None

    def update_block_hashes(self, block_size: int) -> None:
        """Hash the full blocks added since the last call."""
        extend_block_hashes(self.block_hashes, self.root_hash, self.token_ids, block_size)
