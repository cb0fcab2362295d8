"""What makes one instance better than another: scorers by name, and the weighted sum that a pool picks by.

A scorer is a pure function of what is known of the request and of one instance; lower is better, and the number must
be finite. The settings name scorers and weights in one string per pool, such as `queue=1,kv_pressure=2,prefix=3`. A
scorer of one's own is named `module:Name`: a function like those below, or a class whose instances are called so.
"""

from __future__ import annotations

import difflib
import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from router.pools.instances import InstanceKey, InstanceView


def _nothing_is_known(view: InstanceView) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a scorer may ask about a request. Cheap to make: what no scorer asks for is not computed."""

    num_tokens: int = 0
    """Whose KV an instance needs before it can go on: the prompt and, after a failover, what was emitted."""
    session_at: InstanceKey | None = None
    """Where the request's session ran last in this pool."""
    num_cached_tokens: Callable[[InstanceView], int] = _nothing_is_known
    """Leading tokens that the instance is believed to have in its prefix cache."""


Scorer = Callable[[RequestFacts, InstanceView], float]
ViewScorer = Callable[[InstanceView], float]
"""A scorer, or a whole scoring, for one request."""


def queue_now(view: InstanceView) -> tuple[int, int]:
    """Waiting and running: the last report, corrected by what this router has sent and seen end since.

    Counted are all requests that must be there; how many of them run is what the instance has room for: as many as it
    ran when the report says that others waited, else as many as it has places for. But where more tokens were sent
    than one of its steps takes, they wait. Requests that load KV count as running: their blocks are reserved.
    """
    load, info = view.load, view.info
    room = load.num_running + load.num_loading
    num_requests = load.num_waiting + room + view.num_unreported - view.num_ended
    is_full = load.num_waiting > 0 or view.num_unreported_tokens > info.max_num_batched_tokens > 0
    if not is_full and room < info.max_num_seqs:
        room = info.max_num_seqs
    if num_requests <= room:
        return 0, max(num_requests, 0)
    return num_requests - room, room


def queue(request: RequestFacts, view: InstanceView) -> float:
    """`4*waiting + running`, of the queue as it is likely to be now."""
    num_waiting, num_running = queue_now(view)
    return 4.0 * num_waiting + num_running


def waiting_tokens(request: RequestFacts, view: InstanceView) -> float:
    """Tokens that the waiting requests have yet to compute, those that were sent since the report included."""
    return float(view.load.num_waiting_tokens + view.num_unreported_tokens)


def kv_pressure(request: RequestFacts, view: InstanceView) -> float:
    """The part of the KV blocks in use once this request is there, 0 … 1; more than 1 where it would not fit.

    Cached blocks count as free: they can be taken at any time. 0 while an instance does not tell its blocks.
    """
    num_blocks, block_size = view.info.num_blocks, view.info.identity.block_size
    if num_blocks <= 0 or block_size <= 0:
        return 0.0
    num_used = num_blocks - view.load.free_blocks - view.load.cached_blocks
    return (num_used + (view.num_unreported_tokens + request.num_tokens) / block_size) / num_blocks


def prefix(request: RequestFacts, view: InstanceView) -> float:
    """The part of the request's tokens that the instance is not believed to have in its prefix cache, 0 … 1."""
    if request.num_tokens <= 0:
        return 0.0
    return max(1.0 - request.num_cached_tokens(view) / request.num_tokens, 0.0)


def session(request: RequestFacts, view: InstanceView) -> float:
    """1 for every instance but the one where the request's session ran last; 0 for all when it has none."""
    return 0.0 if request.session_at in (None, view.key) else 1.0


SCORERS: dict[str, Scorer] = {
    scorer.__name__: scorer for scorer in (queue, waiting_tokens, kv_pressure, prefix, session)
}
"""Those with a short name."""
_KNOW_NO_PREFIX = frozenset({"queue", "waiting_tokens", "kv_pressure", "session"})
_CLASS_PATH = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Term:
    """One scorer with its weight."""

    name: str
    weight: float
    scorer: Scorer


@dataclass(frozen=True, slots=True)
class ScorePart:
    """One term's part in one instance's score."""

    scorer: str
    value: float
    weight: float


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

    @property
    def may_ask_for_prefixes(self) -> bool:
        """Whether a scorer may look at what is cached where; False spares the index."""
        return any(term.name not in _KNOW_NO_PREFIX for term in self.terms)

    def score(self, request: RequestFacts, view: InstanceView) -> float:
        """The instance's standing for this request; lower is better."""
        return sum(term.weight * term.scorer(request, view) for term in self.terms)

    def parts(self, request: RequestFacts, view: InstanceView) -> tuple[ScorePart, ...]:
        """The same, term by term, for people."""
        return tuple(ScorePart(term.name, term.scorer(request, view), term.weight) for term in self.terms)

    def for_request(self, request: RequestFacts) -> ViewScorer:
        """The scoring as a function of the instance alone."""
        if len(self.terms) == 1 and self.terms[0].weight == 1.0:
            return partial(self.terms[0].scorer, request)
        return partial(self.score, request)


QUEUE_ALONE = Scoring((Term("queue", 1.0, queue),))
"""The default."""
queue_score: ViewScorer = QUEUE_ALONE.for_request(RequestFacts())
"""The default for any request: it asks nothing of it."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """What a plan for one request goes by: a scorer per pool, and what is believed to be cached."""

    decode: ViewScorer = queue_score
    prefill: ViewScorer = queue_score
    num_cached_tokens: Callable[[InstanceView], int] = _nothing_is_known


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
    if (path := _CLASS_PATH.fullmatch(name)) is None:
        similar = difflib.get_close_matches(name, SCORERS, n=1, cutoff=0.5)
        hint = f"did you mean {similar[0]}? " if similar else ""
        raise ValueError(f"{name!r} is no scorer; {hint}There are: {', '.join(SCORERS)}, and module:Name of your own")
    try:
        found = getattr(importlib.import_module(path[1]), path[2])
    except (ImportError, AttributeError) as error:
        raise ValueError(f"scorer {name}: {error}") from error
    scorer: Scorer = found() if isinstance(found, type) else found
    if not callable(scorer):
        raise ValueError(f"scorer {name} is not a function of (request, view)")
    return scorer
