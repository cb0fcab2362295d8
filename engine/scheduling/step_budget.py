"""How many prompt tokens a step may take beside running streams: pure functions of what a step costs.

A stream's tokens should come within its inter-token objective, a prompt's first token within its TTFT objective:

    step time allowed by streams = the least of min(1.5 S, max(S, slack)) over the streams
    step time needed by prompts  = the least at which each prompt that can still meet its TTFT does, at most 7 S
    prompt tokens                = (the larger of the two - base - per_stream * streams) / per_token, within 16 … max

The slack of a stream is the time until its next token is due, had all come at 0.95 S since its first. The second line
is the guard against saturation: bounded by the streams alone, an engine computes fewer prompt tokens than arrive, and
in the end no request meets its TTFT. Prompts that no step time can save are computed last (`late`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from engine.core.messages import StepCost

MIN_TOKENS = 16
"""A step beside streams takes at least so many prompt tokens."""
PACE = 0.95
"""Of the objective: where a stream's tokens are aimed."""
_MAX_PACED = 1.5
_MAX_NEEDED = 7.0
_LOST_S = 0.2
"""A stream that is later than this no longer shortens steps."""
_MARGIN = 0.9
"""Of the time that a prompt has left: what is planned with."""


class Stream(NamedTuple):
    """A running stream with an inter-token objective."""

    itl_s: float
    slack_s: float
    """Until its next token is due; negative: late."""


class Prompt(NamedTuple):
    """A prompt that is not computed completely, in the order in which prompts are served."""

    num_tokens: int
    """Left to compute."""
    left_s: float = math.inf
    """Until its first token is due; infinite without an objective."""
    is_begun: bool = False


def slack_s(itl_s: float, first_s: float, num_tokens: int, now_s: float) -> float:
    """The slack of a stream with `num_tokens` tokens since `first_s`, the moment of its first one."""
    return first_s + PACE * itl_s * num_tokens - now_s


def prompt_budget(
    cost: StepCost | None, streams: Sequence[Stream], num_streams: int, prompts: Iterable[Prompt], max_tokens: int
) -> int:
    """Prompt tokens of the next step, at most `max_tokens`, beside `num_streams` streams of which `streams` have an
    objective. Without an objective or a fitted cost it is `max_tokens`."""
    if cost is None or not streams or cost.per_token_s <= 0:
        return max_tokens
    step_s = max(_paced_s(streams), _needed_s(cost, streams, num_streams, prompts))
    num_tokens = (step_s - cost.seconds(num_streams)) / cost.per_token_s
    return int(min(max(num_tokens, MIN_TOKENS), max_tokens))


def late(
    cost: StepCost | None, streams: Sequence[Stream], num_streams: int, prompts: Sequence[Prompt], max_tokens: int
) -> Iterator[int]:
    """The indices of the prompts, none of them begun, that miss their TTFT even if all steps are as long as they may
    be and every prompt found late goes behind the others."""
    if cost is None or cost.per_token_s <= 0:
        return
    speed = _max_speed(cost, streams, num_streams, max_tokens)
    ahead_s = 0.0
    for index, prompt in enumerate(prompts):
        needed_s = prompt.num_tokens / speed
        if ahead_s + needed_s > prompt.left_s and not prompt.is_begun:
            yield index
        else:
            ahead_s += needed_s


def _paced_s(streams: Sequence[Stream]) -> float:
    """The longest step in which no stream falls behind; those that are lost anyway count no more."""
    alive = [min(_MAX_PACED * itl_s, max(itl_s, slack)) for itl_s, slack in streams if slack >= -_LOST_S]
    return min(alive, default=_MAX_PACED * min(stream.itl_s for stream in streams))


def _needed_s(cost: StepCost, streams: Sequence[Stream], num_streams: int, prompts: Iterable[Prompt]) -> float:
    """The shortest step at which the prompts that can make their TTFT do; 0 without such prompts.

    A step of s seconds has s - base for prompts, so they advance by (1 - base / s) / per_token tokens a second.
    """
    base_s, longest_s = cost.seconds(num_streams), _MAX_NEEDED * min(stream.itl_s for stream in streams)
    if longest_s <= base_s:
        return longest_s
    ahead_s = needed_s = 0.0
    for num_tokens, left_s, is_begun in prompts:
        until_s = ahead_s + num_tokens * cost.per_token_s
        can_make_it = until_s < left_s * (1 - base_s / longest_s)
        if can_make_it and left_s < math.inf:
            share = until_s / (_MARGIN * left_s)
            needed_s = max(needed_s, base_s / (1 - share) if share < 1 else longest_s)
        if can_make_it or is_begun:
            ahead_s = until_s
    return min(needed_s, longest_s)


def _max_speed(cost: StepCost, streams: Sequence[Stream], num_streams: int, max_tokens: int) -> float:
    """Prompt tokens per second in the longest steps."""
    num_tokens = float(max_tokens)
    if streams:
        longest_s = _MAX_NEEDED * min(stream.itl_s for stream in streams)
        num_tokens = min(max((longest_s - cost.seconds(num_streams)) / cost.per_token_s, MIN_TOKENS), max_tokens)
    return num_tokens / (cost.seconds(num_streams) + num_tokens * cost.per_token_s)
