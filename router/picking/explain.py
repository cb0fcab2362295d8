"""Why a request would go where it would go: the plan for it, and every instance's standing, as values.

The plan is the real one (`plan.py:make_plan`) over the same snapshot; nothing is sent and nothing remembered.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from router.choice import Choice
from router.config import DisaggregationSettings
from router.picking import picker
from router.picking.affinity import Affinity
from router.picking.picker import Filter, Pick
from router.picking.plan import Plan, make_plan
from router.picking.scorers import RequestFacts, ScorePart, Scoring
from router.pools.instances import InstanceKey, InstanceView
from router.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Candidate:
    """One instance's standing."""

    view: InstanceView
    rejected: str | None
    """Why it was left out; None when it was scored."""
    parts: tuple[ScorePart, ...] = ()
    picked: bool = False

    @property
    def score(self) -> float:
        """The sum of its parts; lower is better."""
        return sum(part.weight * part.value for part in self.parts)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan with its grounds."""

    decode: tuple[Candidate, ...]
    prefill: tuple[Candidate, ...]
    """For the decode instance that would be picked."""
    disaggregated: bool | None
    """None: it could not be served now."""
    reason: str


def explain(
    decode_views: Sequence[InstanceView],
    prefill_views: Sequence[InstanceView],
    request: GenerationRequest,
    affinity: Affinity,
    settings: DisaggregationSettings,
    rng: random.Random,
) -> Explanation:
    """What would become of `request` now. Ties are broken by `rng`, as for any request."""
    known, num_tokens = affinity.of(request), request.num_prompt_tokens
    criteria, choice = known.criteria(num_tokens), Choice(request, 0)
    plan = make_plan(decode_views, prefill_views, choice, frozenset(), settings, rng, criteria)
    usual = picker.usual_filters()
    if isinstance(plan, Plan):
        decode: InstanceView | None = plan.decode.instance
    else:
        pick = picker.pick(decode_views, usual, rng=rng, scorer=criteria.decode)
        decode = pick.instance if isinstance(pick, Pick) else None
    pairing = [*usual, picker.pairs_with(decode)] if decode else usual
    prefill_key = plan.prefill.instance.key if isinstance(plan, Plan) and plan.prefill else None
    decode_facts, prefill_facts = known.facts("decode", num_tokens), known.facts("prefill", num_tokens)
    return Explanation(
        decode=_candidates(decode_views, usual, affinity.decode, decode_facts, decode.key if decode else None),
        prefill=_candidates(prefill_views, pairing, affinity.prefill, prefill_facts, prefill_key),
        disaggregated=plan.prefill is not None if isinstance(plan, Plan) else None,
        reason=plan.reason if isinstance(plan, Plan) else plan.message,
    )


def _candidates(
    views: Sequence[InstanceView],
    filters: Sequence[Filter],
    scoring: Scoring,
    facts: RequestFacts,
    picked: InstanceKey | None,
) -> tuple[Candidate, ...]:
    """Those that were scored, the best first, then the others."""
    candidates = []
    for view in views:
        if rejected := picker.rejection(view, filters):
            candidates.append(Candidate(view, rejected))
        else:
            candidates.append(Candidate(view, None, scoring.parts(facts, view), view.key == picked))
    return tuple(sorted(candidates, key=_standing))


def _standing(candidate: Candidate) -> tuple[bool, float, bool, str]:
    return candidate.rejected is not None, candidate.score, not candidate.picked, candidate.view.instance_id
