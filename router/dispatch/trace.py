"""The record of one request: every event is reported here once, and everything that observes requests is fed from here.

    RequestTrace    received ─▶ validated ─▶ admitted ─▶ choices ─▶ ended    log line, trailers, metrics, span stages
    ChoiceTrace     picking ─▶ attempt ─▶ closed                             span stages
                       ▲───failed───┘
    AttemptTrace    picked ─▶ events and tokens, as they arrive              throughput estimates, the resilience guard

The stages are consecutive spans, all children of the request's span `router.generate`. Each begins where the previous
one ended, so up to the first token they add up to the time to first token (docs/tracing.md):

    router.validate ─▶ router.queue ─▶ per choice: router.pick ─▶ router.reserve ─▶ router.prefill ─its token───▶
                                           ▲    └──not split──────────────▲  │      router.hand_over ─▶ router.decode
                                           └──the attempt failed─────────────┴────────────┴───────────────┘
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Self

import grpc

from router.metrics import Path, RouterMetrics
from router.picking.disaggregation import Decision, Disaggregation
from router.picking.placement import Plan
from router.picking.plan import NoPlan
from router.pools.instance_info import Role
from router.pools.throughput import ThroughputEstimator
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from router.request.request_log import RequestSummary, sum_of
from router.resilience.retry import CallFailed
from router.resilience.safeguards import Guard
from serving import tracing
from serving.errors import printable
from serving.logging import RequestEvent, Timeline, log_event

Failover = Literal["retried", "resumed"]

_log = logging.getLogger(__name__)
_MAX_REASONS = 4  # reasons in one trailer: metadata are bounded, and of further attempts the instances are listed
_MAX_TRAILER_BYTES = 2048  # of one: all share 8 KiB
_STATUSES = frozenset(code.name for code in grpc.StatusCode)
_STAGE_AFTER = {
    RequestEvent.KV_RESERVED: "router.prefill",
    RequestEvent.HAND_OVER_STARTED: "router.hand_over",
    RequestEvent.DECODE_STARTED: "router.decode",
}


class RequestTrace:
    """The record of one request. Owned by its handler."""

    def __init__(self, metrics: RouterMetrics | None = None) -> None:
        self.timeline = Timeline()
        self.timeline.mark(RequestEvent.RECEIVED)
        at_ns = time.time_ns()
        self._metrics = metrics or RouterMetrics()
        self._metrics.num_received += 1
        self._span = tracing.start_current_span("router.generate", at_ns=at_ns)
        self._stages = tracing.Stages("router.validate", at_ns=at_ns)
        self._admitted_ns = at_ns
        self._prefill: list[str] = []
        self._decode: list[str] = []
        self._prefilled_by = ""
        self._decisions: list[Disaggregation] = []
        self._why = ""
        self._is_warm = True
        self.request: GenerationRequest | None = None
        """With every default resolved; None until it is known to be valid."""
        self.choices: Sequence[Choice] = ()
        self._number = self._metrics.num_received
        if self._metrics.log is not None:
            self._metrics.log.running[self._number] = self.summary

    def validated(self, choices: Sequence[Choice]) -> None:
        """`request` is valid, and these are its choices."""
        self.choices = choices
        self._stages.next("router.queue")

    def admitted(self) -> None:
        """The request is admitted. The stages that follow belong to its choices."""
        self.timeline.mark(RequestEvent.ADMITTED)
        self._admitted_ns = time.time_ns()
        self._stages.end(at_ns=self._admitted_ns)

    def choice(self, index: int, guard: Guard) -> ChoiceTrace:
        """The trace of one choice: the first begins with the admission, the others when they are entered."""
        return ChoiceTrace(self, index, guard, None if index else self._admitted_ns)

    @property
    def received_s(self) -> float:
        """Monotonic."""
        return self.timeline.marks[0][1]

    @property
    def has_first_token(self) -> bool:
        return self.timeline.at(RequestEvent.FIRST_TOKEN) is not None

    def picked(self, plan: Plan) -> None:
        self.timeline.mark(RequestEvent.PICKED)
        if not self._decode:
            self._why = plan.why
        self._decided(plan.disaggregation)
        self._metrics.picked(plan.decode.info.identity.weights_digest)
        self._is_warm = self._is_warm and self._metrics.recent.are_warm(plan)
        _add(self._decode, plan.decode.instance_id)
        if plan.prefill is not None:
            _add(self._prefill, plan.prefill.instance_id)

    def not_picked(self, plan: NoPlan) -> None:
        if plan.disaggregation is not None:
            self._decided(plan.disaggregation)

    def failed_over(self, kind: Failover) -> None:
        """The instances are picked for an attempt that follows a failed one."""
        if kind == "resumed":
            self.timeline.mark(RequestEvent.RESUMED)
            self._metrics.num_resumed += 1
        else:
            self._metrics.num_retried += 1

    def prefilled(self, instance_id: str) -> None:
        """An instance has computed the prompt of an attempt; the first one counts."""
        self._prefilled_by = self._prefilled_by or instance_id

    def handed_over(self, took_s: float) -> None:
        self._metrics.stages["hand_over"].observe(took_s)

    def first_token(self) -> None:
        """A token is about to be written to the client; the request's first one counts."""
        if self.has_first_token:
            return
        took_s = self.timeline.mark(RequestEvent.FIRST_TOKEN) - self.received_s
        if (path := self._path) is not None:
            self._metrics.first_token[path].observe(took_s)
        if self._is_warm:
            self._metrics.recent.first_token(took_s)

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """For the client: how and where the attempts ran, and why, in order; equal decisions in a row appear once."""
        if not self._decode:
            return ()
        values = (
            ("tandem-disaggregated", ",".join("yes" if split else "no" for split in self._paths)),
            ("tandem-reason", self._reasons),
            ("tandem-prefill", ",".join(self._prefill)),
            ("tandem-decode", ",".join(self._decode)),
        )
        return tuple((name, printable(value, _MAX_TRAILER_BYTES)) for name, value in values)

    def summary(self, outcome: str = "", error: str = "") -> RequestSummary:
        """The request now; with an `outcome`, at its end."""
        request, choices = self.request, self.choices
        return RequestSummary(
            number=self._number,
            request_id=request.label if request else "",
            marks=tuple(self.timeline.marks),
            lora=request.lora if request else "",
            num_choices=request.num_choices_left if request else 0,
            num_prompt_tokens=request.num_prompt_tokens if request else 0,
            num_cached_tokens=choices[0].num_cached_tokens if choices else None,
            num_tokens=self.num_generated,
            gaps=sum_of(choice.gaps for choice in choices),
            prefill=tuple(self._prefill),
            decode=tuple(self._decode),
            prefilled_by=self._prefilled_by,
            reason=self._reasons,
            outcome=outcome,
            error=error,
        )

    @property
    def num_generated(self) -> int:
        """Tokens of all choices that this router has emitted."""
        return sum(choice.num_generated for choice in self.choices)

    def ended(self, event: RequestEvent, error: str = "") -> None:
        """Writes the request's log line, ends its span and counts it. `error` begins with the status' name."""
        self.timeline.mark(event)
        request, summary = self.request, self.summary(_outcome(event, error), error)
        if self._metrics.log is not None:
            self._metrics.log.end(summary)
        self._metrics.request_ended(summary, self.timeline, self._path, is_warm=self._is_warm)
        attributes: dict[str, str | int] = {
            "gen_ai.request.id": summary.request_id,
            "tandem.num_prompt_tokens": summary.num_prompt_tokens,
            "tandem.num_tokens": summary.num_tokens,
            "tandem.decision": ",".join(decision.decision.value for decision in self._decisions),
            "tandem.reason": ",".join(decision.reason.value for decision in self._decisions),
            "tandem.why": summary.reason,
            "tandem.prefill": ",".join(self._prefill),
            "tandem.decode": ",".join(self._decode),
        }
        if summary.lora:
            attributes["tandem.lora"] = summary.lora
        self._stages.end(failure=error or None)
        tracing.end_span(self._span, attributes, failure=error or None)
        log_event(
            _log,
            event,
            request=request.request_id if request else "",
            num_prompt_tokens=summary.num_prompt_tokens,
            num_tokens=summary.num_tokens,
            num_resumed_tokens=request.num_resumed_tokens if request else 0,
            n=request.params.n if request else 0,
            num_resumptions=self.timeline.count(RequestEvent.RESUMED),
            disaggregated=bool(self._paths and self._paths[0]),
            reason=self._decisions[0].explanation if self._decisions else "",
            prefill=",".join(self._prefill),
            decode=",".join(self._decode),
            why=self._why,
            error=error,
            **({"lora": summary.lora} if summary.lora else {}),
            **self.timeline.milliseconds(),
        )

    @property
    def _reasons(self) -> str:
        return "; then: ".join(decision.explanation for decision in self._decisions[:_MAX_REASONS])

    @property
    def _paths(self) -> list[bool]:
        """Whether its attempts were split; equal ones in a row appear once."""
        splits = (decision is Decision.DISAGGREGATE for decision, _, _ in self._decisions)
        return [split for split, _ in groupby(splits)]

    @property
    def _path(self) -> Path | None:
        """Of the first attempt; None before one is planned."""
        if not self._decisions:
            return None
        return "split" if self._paths[0] else "local"

    def _decided(self, disaggregation: Disaggregation) -> None:
        self._metrics.decided(disaggregation)
        last = self._decisions[-1] if self._decisions else None
        if last is None or last[:2] != disaggregation[:2]:
            self._decisions.append(disaggregation)


