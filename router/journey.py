"""What happened to one request: its timeline and the instances it visited, for one log line and the trailers."""

from __future__ import annotations

import logging

from router.plan import Plan
from router.request import GenerationRequest
from serving.events import RequestEvent, Timeline
from serving.logging import log_event

_log = logging.getLogger(__name__)


class Journey:
    """The record of one request. Owned by its call; flows mark what happens."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.timeline.mark(RequestEvent.RECEIVED)
        self._prefill: list[str] = []
        self._decode: list[str] = []
        self._reason = ""
        self._why = ""
        self._disaggregated = False

    def picked(self, plan: Plan) -> None:
        """An attempt is about to begin."""
        self.timeline.mark(RequestEvent.PICKED)
        if not self._decode:
            self._reason = plan.reason
            self._disaggregated = plan.prefill is not None
            self._why = f"decode: {plan.decode.why}" + (f"; prefill: {plan.prefill.why}" if plan.prefill else "")
        _add(self._decode, plan.decode.instance.instance_id)
        if plan.prefill is not None:
            _add(self._prefill, plan.prefill.instance.instance_id)

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """What a client may see: how the first attempt ran and which instances took part, in order."""
        if not self._decode:
            return ()
        return (
            ("tandem-disaggregated", "yes" if self._disaggregated else "no"),
            ("tandem-reason", self._reason),
            ("tandem-prefill", ",".join(self._prefill)),
            ("tandem-decode", ",".join(self._decode)),
        )

    def ended(self, event: RequestEvent, request: GenerationRequest | None, num_tokens: int, error: str = "") -> None:
        """Writes the request's one line."""
        self.timeline.mark(event)
        log_event(
            _log,
            event,
            request=request.request_id if request else "",
            num_prompt_tokens=request.num_prompt_tokens if request else 0,
            num_tokens=num_tokens,
            n=request.params.n if request else 0,
            num_resumptions=self.timeline.count(RequestEvent.RESUMED),
            disaggregated=self._disaggregated,
            reason=self._reason,
            prefill=",".join(self._prefill),
            decode=",".join(self._decode),
            why=self._why,
            error=error,
            **self.timeline.milliseconds(),
        )


def _add(visited: list[str], instance_id: str) -> None:
    if not visited or visited[-1] != instance_id:
        visited.append(instance_id)
