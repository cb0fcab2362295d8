"""What offline generation returns, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """Why it ended: stop, length, abort or error."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the model's own end."""


@dataclass(slots=True)
class RequestOutput:
    """One prompt's answer."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
