"""Where an attempt runs: a pure decision over snapshots of both pools."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from router.choice import Choice
from router.config import DisaggregationSettings
from router.picking import picker
from router.picking.disaggregation import Decision, Disaggregation, Limits, Situation, decide
from router.picking.picker import NoPick, Pick
from router.picking.scorers import Criteria, RequestFacts, queue_now, waiting_tokens
from router.picking.speeds import Work
from router.pools.instances import InstanceKey, InstanceView

_BY_QUEUE = Criteria()


@dataclass(frozen=True, slots=True)
class Plan:
    """Decided, not begun. Without `prefill` the decode instance prefills by itself."""

    decode: Pick
    prefill: Pick | None
    disaggregation: Disaggregation
    work: Work

    @property
    def reason(self) -> str:
        """Why it is split, or is not, in words."""
        return self.disaggregation.words


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Nobody can serve it now; `why` is for the log, `message` for the client."""

    message: str
    why: str
    disaggregation: Disaggregation | None = None
    """Unless it did not come so far."""


def make_plan(
    decode_views: Sequence[InstanceView],
    prefill_views: Sequence[InstanceView],
    choice: Choice,
    excluded: frozenset[InstanceKey],
    settings: DisaggregationSettings,
    rng: random.Random,
    criteria: Criteria = _BY_QUEUE,
) -> Plan | NoPlan:
    """Picks the decode instance, then a prefill instance that fits it, then decides whether to use the latter.

    A choice prefers the instances named in it: its siblings have just run the same prompt there.
    """
    usual = picker.usual_filters(excluded, choice.required_identity)
    decode = picker.pick(decode_views, usual, rng=rng, scorer=criteria.decode, preferred=choice.decode_key)
    if isinstance(decode, NoPick):
        return NoPlan("no decode instance is available", decode.why)
    prefill = picker.pick(
        prefill_views,
        [*usual, picker.pairs_with(decode.instance)],
        rng=rng,
        scorer=criteria.prefill,
        preferred=choice.prefill_key,
    )
    situation = _situation(choice, decode.instance, prefill, criteria, decode_views, prefill_views)
    disaggregation = decide(
        settings.mode,
        situation,
        limits_of(settings),
        prefill_available=isinstance(prefill, Pick),
        has_begun=choice.num_emitted > 0,
    )
    if disaggregation.decision is Decision.REFUSE:
        why = prefill.why if isinstance(prefill, NoPick) else disaggregation.words
        return NoPlan(disaggregation.words, why, disaggregation)
    if disaggregation.decision is Decision.DISAGGREGATE and isinstance(prefill, Pick):
        num_to_prefill = situation.num_tokens - situation.num_cached_at_prefill
        work = Work(num_to_prefill, situation.num_ahead_at_prefill, situation.num_uncached)
        return Plan(decode, prefill, disaggregation, work)
    return Plan(decode, None, disaggregation, Work(situation.num_uncached, situation.num_ahead_at_decode))


def limits_of(settings: DisaggregationSettings) -> Limits:
    """The constants of `auto`, as set."""
    return Limits(
        min_tokens=settings.min_tokens,
        interruption_weight=settings.interruption_weight,
        expected_streams=settings.expected_streams,
        probe_s=settings.probe_s,
    )


def _situation(
    choice: Choice,
    decode: InstanceView,
    prefill: Pick | NoPick,
    criteria: Criteria,
    decode_views: Sequence[InstanceView],
    prefill_views: Sequence[InstanceView],
) -> Situation:
    """What is known. An instance whose speed was not measured is taken to be as fast as the rest of its pool."""
    decode_per_s = decode.pace.prefill_per_s or _mean(view.pace.prefill_per_s for view in decode_views)
    hand_over_per_s = decode.pace.hand_over_per_s or _mean(view.pace.hand_over_per_s for view in decode_views)
    known = Situation(
        num_tokens=choice.num_tokens,
        num_cached_at_decode=_num_cached(choice, decode, criteria),
        num_ahead_at_decode=_num_ahead(decode),
        num_streams=sum(queue_now(decode)),
        decode_per_s=decode_per_s,
        hand_over_per_s=hand_over_per_s,
    )
    if isinstance(prefill, NoPick):
        return known
    instance = prefill.instance
    return replace(
        known,
        num_cached_at_prefill=_num_cached(choice, instance, criteria),
        num_ahead_at_prefill=_num_ahead(instance),
        prefill_per_s=instance.pace.prefill_per_s or _mean(view.pace.prefill_per_s for view in prefill_views),
        untried_s=instance.pace.untried_s,
    )


def _num_cached(choice: Choice, view: InstanceView, criteria: Criteria) -> int:
    """Tokens that need not be computed there: never the last one, from which the next is drawn."""
    if choice.request.params.prompt_logprobs is not None:
        return 0  # such a request takes nothing from caches
    return max(0, min(criteria.num_cached_tokens(view), choice.num_tokens - 1))


def _num_ahead(view: InstanceView) -> int:
    return int(waiting_tokens(RequestFacts(), view))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
