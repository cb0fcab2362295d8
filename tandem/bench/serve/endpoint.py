"""Requests, their records, and the endpoint protocol: one request in, the times of its tokens out.

An endpoint owns its connections and has no clock and no counters: load.py takes the time when `on_tokens` is called.
grpc_endpoint.py and openai_endpoint.py implement the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

INTERRUPTED = "INTERRUPTED"
"""The status of a request that the load itself cancelled."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    at_s: float
    """When it is due, seconds after the start of the run."""
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Output length: the end-of-sequence token is ignored."""


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. All times are seconds after the start of the run."""

    due_s: float
    """When it should have been sent: the reference for lag. TTFT and E2E count from `sent_s`."""
    sent_s: float
    num_prompt_tokens: int
    max_tokens: int
    token_s: list[float] = field(default_factory=list)
    """Arrival of each output token; the tokens of one message have the same time."""
    ended_s: float = 0.0
    finish_reason: str = ""
    error: str = ""
    """Status and message of a failed request, else empty."""
    held_s: float = 0.0
    """How long the concurrency limit delayed it after it was due."""
    status: str = ""
    """The status in `error`, by which failures are counted: DEADLINE_EXCEEDED, HTTP 500, TIMEOUT, INTERRUPTED…"""
    refused: bool = False
    """The endpoint was overloaded (RESOURCE_EXHAUSTED, HTTP 429 and 503): counted apart from other failures."""
    num_reported_tokens: int | None = None
    """Output tokens as the endpoint reports them, if the messages do not say how many each of them carries.
    `token_s` then has the times of messages."""
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV the endpoint had, as it reports; None: it does not."""
    num_stored_tokens: int = 0
    """Of these, those that it loaded from a store; an OpenAI endpoint does not tell them apart."""

    @property
    def succeeded(self) -> bool:
        return not self.error and bool(self.token_s)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_s) if self.num_reported_tokens is None else self.num_reported_tokens

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.token_s[-1] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between each two tokens that follow each other."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]

    @property
    def lag_s(self) -> float:
        """The delay of sending that the load itself caused, without that of the concurrency limit."""
        return max(0.0, self.sent_s - self.due_s - self.held_s)


OnTokens = Callable[[int], None]
"""Called as soon as a message with so many output tokens (at least 1) has arrived."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a successful request."""

    finish_reason: str
    """length or stop, or the endpoint's own."""
    num_reported_tokens: int | None = None
    """See RequestRecord."""
    num_prompt_tokens: int | None = None
    """As the endpoint counted them; None: not reported, or the prompt was token ids."""
    num_cached_tokens: int | None = None
    """See RequestRecord."""
    num_stored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What an endpoint reports about its model; None: not reported."""

    model: str
    max_model_len: int | None = None
    """Longest prompt + output, tokens."""
    vocab_size: int | None = None
    """Ids are 0..vocab_size-1."""
    end_ids: frozenset[int] = frozenset()
    """Ids that end an answer."""
    base: str = ""
    """The model that it is a LoRA adapter of; empty: not known, or it is none."""


class RequestFailed(Exception):
    """A request that failed. `status` is short and constant: failures are counted by it."""

    def __init__(self, status: str, message: str, *, refused: bool = False) -> None:
        self.status = status
        self.message = message
        self.refused = refused
        """The endpoint reports that it is overloaded."""
        super().__init__(f"{status}: {message}")


def check_finished(reason: str, num_tokens: int) -> None:
    """Raises RequestFailed for an answer that the server itself has cut short."""
    if reason in ("abort", "error"):
        raise RequestFailed(reason.upper(), f"the answer ended with {reason} after {num_tokens} tokens")


class Endpoint(Protocol):
    """Answers requests. Used on one event loop, by any number of tasks at a time."""

    @property
    def name(self) -> str:
        """For messages: `Tandem at 127.0.0.1:50051 (gRPC)`."""

    @property
    def counting(self) -> str:
        """How output tokens have been counted so far: `by the token ids of each message`."""

    async def served_model(self) -> ServedModel:
        """The served model; raises RequestFailed, whose message says what to type."""

    async def generate(self, request: PlannedRequest, on_tokens: OnTokens) -> Answer:
        """Sends `request` with greedy sampling, past the end-of-sequence token, and reads its answer to the end.

        Raises RequestFailed. Cancellation also cancels the request at the endpoint.
        """

    async def close(self) -> None:
        """Closes every connection."""
