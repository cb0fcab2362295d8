"""Where an attempt runs: a pure decision over snapshots of both pools."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from router import picker
from router.choice import Choice
from router.config import DisaggregationSettings
from router.disaggregation import Decision, decide
from router.instances import InstanceKey, InstanceView
from router.picker import NoPick, Pick


@dataclass(frozen=True, slots=True)
class Plan:
    """Decided, not begun. Without `prefill` the decode instance prefills by itself."""

    decode: Pick
    prefill: Pick | None
    reason: str


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Nobody can serve it now; `why` is for the log, `message` for the client."""

    message: str
    why: str


def make_plan(
    decode_views: Sequence[InstanceView],
    prefill_views: Sequence[InstanceView],
    choice: Choice,
    excluded: frozenset[InstanceKey],
    settings: DisaggregationSettings,
    rng: random.Random,
) -> Plan | NoPlan:
    """Picks the decode instance, then a prefill instance that fits it, then decides whether to use the latter.

    A choice prefers the instances named in it: its siblings have just run the same prompt there.
    """
    usual = [picker.ready, picker.not_excluded(excluded), picker.same_identity(choice.required_identity)]
    decode = picker.pick(decode_views, usual, rng=rng, preferred=choice.decode_key)
    if isinstance(decode, NoPick):
        return NoPlan("no decode instance is available", decode.why)
    prefill = picker.pick(
        prefill_views, [*usual, picker.pairs_with(decode.instance)], rng=rng, preferred=choice.prefill_key
    )
    # A stream that has begun is better ended by the decode instance alone than not at all, even in `always`.
    resumes_alone = choice.num_emitted > 0 and isinstance(prefill, NoPick)
    decision, reason = decide(
        "auto" if resumes_alone else settings.mode,
        num_tokens=choice.num_tokens,
        prefill_available=isinstance(prefill, Pick),
        min_tokens=settings.min_tokens,
    )
    if decision is Decision.REFUSE or (decision is Decision.DISAGGREGATE and isinstance(prefill, NoPick)):
        return NoPlan(reason, prefill.why if isinstance(prefill, NoPick) else reason)
    if decision is Decision.DISAGGREGATE and isinstance(prefill, Pick):
        return Plan(decode, prefill, reason)
    return Plan(decode, None, reason)
