"""Filter, score, pick: which instance a request goes to, as pure functions over one snapshot of a pool.

A filter returns why an instance may not be picked, or None. A scorer (scorers.py) returns a number, lower is better.
`pick` applies them. While instances with several weights run, `WeightsShares` makes a filter for each new request.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from engine.sampling.constraints import INSTALL_XGRAMMAR
from router.picking.scorers import ViewScorer, queue_score
from router.pools.instance_info import Identity, InstanceKey, InstanceView, Mismatch
from router.request.generation_request import GenerationRequest

Filter = Callable[[InstanceView], str | None]

SHOWN_DIGITS = 12
"""Of a digest of weights, in messages and metrics."""
_DIGEST = re.compile(r"[0-9a-f]{4,}")


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


def has_adapter(name: str) -> Filter:
    """Only instances that have this LoRA adapter."""
    return lambda view: None if name in view.info.lora_adapters else f"does not have the adapter {name}"


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


@dataclass(frozen=True, slots=True)
class WeightsShares:
    """Shares of new requests by the beginning of their weights' digest, such as of a canary; others get what is left.

    the session, else the request ──hash──▶ a point in 0 … 1 ──▶ the share that it falls into ──▶ a filter of both pools

    Pure, without state: every router, choice and attempt of a request draws the same, and a session stays with its
    weights while the shares stay. A larger share keeps the sessions that a smaller one had where it is the first of the
    setting.
    """

    shares: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> WeightsShares:
        """From `digest=share,…`. Raises ValueError, which says what is allowed."""
        shares = tuple(_share(part.strip()) for part in text.split(",") if part.strip())
        total = sum(share for _, share in shares)
        if total > 1 + 1e-9:
            raise ValueError(f"the shares sum to {total:g}; at most 1 is allowed")
        digests = sorted(digest for digest, _ in shares)
        for first, second in pairwise(digests):
            if second.startswith(first):
                raise ValueError(f"{second} continues {first}: one instance would have two shares")
        return cls(shares)

    def filter_for(self, request: GenerationRequest) -> Filter:
        """Passes the instances whose weights the request was drawn for."""
        drawn, point, digests = "", _point(request), tuple(digest for digest, _ in self.shares)
        for digest, share in self.shares:
            if point < share:
                drawn = digest
                break
            point -= share

        def check(view: InstanceView) -> str | None:
            weights = view.info.identity.weights_digest
            if weights.startswith(drawn) if drawn else not weights.startswith(digests):
                return None
            return f"this request was drawn for other weights than {weights[:SHOWN_DIGITS]} (picking.weights_shares)"

        return check


def _point(request: GenerationRequest) -> float:
    """Evenly from 0 to 1, without 1."""
    name = f"session {request.session}" if request.session else f"request {request.request_id}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest()) / 2**48


def _share(text: str) -> tuple[str, float]:
    digest, equals, share = (part.strip() for part in text.partition("="))
    if not equals:
        raise ValueError(f"{digest!r} has no share; write for example {digest}=0.05")
    if not _DIGEST.fullmatch(digest):
        wanted = "at least 4 hexadecimal digits, as `tandem pools --json` shows"
        raise ValueError(f"{digest!r} is no digest of weights: {wanted}")
    try:
        number = float(share)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise ValueError(f"{digest}={share}: a share is a number from 0 to 1")
    return digest, number


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
