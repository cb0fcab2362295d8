"""What offline generation returns, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One candidate at one position."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token."""
    decoded_token: str | None = None
    """Its text by itself; None without a tokenizer."""


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
    cumulative_logprob: float | None = None
    """Sum over the output's tokens; None unless log-probabilities were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per output token, by token id: the token itself first, then the best ones; None unless asked for."""


@dataclass(slots=True)
class RequestOutput:
    """One prompt's answer."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token, by token id: the token itself first, then the best ones; None for the first, and unless asked
    for."""
