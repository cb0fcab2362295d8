"""Scores of instances: scorers by name, and the weighted sum that a pool picks by.

A scorer is a pure function of the facts about a request and of one instance; lower is better, and the number must be
finite. The settings name scorers and weights in one string per pool, such as `queue=1,kv_pressure=2,prefix=3`. A custom
scorer is named `module:Name`: a function like those below, or a class whose instances are callable like them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from engine.errors import shown, suggestion
from engine.imports import CLASS_PATH, named
from protos.tandem.v1 import pools_pb2
from router.pools.instance_info import InstanceKey, InstanceView
from router.request.generation_request import Objectives

WAITING_WEIGHT = 4.0
"""Of a waiting request against a running one."""


def _no_cached_tokens(view: InstanceView) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a scorer may use of a request. Cheap to make: unused facts are not computed."""

    num_tokens: int = 0
    """Whose KV an instance needs before it can go on: the prompt and, after a failover, the emitted tokens."""
    session_at: InstanceKey | None = None
    """Where the request's session ran last in this pool."""
    num_cached_tokens: Callable[[InstanceView], int] = _no_cached_tokens
    """Leading tokens that the instance probably has in its prefix cache."""


Scorer = Callable[[RequestFacts, InstanceView], float]
ViewScorer = Callable[[InstanceView], float]
"""A scorer, or a whole scoring, for one request."""


def queue_now(view: InstanceView) -> tuple[int, int]:
    """Waiting and running: the last report, corrected by what this router has sent and seen end since.

    Counts all requests that must be there. Of them run as many as the instance has room for: those that ran, if others
    waited at the time of the report, else max_num_seqs; but if more tokens to compute were sent than one of its steps
    takes, the rest waits. Requests that load KV count as running: their blocks are reserved.
    """
    load, info = view.load, view.info
    room = load.num_running + load.num_loading
    num_requests = view.num_requests
    is_full = load.num_waiting > 0 or view.num_unreported_to_prefill > info.max_num_batched_tokens > 0
    if not is_full and room < info.max_num_seqs:
        room = info.max_num_seqs
    if num_requests <= room:
        return 0, num_requests
    return num_requests - room, room


def queue(request: RequestFacts, view: InstanceView) -> float:
    """`4*waiting + running`, of the estimated present queue."""
    num_waiting, num_running = queue_now(view)
    return WAITING_WEIGHT * num_waiting + num_running


def waiting_tokens(request: RequestFacts, view: InstanceView) -> float:
    """Tokens that the waiting requests have yet to compute."""
    return float(view.num_waiting_tokens)


def kv_pressure(request: RequestFacts, view: InstanceView) -> float:
    """The fraction of the KV blocks in use with this request, 0 … 1; more than 1 where it would not fit.

    0 while an instance does not report its blocks.
    """
    num_blocks, block_size = view.info.num_blocks, view.info.identity.block_size
    if num_blocks <= 0 or block_size <= 0:
        return 0.0
    return (view.num_used_blocks + (view.num_unreported_tokens + request.num_tokens) / block_size) / num_blocks


def prefix(request: RequestFacts, view: InstanceView) -> float:
    """The fraction of the request's tokens that the instance probably lacks in its prefix cache, 0 … 1."""
    if request.num_tokens <= 0:
        return 0.0
    return max(1.0 - request.num_cached_tokens(view) / request.num_tokens, 0.0)


def session(request: RequestFacts, view: InstanceView) -> float:
    """1 for every instance but the one where the request's session ran last; 0 for all when it has none."""
    return 0.0 if request.session_at in (None, view.key) else 1.0


def other_domain(decode: InstanceView, view: InstanceView) -> float:
    """1 for a prefill instance in another network domain than the decode instance that reads its KV; 0 in the same one,
    or where one of them is unknown. Not for `SCORERS`: it compares a pair."""
    domains = {decode.info.domain, view.info.domain}
    return float(len(domains) == 2 and "" not in domains)


SCORERS: dict[str, Scorer] = {
    scorer.__name__: scorer for scorer in (queue, waiting_tokens, kv_pressure, prefix, session)
}


