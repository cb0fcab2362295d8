"""How many prompt tokens a step may take beside running streams: pure functions of what a step costs.

A stream's tokens should come within its inter-token objective, a prompt's first token within its TTFT objective:

    bare step                    = base + per_stream * streams
    step time allowed by streams = the least of min(m S, max(0.7 S, slack)) over the streams
    tokens allowed by streams    = (that - bare step) / per_token
    unhurried tokens             = the most of: those allowed for m = 0.5, those of a step 2.5 times the bare one, and
                                   those that compute 1.5 times the prompt tokens of the last seconds;
                                   but not more than are allowed for m = 1
    needed tokens                = those with which each prompt is computed in 0.8 of the time that it has left
    calm tokens                  = the more of these two, but not more than are allowed for m = 2
    urgent tokens                = up to a prompt that is on time only at full speed from now on
    prompt tokens                = the more of calm and urgent, at most max_tokens

Fewer than 16 are none where the streams soon have time for 16: a step with a few tokens takes much longer than one
without, and neither the streams nor the prompts would get on.

The slack of a stream is the time until its next token is due, had all come at 0.95 S since its first: after a step that
took longer than planned the next one is shorter. Longer steps waste less time on what a step costs without prompts, but
each is a gap in the streams. So an engine with little to do takes short ones (2.5: three fifths of the time go to the
prompts), and one with more to do longer ones, up to S. Where streams are ahead, steps are longer than S while prompts
need them or are late, since an engine with too much to do has no time to waste. Urgent tokens are the guard against
saturation: bounded by the streams alone, an engine computes fewer prompt tokens than arrive, and in the end no request
meets its TTFT. It acts late and at once: until then the streams run undisturbed, and some end, and one long
interruption costs fewer streams their objective than many that are somewhat too long. It acts only where it saves at
least as many prompts as it costs streams, or an engine with too much to do would lose both. Prompts that not even full
speed can save are computed last (`late`), begun or not: those on time would miss theirs behind them.

What a prompt becomes matters as much: each stream lengthens every step. Prompts begin while all streams together take
at most half of what the objective leaves beside the base of a step (`may_begin`); the other half is the prompts', so
that an engine with too much to do serves some requests well instead of all of them too slowly. Late prompts, which gain
nothing any more, begin up to a quarter.

Without objectives prompts lengthen a step by the factor that its streams ask for; urgent prompts exceed it. While
prompts wait behind others the factor is six times as large, since near full load prompts would get too little time
(`stretched_tokens`). Requests that have waited for a grammar are paced in any case: compilations end in bursts, and all
their prompts in one step would stop the streams. They enter one by one (`num_entering`), and while there are no other
prompts theirs are cut as well (`entering_tokens`). Before that their grammars follow the outputs that came with them,
for a part of a step at a time (`replay_s`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from engine.core.messages import StepCost

MIN_TOKENS = 16
"""A step beside streams takes at least so many prompt tokens, or none."""
PACE = 0.95
"""Of the objective: where a stream's tokens are aimed."""
_MIN_PACED, _MAX_PACED = 0.7, 2.0
"""Times the objective: the steps of streams that are behind, and of those that are ahead of it beside prompts that need
longer ones."""
_MIN_UNHURRIED, _MAX_UNHURRIED = 0.5, 1.0
"""Times the objective: steps where no prompt needs longer ones."""
_BARE_STEPS = 2.5
"""How many bare steps an unhurried one may last. In shorter ones prompts get too little of the time."""
_GROWTH = 1.5
"""Times the prompt tokens of the last seconds: what unhurried steps can compute, so that none accumulate."""
_NEEDED = 0.8
"""Of the time that a prompt has left, and of which it takes what it needs."""
_LOST_S = 0.2
"""A stream that is later than this no longer shortens steps, and an interruption does not cost it anything."""
_STREAMS_PART, _STREAMS_PART_FOR_LATE = 0.5, 0.25
"""Of the step time that the objective leaves beside the base: for streams, before and after a late prompt."""
_ENTERING_PART = 0.25
"""By how much compiled requests may lengthen a step of the streams."""
_ENTERING_STEPS = 8
"""A step takes at least one of so many parts of all prompts that enter: they wait for streams, but no backlog grows."""
_MIN_REPLAY_S, _MAX_REPLAY_S = 0.005, 0.05
"""Of one step: the least keeps replays going beside short steps, the most keeps the loop answering commands."""
_QUEUED = 6.0
"""The stretch of a step is multiplied by this while prompts wait behind others."""
_URGENT = 0.8
"""Of the time that a prompt has left: when full speed takes more, it is urgent."""


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


