"""Speculation by prompt lookup: tokens that a stream probably gets are verified in the step that computes its next one.

    the stream's last three tokens ─▶ where they were before ─▶ the tokens that followed there: its draft
    step: last token, draft ─▶ a sampled token for each ─▶ kept up to the first that differs from the draft's

What is sampled depends on the tokens before it, on the seed and on its position alone. So a stream has the same tokens
as without drafts, at any temperature, where other engines keep its distribution at best. Source of the drafts: Saxena,
"Prompt Lookup Decoding", 2023.

The i-th token of a draft is kept with probability p^i, p being how often predictions for this stream were right lately,
those that were not computed included. A step computes as many tokens of drafts, the most probable ones of all streams,
as give the most tokens per second: so there are no drafts where predictions are wrong, or where steps are bound by
compute. After several steps without drafts, only some look for predictions until there is one. For the sake of streams
without drafts a step takes no longer than the streams' inter-token objective, and at most twice as long as without.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol
from weakref import WeakKeyDictionary

from engine.core.messages import StepCost
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.request import Request
from engine.scheduling.scheduler_output import ScheduledRequest, SchedulerOutput
from engine.scheduling.step_cost import StepTimes

_NUM_SAME = 3
"""Tokens that have to be the same for a prediction."""
_FIRST_RATE, _FIRST_WEIGHT = 0.5, 2
"""Of predictions for a new stream: as if so many had been observed."""
_SMOOTHING = 1 / 16
_LEAST_RATE = 0.1
"""Tokens that are right less often are not considered."""
_LEAST_GAIN = 1.05
"""Of tokens per second by drafts: less is within the errors of the estimates."""
_MAX_STRETCH = 2.0
"""Of a step by drafts."""
_MANY_WITHOUT, _RARELY = 8, 4
"""After so many steps of streams without drafts, one in so many looks for some: 3 % of a small model's step."""
_MAX_SEARCHED = 131072
"""Of the last tokens: some 50 us for each stream and step, at most 250."""
_NUM_CODE_POINTS = sys.maxunicode + 1


class Predictor(Protocol):
    """Predicts the tokens of one stream."""

    def predict(self, token_ids: list[int], most: int) -> list[int]:
        """Up to `most` tokens that follow `token_ids`: those of the last call, and what has come since."""


class PromptLookup:
    """Predicts what followed when the last tokens were the same before."""

    def __init__(self) -> None:
        self._text = ""

    def predict(self, token_ids: list[int], most: int) -> list[int]:
        """As `Predictor.predict`: `most` tokens, or none."""
        self._text += _as_text(token_ids[len(self._text) :])
        num_tokens = len(self._text)
        at = self._text.rfind(self._text[-_NUM_SAME:], max(0, num_tokens - _MAX_SEARCHED), num_tokens - 1)
        if at < 0 or most <= 0:
            return []
        first = at + _NUM_SAME
        predicted = token_ids[first : first + most]
        while len(predicted) < most:  # what repeats, repeats again
            predicted.append(predicted[first - len(token_ids)])
        return predicted


def _as_text(token_ids: list[int]) -> str:
    """A character for each token: a text is searched in microseconds, and no match begins inside of a token."""
    try:
        return array("I", token_ids).tobytes().decode("utf-32-le", "surrogatepass")
    except UnicodeDecodeError:  # of an id beyond all characters: two ids have one, and at worst a draft is wrong
        return "".join(chr(token_id % _NUM_CODE_POINTS) for token_id in token_ids)


@dataclass(slots=True)
class _Stream:
    predictor: Predictor
    prediction: list[int] = field(default_factory=list)
    """Of the next tokens; what is computed of it is the draft."""
    hit_rate: float = _FIRST_RATE
    num_observed: int = _FIRST_WEIGHT

    def observe(self, token_ids: Sequence[int]) -> None:
        """The tokens that have followed."""
        for predicted, token_id in zip(self.prediction, token_ids, strict=False):
            is_hit = predicted == token_id
            self.num_observed += 1
            self.hit_rate += max(_SMOOTHING, 1 / self.num_observed) * (is_hit - self.hit_rate)
            if not is_hit:
                break
        self.prediction = []


