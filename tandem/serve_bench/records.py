"""What is sent, and what was seen of it: the plain data between workload, endpoints, load and report."""

from __future__ import annotations

from dataclasses import dataclass, field

INTERRUPTED = "INTERRUPTED"
"""The status of a request that the load itself cut off."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload."""

    at_s: float
    """When it is due, seconds after the start of the run."""
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Output length: the end-of-sequence token is ignored."""
    session: str = ""


@dataclass(slots=True)
class RequestRecord:
    """What a client saw of one request. All times are seconds after the start of the run."""

    due_s: float
    """When it should have been sent; TTFT and E2E count from `sent_s`, how late the load was from this."""
    sent_s: float
    num_prompt_tokens: int
    max_tokens: int
    token_s: list[float] = field(default_factory=list)
    """When each output token came; those of one message share their moment."""
    ended_s: float = 0.0
    finish_reason: str = ""
    error: str = ""
    """The status and the message of a request that failed; empty for one that did not."""
    held_s: float = 0.0
    """How long the limit on concurrency held it back after it was due."""
    status: str = ""
    """The reason in `error` without its message, to count by: DEADLINE_EXCEEDED, HTTP 500, TIMEOUT, INTERRUPTED…"""
    refused: bool = False
    """The endpoint was full and said so (RESOURCE_EXHAUSTED, HTTP 429 and 503): a failure that is counted apart."""
    num_told_tokens: int | None = None
    """Output tokens by the endpoint's own account, where the messages did not say how many each of them carried.
    `token_s` then has the moments of messages."""

    @property
    def succeeded(self) -> bool:
        """Whether it ended well, with at least one token."""
        return not self.error and bool(self.token_s)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_s) if self.num_told_tokens is None else self.num_told_tokens

    @property
    def lag_s(self) -> float:
        """How late the load itself was; the limit on concurrency is not counted."""
        return max(0.0, self.sent_s - self.due_s - self.held_s)
