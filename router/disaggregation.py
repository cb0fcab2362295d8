"""Whether a request is split between a prefill and a decode instance: a pure decision with its reason."""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple

Mode = Literal["always", "auto", "never"]


class Decision(enum.Enum):
    """What becomes of a request."""

    DISAGGREGATE = "disaggregate"
    LOCAL = "local"  # the decode instance prefills too
    REFUSE = "refuse"  # neither is allowed


class Disaggregation(NamedTuple):
    """The decision, and why, in words that may stand in a trailer."""

    decision: Decision
    reason: str


def decide(mode: Mode, *, num_tokens: int, prefill_available: bool, min_tokens: int) -> Disaggregation:
    """`num_tokens` are those to be prefilled: the prompt and, after a failover, what was emitted.

    `auto` hands over a prompt longer than `min_tokens` when a compatible prefill instance is there: below that the
    hand-over costs more than the interruption of the decode instance's steps that it saves.
    """
    if mode == "never":
        return Disaggregation(Decision.LOCAL, "disaggregation is off")
    if mode == "always":
        if prefill_available:
            return Disaggregation(Decision.DISAGGREGATE, "disaggregation is on")
        return Disaggregation(Decision.REFUSE, "no prefill instance is available")
    if not prefill_available:
        return Disaggregation(Decision.LOCAL, "no prefill instance is available")
    if num_tokens <= min_tokens:
        return Disaggregation(Decision.LOCAL, f"{num_tokens} tokens to prefill, at most {min_tokens} stay local")
    return Disaggregation(Decision.DISAGGREGATE, f"{num_tokens} tokens to prefill, more than {min_tokens}")
