"""What is sent, and what was seen of it: the plain data between workload, endpoints, load and report."""

from __future__ import annotations

from dataclasses import dataclass, field


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

    @property
    def succeeded(self) -> bool:
        """Whether it ended well, with at least one token."""
        return not self.error and bool(self.token_s)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_s)