@dataclass(eq=False)
class ChoiceTrace:
    """One choice of a request through its attempts; a context manager for the life of the choice."""

    request: RequestTrace
    index: int
    guard: Guard
    since_ns: int | None
    """The first stage begins then (`time.time_ns()`), or with the `with` block."""
    _failover: Failover | None = None
    """What the next attempt is, once its instances are picked."""

    def __enter__(self) -> Self:
        self.stages = tracing.Stages("router.pick", attributes={"tandem.choice": self.index}, at_ns=self.since_ns)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stages.end(failure=None if kind is None else kind.__name__)

    def picked(self, plan: Plan, prefilling: ThroughputEstimator, loading: ThroughputEstimator | None) -> AttemptTrace:
        if self._failover is not None:
            self.request.failed_over(self._failover)
            self._failover = None
        self.request.picked(plan)
        self.stages.next("router.prefill" if plan.prefill is None else "router.reserve")
        self.stages.note({"tandem.decode": plan.decode.instance_id})
        if plan.prefill is not None:
            self.stages.note({"tandem.prefill": plan.prefill.instance_id})
        return AttemptTrace(self, plan, prefilling, loading)

    def failed(self, failure: CallFailed) -> None:
        self.stages.next("router.pick", failure=None if failure.kind == "moved" else failure.detail)
        self.guard.failed(failure)

    def paused(self) -> None:
        """Another tenant has the request's slot."""
        self.request.timeline.mark(RequestEvent.PAUSED)
        self.stages.next("router.queue")
        self.guard.paused()

    def continued(self) -> None:
        self.stages.next("router.pick")

    def tried_again(self, *, has_begun: bool) -> None:
        """Another attempt may follow a failed one. `has_begun`: the client has got tokens of the choice."""
        self._failover = "resumed" if has_begun else "retried"
        if has_begun:
            self.request.timeline.mark(RequestEvent.INTERRUPTED)


