"""Filter, score, pick: which instance a request goes to, as pure functions over one snapshot of a pool.

A filter says why an instance may not be picked, or None. A scorer (scorers.py) gives a number, lower is
better. `pick` applies them and returns a `Pick` that tells what it saw, so that a log line can say why.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from router.picking.scorers import ViewScorer, queue_score
from router.pools.instances import Identity, InstanceKey, InstanceView

Filter = Callable[[InstanceView], str | None]


@dataclass(frozen=True, slots=True)
class Rejection:
    """One instance that was not considered, and why."""

    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Pick:
    """The choice. `score` is the winner's; `num_candidates` counts those that passed every filter."""

    instance: InstanceView
    score: float
    num_candidates: int
    num_tied: int
    preferred: bool
    rejected: tuple[Rejection, ...]

    @property
    def why(self) -> str:
        """One phrase for the log."""
        how = (
            "kept for its prefix cache" if self.preferred else f"lowest of {self.num_candidates}, {self.num_tied} tied"
        )
        return f"score {self.score:g}, {how}"


@dataclass(frozen=True, slots=True)
class NoPick:
    """Nobody passed the filters."""

    rejected: tuple[Rejection, ...]

    @property
    def why(self) -> str:
        """One phrase for the log: every instance with its reason."""
        return ", ".join(f"{one.instance_id}: {one.reason}" for one in self.rejected) or "the pool is empty"


def ready(view: InstanceView) -> str | None:
    """Only instances that beat, compute and take new requests."""
    return view.out


def not_excluded(excluded: Collection[InstanceKey]) -> Filter:
    """Leaves out the instances that have failed or refused this request."""
    return lambda view: "has failed or refused this request" if view.key in excluded else None


def same_identity(identity: Identity | None) -> Filter:
    """Only instances that compute exactly what `identity` computes; None lets everyone pass."""

    def check(view: InstanceView) -> str | None:
        mismatch = identity.mismatch(view.info.identity) if identity is not None else None
        return f"{mismatch.field} is {mismatch.theirs}, not {mismatch.ours}" if mismatch else None

    return check


def pairs_with(decode: InstanceView) -> Filter:
    """Only prefill instances whose KV the decode instance can take."""

    def check(view: InstanceView) -> str | None:
        mismatch = decode.pairing_mismatch(view)
        return f"{mismatch.field} is {mismatch.theirs}, not {mismatch.ours}" if mismatch else None

    return check


def usual_filters(excluded: Collection[InstanceKey] = (), identity: Identity | None = None) -> list[Filter]:
    """What every pick filters by; those that would let everyone pass are left out."""
    filters: list[Filter] = [ready]
    if excluded:
        filters.append(not_excluded(excluded))
    if identity is not None:
        filters.append(same_identity(identity))
    return filters


def rejection(view: InstanceView, filters: Sequence[Filter]) -> str | None:
    """What the first filter that leaves the instance out says; None when it passes all."""
    for check in filters:
        if (reason := check(view)) is not None:
            return reason
    return None


def pick(
    views: Sequence[InstanceView],
    filters: Sequence[Filter],
    *,
    rng: random.Random,
    scorer: ViewScorer = queue_score,
    preferred: InstanceKey | None = None,
) -> Pick | NoPick:
    """The best instance; ties are broken by `rng`. A `preferred` one wins whenever it passes the filters."""
    candidates: list[InstanceView] = []
    rejected: list[Rejection] = []
    for view in views:
        if (reason := rejection(view, filters)) is None:
            candidates.append(view)
        else:
            rejected.append(Rejection(view.instance_id, reason))
    if not candidates:
        return NoPick(tuple(rejected))
    scores = [scorer(view) for view in candidates]
    best = min(scores)
    tied = [view for view, score in zip(candidates, scores, strict=True) if score == best]
    kept = next((view for view in candidates if view.key == preferred), None) if preferred else None
    winner = kept or rng.choice(tied)
    score = scorer(winner) if kept else best
    return Pick(winner, score, len(candidates), len(tied), kept is not None, tuple(rejected))
