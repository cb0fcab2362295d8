"""What happened to one request: its timeline, where it ran and why; for its log line, trailers, span and metrics."""

from __future__ import annotations

import logging
import time

import grpc

from router.metrics import RouterMetrics
from router.picking.disaggregation import Decision, Disaggregation
from router.picking.plan import NoPlan, Plan
from router.request import GenerationRequest
from router.stages import ChoiceStages
from serving import tracing
from serving.events import RequestEvent, Timeline
from serving.logging import log_event

_log = logging.getLogger(__name__)
_MAX_REASONS = 4
"""In words: metadata are bounded, and a request that was tried more often says enough by its instances."""
_STATUSES = frozenset(code.name for code in grpc.StatusCode)


class Journey:
    """The record of one request. Owned by its call; flows mark what happens."""

    def __init__(self, metrics: RouterMetrics | None = None) -> None:
        self.timeline = Timeline()
        self.timeline.mark(RequestEvent.RECEIVED)
        at_ns = time.time_ns()
        self._metrics = metrics or RouterMetrics()
        self._metrics.num_received += 1
        self._span = tracing.enter("router.generate", at_ns=at_ns)
        self._stages = tracing.Stages("router.validate", at_ns=at_ns)
        self._admitted_ns = at_ns
        self._prefill: list[str] = []
        self._decode: list[str] = []
        self._decisions: list[Disaggregation] = []
        self._why = ""
        self._is_warm = True

    def validated(self) -> None:
        """The request is a good one; it waits for room."""
        self._stages.next("router.queue")

    def admitted(self) -> None:
        """There is room. What follows is each choice's own."""
        self.timeline.mark(RequestEvent.ADMITTED)
        self._admitted_ns = time.time_ns()
        self._stages.end(at_ns=self._admitted_ns)

    def stages_of(self, choice: int) -> ChoiceStages:
        """The stages of one choice: the first begins with the admission, the others with its first token."""
        return ChoiceStages(self.timeline, choice, None if choice else self._admitted_ns)

    def picked(self, plan: Plan) -> None:
        """An attempt is about to begin."""
        self.timeline.mark(RequestEvent.PICKED)
        if not self._decode:
            self._why = f"decode: {plan.decode.why}" + (f"; prefill: {plan.prefill.why}" if plan.prefill else "")
        self._decided(plan.disaggregation)
        self._is_warm = self._is_warm and self._metrics.recent.are_warm(plan)
        _add(self._decode, plan.decode.instance.instance_id)
        if plan.prefill is not None:
            _add(self._prefill, plan.prefill.instance.instance_id)

    def first_token(self) -> None:
        """The request's first token is on its way to the client."""
        at_s = self.timeline.mark(RequestEvent.FIRST_TOKEN)
        if self._is_warm:
            self._metrics.recent.first_token(at_s - self.timeline.marks[0][1])

    def refused(self, plan: NoPlan) -> None:
        """Nobody is there for another attempt."""
        if plan.disaggregation is not None:
            self._decided(plan.disaggregation)

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """What a client may see: how its attempts ran and why, and which instances took part, each in order. What was
        decided twice in a row for the same reason is told once."""
        if not self._decode:
            return ()
        return (
            ("tandem-disaggregated", ",".join("yes" if split else "no" for split in self._paths)),
            ("tandem-reason", self._words),
            ("tandem-prefill", ",".join(self._prefill)),
            ("tandem-decode", ",".join(self._decode)),
        )

    def ended(self, event: RequestEvent, request: GenerationRequest | None, num_tokens: int, error: str = "") -> None:
        """Writes the request's one line, ends its span and counts it. `error` begins with the status' name."""
        self.timeline.mark(event)
        num_choices = request.params.n if request else 0
        num_prompt_tokens = request.num_prompt_tokens if request else 0
        self._metrics.request_ended(
            _outcome(event, error),
            self.timeline,
            None if not self._decisions else "split" if self._paths[0] else "local",
            num_choices=num_choices,
            num_prompt=num_prompt_tokens,
            num_output=num_tokens,
            is_warm=self._is_warm,
        )
        attributes: dict[str, str | int] = {
            "gen_ai.request.id": request.label if request else "",
            "tandem.num_prompt_tokens": num_prompt_tokens,
            "tandem.num_tokens": num_tokens,
            "tandem.decision": ",".join(decision.decision.value for decision in self._decisions),
            "tandem.reason": ",".join(decision.reason.value for decision in self._decisions),
            "tandem.why": self._words,
            "tandem.prefill": ",".join(self._prefill),
            "tandem.decode": ",".join(self._decode),
        }
        self._stages.end(failure=error or None)
        tracing.end(self._span, attributes, failure=error or None)
        log_event(
            _log,
            event,
            request=request.request_id if request else "",
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_tokens,
            n=num_choices,
            num_resumptions=self.timeline.count(RequestEvent.RESUMED),
            disaggregated=bool(self._paths and self._paths[0]),
            reason=self._decisions[0].words if self._decisions else "",
            prefill=",".join(self._prefill),
            decode=",".join(self._decode),
            why=self._why,
            error=error,
            **self.timeline.milliseconds(),
        )

    @property
    def _words(self) -> str:
        return "; then: ".join(decision.words for decision in self._decisions[:_MAX_REASONS])

    @property
    def _paths(self) -> list[bool]:
        """Whether its attempts were split, those that followed upon an equal one left out."""
        paths: list[bool] = []
        for decision, _, _ in self._decisions:
            split = decision is Decision.DISAGGREGATE
            if not paths or paths[-1] is not split:
                paths.append(split)
        return paths

    def _decided(self, disaggregation: Disaggregation) -> None:
        self._metrics.decided(disaggregation)
        last = self._decisions[-1] if self._decisions else None
        if last is None or last[:2] != disaggregation[:2]:
            self._decisions.append(disaggregation)


def _outcome(event: RequestEvent, error: str) -> str:
    """One of few words: how it ended, and for a failure with which status."""
    if event is not RequestEvent.FAILED:
        return event.value
    status = error.partition(":")[0]
    return status.lower() if status in _STATUSES else "internal"


def _add(visited: list[str], instance_id: str) -> None:
    if not visited or visited[-1] != instance_id:
        visited.append(instance_id)