@dataclass(slots=True, eq=False)
class AttemptTrace:
    """One attempt. The dispatcher and the instance calls report to it."""

    choice: ChoiceTrace
    plan: Plan
    prefilling: ThroughputEstimator  # of the instance that prefills
    loading: ThroughputEstimator | None  # of the instance that loads the KV; None if the request is not split
    now: Callable[[], float] = time.monotonic
    _since_s: float | None = None  # when the prefill began; from its first token on, when the hand-over did
    _role: Role = "decode"
    _has_token: bool = False  # of the instance that computes now

    def event(self, event: RequestEvent) -> None:
        if event is RequestEvent.PREFILL_STARTED:
            self._since_s = self.now()
        elif event is RequestEvent.KV_LOADED and self.loading is not None and self._since_s is not None:
            took_s = self.now() - self._since_s
            self.loading.handed_over(self.plan.work.num_to_move, took_s)
            self.choice.request.handed_over(took_s)
        stages = self.choice.stages
        stage = _STAGE_AFTER.get(event)
        if stage is not None and stage != stages.name:
            stages.next(stage)
            if stage == "router.prefill" and self.plan.prefill is not None:
                stages.note({"tandem.prefill": self.plan.prefill.instance_id})
        self.choice.request.timeline.mark(event)

    def computing(self, role: Role) -> None:
        """The instance of `role` has been sent what it needs to compute."""
        prefill = self.plan.prefill
        instance = self.plan.decode if role == "decode" or prefill is None else prefill
        if prefill is None:
            self._since_s = self.now()
        self._role, self._has_token = role, False
        self.choice.guard.computing(instance.key, role)

    def token(self) -> None:
        """A chunk has arrived and is about to be written to the client; the first one of each instance counts."""
        if self._has_token:
            return
        self._has_token = True
        if self._role == "prefill" or self.plan.prefill is None:
            self._prefilled()
        if self._role == "decode" or self.plan.prefill is None:
            self.event(RequestEvent.DECODE_STARTED)
        self.choice.guard.token()
        self.choice.request.first_token()
        if self.choice.stages.name == "router.prefill":
            self.event(RequestEvent.HAND_OVER_STARTED)

    def _prefilled(self) -> None:
        now_s, work = self.now(), self.plan.work
        if self._since_s is not None:
            self.prefilling.prefilled(work.num_to_prefill, work.num_ahead, now_s - self._since_s)
        self._since_s = now_s
        self.choice.request.prefilled((self.plan.prefill or self.plan.decode).instance_id)


def _outcome(event: RequestEvent, error: str) -> str:
    """The metric's label: how the request ended, and for a failure the status."""
    if event is not RequestEvent.FAILED:
        return event.value
    status = error.partition(":")[0]
    return status.lower() if status in _STATUSES else "internal"


def _add(visited: list[str], instance_id: str) -> None:
    if not visited or visited[-1] != instance_id:
        visited.append(instance_id)
