"""The scheduler's decisions and load, and the model runner's results, as values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from engine.core.messages import STEP_TOKENS, FinishReason, TokenLogprob, TokensEvent
from engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: `num_tokens` tokens from `start` on."""

    request: Request
    start: int
    num_tokens: int
    draft: list[int] = field(default_factory=list)
    """Tokens that are computed behind these, in case that they follow (drafts.py)."""

    @property
    def samples(self) -> bool:
        """The step computes the request's last known token, so that its next one is sampled."""
        return self.start + self.num_tokens == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    scheduled: list[ScheduledRequest]

    @property
    def num_tokens(self) -> int:
        """Those of drafts included."""
        return sum(share.num_tokens + len(share.draft) for share in self.scheduled)

    @property
    def num_streams(self) -> int:
        """Single tokens: those of streams, and of drafts, which cost the same."""
        return sum(1 + len(share.draft) for share in self.scheduled if share.num_tokens == 1)


class LogitsRow(NamedTuple):
    """A row of logits: those of the token behind the request's tokens and the first ones of its draft."""

    request: Request
    drafted: Sequence[int] = ()

    @property
    def position(self) -> int:
        """Of the token, in prompt and output."""
        return self.request.num_tokens + len(self.drafted)

    @property
    def num_output_tokens(self) -> int:
        """Before the token."""
        return self.request.num_output_tokens + len(self.drafted)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens sampled in a step, by request id."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    """One each, and one more for each token of a draft that was right."""
    logprobs: dict[str, list[list[TokenLogprob]]] = field(default_factory=dict)
    """If requested, parallel to `token_ids`."""
    prompt_logprobs: dict[str, list[list[TokenLogprob]]] = field(default_factory=dict)
    """Of requests that need them."""
    nothing_allowed: frozenset[str] = frozenset()
    """Requests whose own parameters exclude every token or made logits that are not finite, though the model's are."""

    not_finite: frozenset[str] = frozenset()
    """Requests with a block, filled in this step, whose keys or values are not finite."""

    def problem(self, share: ScheduledRequest) -> str | None:
        """Why the request of this share cannot go on, and its KV of this step is of no use."""
        request_id = share.request.request_id
        if share.samples and not (request_id in self.token_ids or request_id in self.nothing_allowed):
            return "the model's logits are not finite: no token can be sampled"
        if request_id in self.not_finite:
            return "the model's keys and values are not finite: no token can be sampled"
        return None

    def event(self, request: Request, *, finish_reason: FinishReason | None, stop_token_id: int | None) -> TokensEvent:
        """The event of this request's tokens."""
        request_id = request.request_id
        return TokensEvent(
            request_id,
            self.token_ids[request_id],
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=request.num_cached_tokens,
            num_external_tokens=request.num_external_tokens,
            num_recomputed_tokens=request.num_recomputed_tokens,
            queue_s=request.queue_s or 0.0,
            logprobs=self.logprobs.get(request_id, []),
            prompt_logprobs=self.prompt_logprobs.get(request_id, []),
        )


class SchedulerCounters(msgspec.Struct):
    """Totals since the start, by the names of EngineLoad."""

    num_preemptions: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_external_tokens: int = 0
    num_recomputed_blocks: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0
    steps_by_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    def step_computed(self, num_tokens: int, num_draft_tokens: int = 0) -> None:
        self.num_steps += 1
        self.num_step_tokens += num_tokens
        self.num_draft_tokens += num_draft_tokens
        self.steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def tokens_generated(self, num_tokens: int) -> None:
        """Of one request in one step: all but the first were drafted."""
        self.num_generated_tokens += num_tokens
        self.num_accepted_tokens += num_tokens - 1

    def totals(self) -> dict[str, Any]:
        """As they are now, for EngineLoad."""
        return msgspec.structs.asdict(self) | {"steps_by_tokens": list(self.steps_by_tokens)}


class QueueLoad(NamedTuple):
    """The requests of a scheduler, by the names of EngineLoad. Running requests that no step has computed tokens of, as
    after a look-up in a store, count as waiting."""

    num_waiting: int
    num_running: int
    num_loading: int
    num_waiting_tokens: int
    """Of prompts that are computed here; without regard to prefix hits, as the next one."""
    num_uncomputed_tokens: int
    """Late prompts do not count, begun or not: theirs delay no other."""
    num_prefilling: int
    num_without_room: int
    """Waiting requests with KV of another instance: only blocks, a place in the batch or a grammar are missing."""

    @classmethod
    def of(
        cls,
        waiting: Collection[Request],
        running: Collection[Request],
        loading: Collection[Request],
        compiling: Collection[Request],
    ) -> QueueLoad:
        """Of the requests with each status."""
        queued = (*waiting, *compiling, *(request for request in running if request.is_untouched))
        begun = [request for request in running if not request.is_untouched]
        prompts = [request for request in begun if request.is_prompt]
        on_time = (request for request in (*queued, *prompts) if not (request.awaits_kv or request.is_late))
        return cls(
            num_waiting=len(queued),
            num_running=len(begun),
            num_loading=len(loading),
            num_waiting_tokens=sum(request.num_uncomputed_tokens for request in queued if not request.awaits_kv),
            num_uncomputed_tokens=sum(request.num_uncomputed_tokens for request in on_time),
            num_prefilling=len(prompts),
            num_without_room=sum(request.awaits_kv for request in (*waiting, *compiling)),
        )