@dataclass(frozen=True, slots=True)
class Term:
    name: str
    weight: float
    scorer: Scorer


@dataclass(frozen=True, slots=True)
class Scoring:
    """How one pool compares its instances: the sum of weight times value."""

    terms: tuple[Term, ...]

    @classmethod
    def parse(cls, text: str) -> Scoring:
        """From `name=weight,…`; a name alone has weight 1. Raises ValueError, which says what to write instead."""
        terms = tuple(_term(part.strip()) for part in text.split(",") if part.strip())
        names = [term.name for term in terms]
        if not terms:
            raise ValueError(f"names no scorer; write for example queue=1. There are: {', '.join(SCORERS)}")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"names {twice} twice")
        return cls(terms)

    def score(self, request: RequestFacts, view: InstanceView) -> float:
        return sum(term.weight * term.scorer(request, view) for term in self.terms)

    def parts(self, request: RequestFacts, view: InstanceView) -> list[pools_pb2.ScorePart]:
        """The same, term by term."""
        return [
            pools_pb2.ScorePart(scorer=term.name, value=term.scorer(request, view), weight=term.weight)
            for term in self.terms
        ]

    def for_request(self, request: RequestFacts) -> ViewScorer:
        """The scoring as a function of the instance alone."""
        return partial(self.score, request)


queue_score: ViewScorer = partial(queue, RequestFacts())
"""The default, which uses no facts about the request."""


class Aims(NamedTuple):
    """What a request is placed by where instances report what their steps cost."""

    objectives: Objectives
    num_expected: int
    """Output tokens."""
    num_short: int | None = None
    """Output tokens that nine answers of ten exceed; None: not known."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """The inputs of a plan for one request: a scorer per pool, and the tokens that are probably cached."""

    decode: ViewScorer = queue_score
    prefill: ViewScorer = queue_score
    num_cached_tokens: Callable[[InstanceView], int] = _no_cached_tokens
    aims: Aims | None = None
    domain_weight: float = 0.0
    """Of `other_domain` in the score of a prefill instance."""
    drawn_weights: Callable[[InstanceView], str | None] | None = None
    """A filter that passes the weights that a new request was drawn for; None: any."""
    keeps_place: bool = False
    """The request has a place at its decode instance, and keeps it if it stays there."""

    @property
    def has_objectives(self) -> bool:
        """Whether the router's operator has set any."""
        return self.aims is not None and any(self.aims.objectives)

    def prefill_for(self, decode: InstanceView) -> ViewScorer:
        """The scorer of the prefill instances that could hand over to `decode`."""
        if not (self.domain_weight and decode.info.domain):
            return self.prefill
        return lambda view: self.prefill(view) + self.domain_weight * other_domain(decode, view)


def _term(text: str) -> Term:
    name, equals, weight = (part.strip() for part in text.rpartition("=")) if "=" in text else (text, "", "1")
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name}{equals}{weight}: a weight is a number above 0, as in {name}=1")
    return Term(name, number, _scorer(name))


def _scorer(name: str) -> Scorer:
    if name in SCORERS:
        return SCORERS[name]
    if not CLASS_PATH.fullmatch(name):
        known = f"known: {', '.join(SCORERS)}, and module:Name of your own"
        raise ValueError(f"{name!r} is no scorer{suggestion(name, SCORERS, known)}")
    try:
        found = named(name)
        scorer: Scorer = found() if isinstance(found, type) else found
    except (ImportError, AttributeError) as error:
        raise ValueError(f"scorer {name}: {error}") from error
    except Exception as error:  # of its own code: at import, or of its class
        raise ValueError(f"scorer {name}: {type(error).__name__}: {error}") from error
    if not callable(scorer):
        raise ValueError(f"scorer {name} is not a function of (request, view)")
    return partial(_checked, name, scorer)


def _checked(name: str, scorer: Scorer, request: RequestFacts, view: InstanceView) -> float:
    """What a scorer of one's own returns. A number that is not finite would leave no instance to pick."""
    value = scorer(request, view)
    with suppress(TypeError):  # it is no number
        if math.isfinite(value):
            return float(value)
    raise TypeError(f"scorer {name} returned {shown(value)}; it must return a finite number")
