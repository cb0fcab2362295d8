"""Filter, score, pick: which instance a request goes to, as pure functions over one snapshot of a pool.

A filter says why an instance may not be picked, or None. A scorer gives a number, lower is better. `pick` applies
them and returns a `Pick` that tells what it saw, so that a log line can say why.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from router.instances import Identity, InstanceKey, InstanceView

Filter = Callable[[InstanceView], str | None]
Scorer = Callable[[InstanceView], float]


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


def queue_score(view: InstanceView) -> float:
    """`4*waiting + running`, corrected by what this router has sent and seen end since the report.

    Without the correction every request between two reports goes to the same instance. What was sent counts as waiting:
    nothing is known of it yet. Requests that load KV count as running: their blocks are reserved and they will run
    soon.
    """
    waiting = view.load.num_waiting + view.num_unreported
    running = max(view.load.num_running + view.load.num_loading - view.num_ended, 0)
    return 4.0 * waiting + running


def pick(
    views: Sequence[InstanceView],
    filters: Sequence[Filter],
    *,
    rng: random.Random,
    scorer: Scorer = queue_score,
    preferred: InstanceKey | None = None,
) -> Pick | NoPick:
    """The best instance; ties are broken by `rng`. A `preferred` one wins whenever it passes the filters."""
    candidates: list[InstanceView] = []
    rejected: list[Rejection] = []
    for view in views:
        reason = next((reason for check in filters if (reason := check(view)) is not None), None)
        if reason is None:
            candidates.append(view)
        else:
            rejected.append(Rejection(view.instance_id, reason))
    if not candidates:
        return NoPick(tuple(rejected))
    scores = [scorer(view) for view in candidates]
    kept = next((view for view in candidates if view.key == preferred), None)
    tied = [view for view, score in zip(candidates, scores, strict=True) if score == min(scores)]
    winner = kept or rng.choice(tied)
    return Pick(winner, scorer(winner), len(candidates), len(tied), kept is not None, tuple(rejected))