def slack_s(itl_s: float, first_s: float, num_tokens: int, now_s: float) -> float:
    """The slack of a stream with `num_tokens` tokens since `first_s`, the moment of its first one."""
    return first_s + PACE * itl_s * num_tokens - now_s


def prompt_budget(
    cost: StepCost | None,
    streams: Sequence[Stream],
    num_streams: int,
    prompts: Iterable[Prompt],
    max_tokens: int,
    num_calm: int | None = None,
    *,
    are_late: bool = False,
    prefill_per_s: float = 0.0,
) -> int:
    """Prompt tokens of the next step, at most `max_tokens`, beside `num_streams` streams of which `streams` have an
    objective. Without an objective or a fitted cost it is `num_calm`, which urgent prompts alone exceed. `prompts` are
    those on time; `are_late`: others are not. `prefill_per_s`: prompt tokens computed per second lately."""
    calm = max_tokens if num_calm is None else min(num_calm, max_tokens)
    if cost is None or cost.per_token_s <= 0:
        return calm
    prompts = list(prompts)
    if streams:
        bare_s = cost.seconds(num_streams)
        least, allowed, most = (
            (_paced_s(streams, longest) - bare_s) / cost.per_token_s
            for longest in (_MIN_UNHURRIED, _MAX_UNHURRIED, _MAX_PACED)
        )
        cheap = (_BARE_STEPS - 1) * bare_s / cost.per_token_s
        usual = _num_at(_GROWTH * prefill_per_s, cost, num_streams)
        unhurried = min(max(least, cheap, usual, MIN_TOKENS), allowed)
        needed = math.inf if are_late else _num_needed(cost, num_streams, prompts)
        paced = min(max(unhurried, needed), most, max_tokens)
        calm = min(calm, int(paced) if paced >= MIN_TOKENS else _num_least(cost, num_streams, streams))
    urgent = _num_urgent(_token_s(cost, num_streams, max_tokens), streams, prompts) if calm < max_tokens else 0
    return min(max(calm, urgent), max_tokens)


def late(cost: StepCost | None, num_streams: int, prompts: Iterable[Prompt], max_tokens: int) -> Iterator[int]:
    """The indices of the prompts that miss their TTFT even at full speed, with every prompt found late behind the
    others."""
    if cost is None or cost.per_token_s <= 0:
        return
    token_s, ahead = _token_s(cost, num_streams, max_tokens), 0
    for index, (num_tokens, left_s) in enumerate(prompts):
        if (ahead + num_tokens) * token_s > left_s:
            yield index
        else:
            ahead += num_tokens


def may_begin(cost: StepCost | None, itl_s: float, num_streams: int, *, is_late: bool) -> bool:
    """Whether a prompt that becomes a stream with this objective may begin beside `num_streams`, those included that
    other prompts become. One can always begin alone, and all where no stream holds the objective anyway."""
    if cost is None or num_streams == 0 or cost.seconds(1) > itl_s:
        return True
    part = _STREAMS_PART_FOR_LATE if is_late else _STREAMS_PART
    return cost.per_stream_s * (num_streams + 1) <= part * (itl_s - cost.base_s)


def num_entering(cost: StepCost | None, num_streams: int, prompts: Iterable[int]) -> int:
    """How many of the compiled requests, each with its number of prompt tokens, enter before the next step: all if
    there is no stream, else one, and more as long as they lengthen the step by a quarter at most."""
    if num_streams == 0:
        return sum(1 for _ in prompts)
    if cost is None:
        return 1
    spent_s = accumulate(cost.per_stream_s + cost.per_token_s * num_tokens for num_tokens in prompts)
    return max(1, sum(spent <= _ENTERING_PART * cost.seconds(num_streams) for spent in spent_s))