class Drafter:
    """The drafts of one engine's streams. Owned by the scheduler."""

    def __init__(
        self,
        most: int = 0,
        *,
        max_num_rows: int = 0,
        max_model_len: int = 0,
        predictor: Callable[[Request], Predictor] = lambda _: PromptLookup(),
        num_admitted: Callable[[Request, list[int]], int] = lambda _, token_ids: len(token_ids),
    ) -> None:
        """`most`: tokens of one draft; `max_num_rows`: single tokens of a step, those of drafts included; `predictor`:
        makes that of a request; `num_admitted`: how many of these next tokens the request's constraint admits."""
        self._most = most
        self._max_num_rows = max_num_rows
        self._max_model_len = max_model_len
        self._predictor = predictor
        self._num_admitted = num_admitted
        self._streams: WeakKeyDictionary[Request, _Stream] = WeakKeyDictionary()
        self._times = StepTimes()
        self._num_without = 0
        """Steps since the last one with drafts."""

    def add(self, scheduled: list[ScheduledRequest], cost: StepCost | None, budget: int, kv: KVCacheManager) -> None:
        """Add drafts to the shares of streams, with blocks for them. `budget`: tokens of the whole step."""
        if not self._most or cost is None:
            return
        output, specs = SchedulerOutput(scheduled), [share.request.spec for share in scheduled]
        num_left = min(budget - output.num_tokens, self._max_num_rows - output.num_streams)
        drafted = [index for index, share in enumerate(scheduled) if share.num_tokens == 1 and _may_draft(share)]
        if num_left <= 0 or not drafted:
            return
        self._num_without += 1
        if self._num_without > _MANY_WITHOUT and self._num_without % _RARELY:
            return
        streams = [self._predicted(scheduled[index].request) for index in drafted]
        candidates = [(stream.hit_rate, len(stream.prediction)) for stream in streams]
        num_left = min(num_left, sum(length for _, length in candidates))
        num_prompt_tokens = output.num_tokens - output.num_streams
        times = self._times.seconds(output.num_streams, num_left, cost.per_stream_s, may_try=not num_prompt_tokens)
        if not times:  # a step without drafts shows what it takes
            return
        prompts_s = cost.per_token_s * num_prompt_tokens
        lengths = draft_lengths(
            [seconds + prompts_s for seconds in times],
            output.num_streams,
            candidates,
            min((spec.itl_s for spec in specs if spec.itl_s is not None), default=math.inf),
        )
        for index, stream, length in zip(drafted, streams, lengths, strict=True):
            share = scheduled[index]
            if length and kv.allocate(share.request, share.request.num_tokens + length):
                scheduled[index] = replace(share, draft=stream.prediction[:length])
                self._num_without = 0

    def record(self, output: SchedulerOutput, seconds: float) -> None:
        """A step took so long."""
        if self._most and output.num_tokens == output.num_streams:
            self._times.record(output.num_tokens, seconds)

    def observe(self, request: Request, token_ids: Sequence[int]) -> None:
        """These tokens of a request were sampled."""
        if self._most and (stream := self._streams.get(request)) is not None:
            stream.observe(token_ids)

    def _predicted(self, request: Request) -> _Stream:
        stream = self._streams.get(request)
        if stream is None:
            stream = self._streams[request] = _Stream(self._predictor(request))
        most, max_tokens = self._max_model_len - request.num_tokens, request.spec.params.max_tokens
        if max_tokens is not None:
            most = min(most, max_tokens - request.num_output_tokens)
        # Without a draft the step has a token as well.
        prediction = stream.predictor.predict(request.token_ids, min(self._most, most - 1))
        ending_ids = request.spec.ending_token_ids  # none needs a token behind it, and it comes without a draft
        prediction = list(takewhile(lambda token_id: token_id not in ending_ids, prediction))
        stream.prediction = prediction[: self._num_admitted(request, prediction)]
        return stream


def _may_draft(share: ScheduledRequest) -> bool:
    """Whether tokens behind the request's next one can be sampled in the same step: where they are computed here."""
    return share.samples and not share.request.is_handed_over


def draft_lengths(
    times: Sequence[float], num_streams: int, candidates: Sequence[tuple[float, int]], itl_s: float = math.inf
) -> list[int]:
    """How many tokens of each draft a step computes beside one of each of `num_streams`.

    `times`: of a step by how many tokens of drafts it has, from none to as many as it may have; `candidates`: of each
    draft, the probability that a token is right if those before it are, and its length; `itl_s`: the objective of the
    streams, which holds unless a step takes longer anyway."""
    places = ((rate**place, index) for index, (rate, length) in enumerate(candidates) for place in range(1, length + 1))
    gains = sorted((gain for gain in places if gain[0] >= _LEAST_RATE), reverse=True)
    longest_s = min(_MAX_STRETCH * times[0], itl_s if times[0] <= itl_s else math.inf)
    num_tokens, best, num_best = float(num_streams), _LEAST_GAIN * num_streams / times[0], 0
    for num_drafted, ((gain, _), seconds) in enumerate(zip(gains, times[1:], strict=False), 1):
        num_tokens += gain
        if seconds <= longest_s and num_tokens / seconds > best:
            best, num_best = num_tokens / seconds, num_drafted
    drafted = Counter(index for _, index in gains[:num_best])
    return [drafted[index] for index in range(len(candidates))]
