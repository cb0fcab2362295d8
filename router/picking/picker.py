"""Filter, score, pick: which instance a request goes to, as pure functions over one snapshot of a pool.

A filter returns why an instance may not be picked, or None. A scorer (scorers.py) returns a number, lower is better.
`pick` applies them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.sampling.constraints import INSTALL_XGRAMMAR
from router.picking.scorers import ViewScorer, queue_score
from router.pools.instance_info import Identity, InstanceKey, InstanceView, Mismatch

Filter = Callable[[InstanceView], str | None]


class Pick(NamedTuple):
    """The picked instance. `why` is for the log: its score, and of how many that passed the filters."""

    instance: InstanceView
    why: str


@dataclass(frozen=True, slots=True)
class NoPick:
    """No instance passed the filters. `why` is for the log: every instance with its reason."""

    why: str


def ready(view: InstanceView) -> str | None:
    """Only instances that report, compute and accept new requests."""
    return view.out


def not_excluded(excluded: Collection[InstanceKey]) -> Filter:
    """Without the instances that have failed or refused this request."""
    return lambda view: "has failed or refused this request" if view.key in excluded else None


def same_identity(identity: Identity) -> Filter:
    """Only instances that compute exactly what `identity` computes."""
    return lambda view: _described(identity.mismatch(view.info.identity))


def supports_constraint(name: str) -> Filter:
    """Only instances that do not ignore this field of a request."""

    def check(view: InstanceView) -> str | None:
        supported = view.info.constraints
        return None if name in supported else f"does not support {_unsupported(name, has_others=bool(supported))}"

    return check


def unsupported_constraint(name: str, views: Sequence[InstanceView]) -> str | None:
    """What none of the instances supports, for the client; None if one does, or there are none."""
    if not views or any(name in view.info.constraints for view in views):
        return None
    return _unsupported(name, has_others=any(view.info.constraints for view in views))


def _unsupported(name: str, *, has_others: bool) -> str:
    return name if has_others else f"constraints, which require a tokenizer and xgrammar ({INSTALL_XGRAMMAR})"


def has_context(num_tokens: int) -> Filter:
    """Only instances that accept requests of so many tokens, prompt and output; an unknown limit is none."""

    def check(view: InstanceView) -> str | None:
        most = view.info.max_model_len
        return f"its context of {most} tokens is too short" if 0 < most < num_tokens else None

    return check


def pairs_with(decode: InstanceView) -> Filter:
    """Only prefill instances whose KV the decode instance can load."""
    return lambda view: _described(decode.pairing_mismatch(view))


def has_partner(prefill: Sequence[InstanceView], filters: Sequence[Filter]) -> Filter:
    """Only decode instances that can load the KV of one of the `prefill` instances that pass `filters`."""
    kinds = {view.info.pairing: view for view in prefill if rejection(view, filters) is None}

    def check(decode: InstanceView) -> str | None:
        if decode.info.pairing in kinds:
            return None
        reasons = [f"{view.instance_id}: {pairs_with(decode)(view)}" for view in kinds.values()]
        return f"no prefill instance pairs with it ({'; '.join(reasons) or 'none is available'})"

    return check


def difference(
    name: str, mismatch: Callable[[InstanceView], Mismatch | None], views: Sequence[InstanceView]
) -> str | None:
    """For the client: in what the ready instances differ from `name`, where that excludes all of them."""
    found = [(view.instance_id, mismatch(view)) for view in views if ready(view) is None]
    instance_id, first = found[0] if found else ("", None)
    if first is None or any(one is None for _, one in found):
        return None
    return f"{first.field} of {instance_id} is {first.theirs}, of {name} {first.ours}"


def _described(mismatch: Mismatch | None) -> str | None:
    return f"{mismatch.field} is {mismatch.theirs}, not {mismatch.ours}" if mismatch else None


def rejection(view: InstanceView, filters: Sequence[Filter]) -> str | None:
    """The reason of the first filter that rejects the instance; None when it passes all."""
    return next((reason for check in filters if (reason := check(view)) is not None), None)


def pick(
    views: Sequence[InstanceView],
    filters: Sequence[Filter],
    *,
    rng: random.Random,
    scorer: ViewScorer = queue_score,
    among_tied: ViewScorer | None = None,
    preferred: InstanceKey | None = None,
) -> Pick | NoPick:
    """The best instance. Of several `rng` draws one, whose place one of the same identity takes that is better by
    `among_tied`. A `preferred` one wins whenever it passes the filters."""
    candidates = [view for view in views if rejection(view, filters) is None]
    if not candidates:
        reasons = ", ".join(f"{view.instance_id}: {rejection(view, filters)}" for view in views)
        return NoPick(reasons or "the pool is empty")
    kept = next((view for view in candidates if view.key == preferred), None) if preferred else None
    if kept is not None:
        return Pick(kept, f"score {scorer(kept):g}, kept for its prefix cache")
    tied = _lowest(candidates, scorer)
    winner, how = rng.choice(tied), f"{len(tied)} tied"
    if among_tied is not None and len(tied) > 1:
        alike = [view for view in tied if view.info.identity == winner.info.identity]
        closest = _lowest(alike, among_tied)
        if len(closest) < len(alike):
            how += ", by what is cached"
        if winner not in closest:
            winner = rng.choice(closest)
    return Pick(winner, f"score {scorer(winner):g}, lowest of {len(candidates)}, {how}")


def _lowest(views: Sequence[InstanceView], scorer: ViewScorer) -> list[InstanceView]:
    scores = [scorer(view) for view in views]
    best = min(scores)
    return [view for view, score in zip(views, scores, strict=True) if score == best]