def entering_tokens(cost: StepCost | None, num_streams: int, num_left: int) -> int | None:
    """Prompt tokens of the next step beside streams where all prompts, with `num_left` tokens together, have waited for
    a grammar: those that lengthen it by a quarter, and never so few that prompts accumulate. None: no bound."""
    if num_streams == 0:
        return None
    by_time = 0
    if cost is not None and cost.per_token_s > 0:  # 0 as long as no step had prompt tokens
        by_time = int(_ENTERING_PART * cost.seconds(num_streams) / cost.per_token_s)
    return max(by_time, -(-num_left // _ENTERING_STEPS), MIN_TOKENS)


def replay_s(cost: StepCost | None, num_streams: int) -> float:
    """CPU seconds before the next step in which grammars may follow outputs from elsewhere: a quarter of the step, 5 to
    50 ms, and without streams 50 ms."""
    if num_streams == 0:
        return _MAX_REPLAY_S
    by_time = 0.0 if cost is None else _ENTERING_PART * cost.seconds(num_streams)
    return min(max(by_time, _MIN_REPLAY_S), _MAX_REPLAY_S)


def entering_bound(
    cost: StepCost | None, num_streams: int, prompts: Iterable[tuple[int, bool]], max_tokens: int
) -> int | None:
    """`entering_tokens` of a step of at most `max_tokens`. `prompts`: of each the tokens that are left, and whether it
    has waited for a grammar. None: no bound, since other prompts lengthen the step anyway, or too many enter."""
    num_left = 0
    for num_tokens, is_entering in prompts:
        num_left += num_tokens
        if not is_entering or num_left > _ENTERING_STEPS * max_tokens:
            return None
    return entering_tokens(cost, num_streams, num_left) if num_left else None


def stretched_tokens(cost: StepCost | None, num_streams: int, num_prompts: int, stretch: float) -> int | None:
    """Prompt tokens of the next step that lengthen one of `num_streams` streams alone to `stretch` times, or more where
    some of `num_prompts` wait behind others. None: no bound, while it is not known what tokens cost, and where it would
    be no number."""
    if cost is None or cost.per_token_s <= 0:
        return None
    if num_prompts > 1:
        stretch *= _QUEUED
    num_tokens = (stretch - 1) * cost.seconds(num_streams) / cost.per_token_s
    return max(int(num_tokens), MIN_TOKENS) if math.isfinite(num_tokens) else None


def _paced_s(streams: Sequence[Stream], longest: float) -> float:
    """The longest step, up to `longest` objectives, in which no stream falls behind; those that are lost anyway count
    no more."""
    alive = [min(longest * itl_s, max(_MIN_PACED * itl_s, slack)) for itl_s, slack in streams if slack >= -_LOST_S]
    return min(alive, default=longest * min(stream.itl_s for stream in streams))


def _num_least(cost: StepCost, num_streams: int, streams: Sequence[Stream]) -> int:
    """Tokens of a step in which streams have no time for any: none, if they alone catch up and then have time."""
    itl_s = min(stream.itl_s for stream in streams)
    catches_up = cost.seconds(num_streams) <= _MIN_PACED * itl_s
    return 0 if catches_up and cost.seconds(num_streams, MIN_TOKENS) <= PACE * itl_s else MIN_TOKENS


def _num_needed(cost: StepCost, num_streams: int, prompts: Iterable[Prompt]) -> float:
    """Tokens of each step with which every prompt, behind those before it, is computed in a part of its time left.
    Infinite where no step is long enough, and for prompts without an objective: they take what they can get."""
    ahead, per_s = 0, 0.0
    for num_tokens, left_s in prompts:
        ahead += num_tokens
        per_s = max(per_s, ahead / (_NEEDED * left_s) if 0 < left_s < math.inf else math.inf)
    return _num_at(per_s, cost, num_streams)


def _num_at(per_s: float, cost: StepCost, num_streams: int) -> float:
    """Tokens of each step with which `per_s` are computed in a second. Infinite where no step is long enough."""
    prompt_part = per_s * cost.per_token_s
    return per_s * cost.seconds(num_streams) / (1 - prompt_part) if prompt_part < 1 else math.inf


def _num_urgent(token_s: float, streams: Sequence[Stream], prompts: Iterable[Prompt]) -> int:
    """Tokens of all prompts up to the last urgent one, with no more streams lost than urgent prompts saved."""
    ahead = urgent = num_saved = 0
    for num_tokens, left_s in prompts:
        ahead += num_tokens
        needed_s = ahead * token_s
        if _URGENT * left_s < needed_s <= left_s:
            num_saved += 1
            num_lost = sum(-_LOST_S <= stream.slack_s < needed_s - _LOST_S for stream in streams)
            urgent = ahead if num_lost <= num_saved else urgent
    return urgent


def _token_s(cost: StepCost, num_streams: int, max_tokens: int) -> float:
    """Seconds of a prompt token at full speed."""
    return cost.seconds(num_streams, max_tokens) / max_tokens
