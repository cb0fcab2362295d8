"""Where a request's time goes, as spans that follow one upon the other, from its coming to its end.

    router.validate ─▶ router.queue ─▶ each choice: router.pick ─▶ router.reserve ─▶ router.prefill ─FIRST_TOKEN─▶
                                           ▲    └──not split──────────────▲  │      router.hand_over ─▶ router.decode
                                           └──an attempt has failed──────────┴────────────┴───────────────┘

All are children of the request's span, `router.generate`. Each begins where the one before has ended, so up to the
first token they add up to the time to first token. What happens meanwhile at the instances is told by their own spans,
which have the same parent (docs/tracing.md).
"""

from __future__ import annotations

from typing import Self

from router.picking.plan import Plan
from serving import tracing
from serving.events import RequestEvent, Timeline

_AFTER = {RequestEvent.KV_RESERVED: "router.prefill", RequestEvent.DECODE_STARTED: "router.decode"}
_UNTIL_TOKEN = ("router.reserve", "router.prefill")


class ChoiceStages:
    """What one choice waits for. Owned by its flow; the timeline of its request gets every event as well."""

    def __init__(self, timeline: Timeline, choice: int, since_ns: int | None = None) -> None:
        """Begins with its `with` block, or has begun at `since_ns` (`time.time_ns()`)."""
        self._timeline = timeline
        self._choice = choice
        self._since_ns = since_ns
        self._is_split = False

    def __enter__(self) -> Self:
        self._stages = tracing.Stages("router.pick", attributes={"tandem.choice": self._choice}, at_ns=self._since_ns)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The choice is over, however."""
        self._stages.end(failure=None if kind is None else kind.__name__)

    def picked(self, plan: Plan) -> None:
        """Where the next attempt will run."""
        self._is_split = plan.prefill is not None
        self._stages.next("router.reserve" if self._is_split else "router.prefill")
        self._stages.note({"tandem.decode": plan.decode.instance.instance_id})
        if plan.prefill is not None:
            self._stages.note({"tandem.prefill": plan.prefill.instance.instance_id})

    def mark(self, event: RequestEvent) -> float:
        """Records `event` in the timeline; returns its time."""
        stage = _AFTER.get(event)
        if stage is not None and stage != self._stages.name:
            self._stages.next(stage)
        return self._timeline.mark(event)

    def token(self) -> None:
        """A token has come, and is about to be sent to the client."""
        if self._stages.name in _UNTIL_TOKEN:
            self._stages.next("router.hand_over" if self._is_split else "router.decode")

    def failed(self, why: str) -> None:
        """The attempt has ended badly; another may follow."""
        self._stages.next("router.pick", failure=why)
