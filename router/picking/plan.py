"""Where an attempt runs: a pure decision over snapshots of both pools, and its explanation for operators.

filter, score, pick a decode instance ─▶ a prefill instance that can pair with it ─▶ split or not ─▶ Plan | NoPlan

In `auto` measured step costs decide (placement.py): with objectives over all instances at once, without them over the
two that were picked. Where every request is split (`always`), only decode instances with such a prefill instance are
candidates, so that a pair is found whenever there is one. Elsewhere each decode instance can serve alone. Where weights
have shares (`WeightsShares`), a new request stays with those that it was drawn for as long as an instance of them has
room.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from protos.tandem.v1 import pools_pb2
from router.picking import picker
from router.picking.affinity import Affinity, RequestAffinity
from router.picking.disaggregation import Decision, Disaggregation, Reason, Situation, decide
from router.picking.picker import Filter, NoPick, Pick
from router.picking.placement import STEP_STRETCH, AimSource, Plan, place_by_step_costs
from router.picking.scorers import Criteria, RequestFacts, Scoring, other_domain, queue_now
from router.picking.settings import DisaggregationSettings
from router.pools.instance_info import InstanceKey, InstanceView
from router.pools.throughput import Work
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest

_BY_QUEUE = Criteria()


@dataclass(frozen=True, slots=True)
class NoPlan:
    """No instance can serve the request now; `why` is for the log, `message` for the client."""

    message: str
    why: str
    disaggregation: Disaggregation | None = None
    """None if no decode instance was found."""


def make_plan(
    decode_views: Sequence[InstanceView],
    prefill_views: Sequence[InstanceView],
    choice: Choice,
    excluded: frozenset[InstanceKey],
    settings: DisaggregationSettings,
    rng: random.Random,
    criteria: Criteria = _BY_QUEUE,
) -> Plan | NoPlan:
    """Picks the decode instance, then a prefill instance that fits it, then decides whether one or both serve the
    request; in `auto` with objectives all of it at once.

    A choice prefers the instances that it names: its siblings have just run the same prompt there. A decode instance
    without a place for it is not preferred to one that has a place.
    """
    filters = [picker.ready, picker.not_excluded(excluded), picker.has_context(choice.request.max_length)]
    if choice.required_identity is not None:
        filters.append(picker.same_identity(choice.required_identity))
    if (constraint := choice.request.params.constraint_name) is not None:
        filters.append(picker.supports_constraint(constraint))
    if lora := choice.request.lora:
        filters.append(picker.has_adapter(lora))
    filters += _of_weights(decode_views, prefill_views, choice, filters, settings, criteria)
    if settings.mode == "auto" and criteria.has_objectives:
        may_split = not _is_at_last_token(choice)
        placed = _by_step_costs([*prefill_views, *decode_views], choice, filters, rng, criteria, may_split=may_split)
        if placed is not None:
            has_prefill = any(picker.rejection(view, filters) is None for view in prefill_views)
            return placed if has_prefill else _without_prefill(placed)
    candidates = servable(decode_views, prefill_views, settings, filters)
    uncached = partial(_quarters_uncached, choice, criteria)
    decode = picker.pick(
        # Without a candidate, for a stream that has begun and goes on alone.
        _where_it_has_place(choice, candidates or decode_views, filters, criteria),
        filters,
        rng=rng,
        scorer=criteria.decode,
        among_tied=uncached,
        preferred=choice.decode_key,
    )
    if isinstance(decode, NoPick):
        return NoPlan(_without_decode(choice, decode_views), decode.why)
    runs_there = any(view.key == choice.decode_key for view in prefill_views)
    prefill = picker.pick(
        prefill_views,
        [*filters, picker.pairs_with(decode.instance)],
        rng=rng,
        scorer=criteria.prefill_for(decode.instance),
        among_tied=uncached,
        preferred=choice.decode_key if runs_there else choice.prefill_key,
    )
    situation = _situation(choice, decode.instance, prefill, criteria, decode_views, prefill_views)
    why = f"decode: {decode.why}"
    both = f"{why}; prefill: {prefill.why}"
    if (
        settings.mode == "auto"
        and settings.speed_smoothing
        and isinstance(prefill, Pick)
        and not criteria.has_objectives
    ):
        picked = [prefill.instance, decode.instance]
        may_split = situation.num_uncached > settings.min_tokens and not _is_at_last_token(choice)
        placed = _by_step_costs(picked, choice, filters, rng, criteria, may_split=may_split)
        if placed is not None:
            return replace(placed, why=f"{both}; {placed.why}", step_stretch=STEP_STRETCH)
    disaggregation = decide(
        situation,
        settings,
        prefill_available=isinstance(prefill, Pick),
        has_begun=choice.num_emitted > 0,
    )
    if disaggregation.decision is Decision.REFUSE:
        why = prefill.why if isinstance(prefill, NoPick) else disaggregation.explanation
        mine = decode.instance
        unpaired = picker.difference(mine.instance_id, mine.pairing_mismatch, prefill_views)
        return NoPlan(_with(disaggregation.explanation, unpaired), why, disaggregation)
    if disaggregation.decision is Decision.DISAGGREGATE and isinstance(prefill, Pick):
        num_to_prefill = situation.num_tokens - situation.num_cached_at_prefill
        if _is_at_last_token(choice):
            explanation = "one token is left: the prefill instance ends the request, and nothing is handed over"
            alone = Disaggregation(Decision.LOCAL, Reason.LAST_TOKEN, explanation)
            return Plan(prefill.instance, None, alone, Work(num_to_prefill, situation.num_ahead_at_prefill), both)
        work = Work(num_to_prefill, situation.num_ahead_at_prefill, situation.num_uncached)
        return Plan(decode.instance, prefill.instance, disaggregation, work, both)
    work = Work(situation.num_uncached, situation.num_ahead_at_decode)
    return Plan(decode.instance, None, disaggregation, work, why)


def _of_weights(
    decode_views: Sequence[InstanceView],
    prefill_views: Sequence[InstanceView],
    choice: Choice,
    filters: Sequence[Filter],
    settings: DisaggregationSettings,
    criteria: Criteria,
) -> list[Filter]:
    """Those of the first choice for a further one, else those that are drawn, where they have room. None for a stream
    that has begun, which stays with its own, and where no instance with them may be picked."""
    if choice.required_identity is not None:
        return []
    first, wanted = choice.preferred_identity, criteria.drawn_weights
    if first is not None:
        wanted = picker.same_identity(first)
    if wanted is None:
        return []
    candidates = servable(decode_views, prefill_views, settings, [*filters, wanted])
    has_any = candidates if first is not None else any(has_place(view, choice.num_tokens) for view in candidates)
    return [wanted] if has_any else []


def _by_step_costs(
    views: Sequence[InstanceView],
    choice: Choice,
    filters: Sequence[Filter],
    rng: random.Random,
    criteria: Criteria,
    *,
    may_split: bool,
) -> Plan | None:
    """The best place among `views`. None: none has room, or none reports what its steps cost."""
    if criteria.aims is None:
        return None
    views = [view for view in views if picker.rejection(view, filters) is None and _has_place(choice, view, criteria)]
    kept = {choice.decode_key, choice.prefill_key}  # where the prompt has just run
    if any(view.key == choice.decode_key for view in views):
        views = [view for view in views if view.key in kept]
    return place_by_step_costs(
        views,
        criteria.aims,
        lambda view: choice.num_tokens - _num_cached(choice, view, criteria),
        rng,
        may_split=may_split,
    )


def _where_it_has_place(
    choice: Choice, views: Sequence[InstanceView], filters: Sequence[Filter], criteria: Criteria
) -> Sequence[InstanceView]:
    """`views`; without those that have no place if the instance that it prefers is one, and another has a place."""
    kept = next((view for view in views if view.key == choice.decode_key), None)
    if kept is None or _has_place(choice, kept, criteria) or picker.rejection(kept, filters) is not None:
        return views
    able = [view for view in views if picker.rejection(view, filters) is None and _has_place(choice, view, criteria)]
    return able or views


def _has_place(choice: Choice, view: InstanceView, criteria: Criteria) -> bool:
    """Whether there is a place for the choice. A further one shares the blocks of the prompt that the first one has."""
    if view.key != choice.decode_key:
        return has_place(view, choice.num_tokens)
    is_further = not (choice.stream_epoch or choice.num_emitted)
    return criteria.keeps_place or has_place(view, 0 if is_further else choice.num_tokens)


def _without_prefill(plan: Plan) -> Plan:
    """`plan`, whose reason is that there was no choice."""
    explanation = f"no prefill instance is available: {plan.disaggregation.explanation}"
    return replace(plan, disaggregation=Disaggregation(Decision.LOCAL, Reason.NO_PREFILL, explanation))


def has_place(view: InstanceView, num_tokens: int) -> bool:
    """Whether the instance has a slot, behind all that was sent to it, and blocks for a request of `num_tokens` now."""
    num_waiting, num_running = queue_now(view)
    is_full = 0 < view.info.max_num_seqs <= num_waiting + num_running
    return has_room(view, num_tokens) and not is_full


def _without_decode(choice: Choice, decode_views: Sequence[InstanceView]) -> str:
    """The message for the client. It names what no instance supports, because waiting would not help."""
    constraint = choice.request.params.constraint_name
    if constraint is not None and (problem := picker.unsupported_constraint(constraint, decode_views)) is not None:
        return f"no decode instance supports {problem}"
    lora = choice.request.lora
    if lora and decode_views and not any(lora in view.info.lora_adapters for view in decode_views):
        return f"no decode instance has the adapter {lora}"
    unlike, begun = None, choice.required_identity
    if begun is not None:
        unlike = picker.difference("the stream", lambda view: begun.mismatch(view.info.identity), decode_views)
    return _with("no decode instance is available", unlike)


def _with(problem: str, reason: str | None) -> str:
    return f"{problem}: {reason}" if reason else problem


def servable(
    decode_views: Sequence[InstanceView],
    prefill_views: Sequence[InstanceView],
    settings: DisaggregationSettings,
    filters: Sequence[Filter] = (picker.ready,),
) -> list[InstanceView]:
    """The decode instances that a new request could go to, of those that pass `filters`."""
    filters = _for_new(prefill_views, settings, filters)
    return [view for view in decode_views if picker.rejection(view, filters) is None]


def _for_new(
    prefill_views: Sequence[InstanceView], settings: DisaggregationSettings, filters: Sequence[Filter]
) -> Sequence[Filter]:
    """With what a decode instance must pass for a new request."""
    return [*filters, picker.has_partner(prefill_views, filters)] if settings.mode == "always" else filters


def _situation(
    choice: Choice,
    decode: InstanceView,
    prefill: Pick | NoPick,
    criteria: Criteria,
    decode_views: Sequence[InstanceView],
    prefill_views: Sequence[InstanceView],
) -> Situation:
    """An instance whose speed is not measured is assumed to be as fast as the mean of its pool."""
    speed, pool = decode.throughput, [view.throughput for view in decode_views]
    situation = Situation(
        num_tokens=choice.num_tokens,
        num_cached_at_decode=_num_cached(choice, decode, criteria),
        num_ahead_at_decode=decode.num_waiting_tokens,
        num_streams=sum(queue_now(decode)),
        decode_per_s=speed.prefill_per_s or _mean(one.prefill_per_s for one in pool),
        hand_over_per_s=speed.hand_over_per_s or _mean(one.hand_over_per_s for one in pool),
    )
    if isinstance(prefill, NoPick):
        return situation
    speed, pool = prefill.instance.throughput, [view.throughput for view in prefill_views]
    return replace(
        situation,
        num_cached_at_prefill=_num_cached(choice, prefill.instance, criteria),
        num_ahead_at_prefill=prefill.instance.num_waiting_tokens,
        prefill_per_s=speed.prefill_per_s or _mean(one.prefill_per_s for one in pool),
        since_prefill_s=speed.since_prefill_s,
    )


def _is_at_last_token(choice: Choice) -> bool:
    """Whether the token that its prompt ends with is the last that the request may have."""
    return choice.num_emitted + 1 >= choice.request.max_tokens


def _num_cached(choice: Choice, view: InstanceView, criteria: Criteria) -> int:
    """Tokens that need not be computed there: never the last one, from which the next is drawn."""
    if choice.request.params.prompt_logprobs is not None:
        return 0  # such a request takes nothing from caches
    return max(0, min(criteria.num_cached_tokens(view), choice.num_tokens - 1))


def _quarters_uncached(choice: Choice, criteria: Criteria, view: InstanceView) -> int:
    """Less than a quarter in the cache counts as nothing: chats with the same few tokens at their beginning are to be
    spread over a pool's caches."""
    return -(4 * _num_cached(choice, view, criteria) // choice.num_tokens)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def has_room(view: InstanceView, num_tokens: int) -> bool:
    """Whether the instance's last report leaves blocks for `num_tokens` and a next one; unknown sizes count as room."""
    block_size = view.info.identity.block_size
    if not view.info.num_blocks or not block_size:
        return True
    return view.load.usable_blocks > num_tokens // block_size


def explain(
    decode_views: Sequence[InstanceView],
    prefill_views: Sequence[InstanceView],
    request: GenerationRequest,
    affinity: Affinity,
    settings: DisaggregationSettings,
    aims: AimSource,
    rng: random.Random,
) -> pools_pb2.ExplainPickResponse:
    """The plan that `make_plan` would make for `request` now: each instance's score, or why it was left out, and the
    pairs. Nothing is recorded."""
    known, num_tokens = RequestAffinity(affinity, request), request.num_prompt_tokens
    criteria, choice = replace(known.criteria(num_tokens), aims=aims.of(request, is_first=True)), Choice(request, 0)
    plan = make_plan(decode_views, prefill_views, choice, frozenset(), settings, rng, criteria)
    filters: list[Filter] = [picker.ready, picker.has_context(request.max_length)]
    if request.lora:
        filters.append(picker.has_adapter(request.lora))
    filters += _of_weights(decode_views, prefill_views, choice, filters, settings, criteria)
    if isinstance(plan, Plan):
        decode: InstanceView | None = plan.decode
    else:
        pick = picker.pick(decode_views, filters, rng=rng, scorer=criteria.decode)
        decode = pick.instance if isinstance(pick, Pick) else None
    pairing = [*filters, picker.pairs_with(decode)] if decode else filters
    prefill_key = plan.prefill.key if isinstance(plan, Plan) and plan.prefill else None
    if decode is not None and decode.info.role == "prefill":  # it runs there alone
        prefill_key, pairing = decode.key, filters
        decode = None
    decode_facts, prefill_facts = known.facts("decode", num_tokens), known.facts("prefill", num_tokens)
    decode_filters = _for_new(prefill_views, settings, filters) if isinstance(plan, Plan) else filters
    decode_key = decode.key if decode else None
    candidates = _candidates(decode_views, decode_filters, affinity.decode, decode_facts, decode_key)
    _add_partners(candidates, decode_views, prefill_views)
    prefill = _candidates(prefill_views, pairing, affinity.prefill, prefill_facts, prefill_key, decode, criteria)
    return pools_pb2.ExplainPickResponse(
        decode=candidates,
        prefill=prefill,
        disaggregated=plan.prefill is not None if isinstance(plan, Plan) else None,
        reason=plan.disaggregation.explanation if isinstance(plan, Plan) else plan.message,
    )


def _candidates(
    views: Sequence[InstanceView],
    filters: Sequence[Filter],
    scoring: Scoring,
    facts: RequestFacts,
    picked: InstanceKey | None,
    reader: InstanceView | None = None,
    criteria: Criteria = _BY_QUEUE,
) -> list[pools_pb2.Candidate]:
    """The scored instances, the best first, then the others; for a `reader` those of the prefill pool."""
    candidates = []
    for view in views:
        candidate = pools_pb2.Candidate(instance_id=view.instance_id, address=view.key.address)
        if rejected := picker.rejection(view, filters):
            candidate.rejected = rejected
        else:
            candidate.parts.extend(scoring.parts(facts, view))
            if reader is not None and reader.info.domain and criteria.domain_weight:
                value, weight = other_domain(reader, view), criteria.domain_weight
                candidate.parts.append(pools_pb2.ScorePart(scorer="other_domain", value=value, weight=weight))
            candidate.score = sum(part.weight * part.value for part in candidate.parts)
            candidate.picked = view.key == picked
        candidates.append(candidate)
    return sorted(candidates, key=lambda one: (one.rejected != "", one.score, not one.picked, one.instance_id))


def _add_partners(
    candidates: list[pools_pb2.Candidate], decode_views: Sequence[InstanceView], prefill_views: Sequence[InstanceView]
) -> None:
    views = {view.key.address: view for view in decode_views}
    for candidate in candidates:
        filters = [picker.ready, picker.pairs_with(views[candidate.address])]
        partners = [view.instance_id for view in prefill_views if picker.rejection(view, filters) is None]
        candidate.partners.extend(sorted(partners))
