"""One Generate call, from what the client sent to its end, whatever protocol brought it.

    received ──▶ validated ──▶ admitted ──▶ generated, message by message into the sink ──▶ finished
        └─refused──▶ failed        └─cancelled: the client has gone──▶ aborted     └─Abort by label──▶ aborted

The gRPC service, the OpenAI port and the VllmEngine service all come through here: what one of them refuses, queues,
counts and logs, the others do too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from protos.tandem.v1 import generation_pb2
from router.admission.door import Admission
from router.callers import Caller, Callers
from router.choice import Choice
from router.generate import Generator
from router.journey import Journey
from router.metrics import RouterMetrics
from router.model import ModelLimits, ServedModel
from router.relay import Relay, Sink
from router.request import GenerationRequest
from router.running import Running
from router.validation import validated
from serving.errors import ServiceError
from serving.events import RequestEvent
from serving.logging import set_request_id

Metadata = Iterable[tuple[str, str | bytes]]


class GenerateCall:
    """One call and what became of it. Owned by the call's task, which runs it once."""

    def __init__(
        self,
        model: ServedModel,
        limits: Callable[[], ModelLimits],
        admission: Admission,
        generator: Generator,
        running: Running,
        metrics: RouterMetrics,
        callers: Callers,
    ) -> None:
        self._model = model
        self._limits = limits
        self._admission = admission
        self._generator = generator
        self._running = running
        self._callers = callers
        self._caller = Caller()
        self.journey = Journey(metrics)
        self.wanted: GenerationRequest | None = None
        """The request with every default resolved; None until it is known to be valid."""
        self._choices: list[Choice] = []

    async def run(
        self,
        request: generation_pb2.GenerateRequest,
        sink: Sink,
        *,
        metadata: Metadata | None,
        remaining_s: float | None,
    ) -> None:
        """Writes the whole answer to `sink`. `metadata` are the call's headers, which tell whose it is;
        `remaining_s` is what is left until its deadline. Raises ServiceError."""
        outcome, problem = RequestEvent.ABORTED, ""  # unless it is said otherwise below, the client has gone
        try:
            self._caller = caller = self._callers.of(metadata)
            self.wanted = await validated(request, self._model, self._limits(), remaining_s=remaining_s, caller=caller)
            self.journey.validated()
            set_request_id(self.wanted.label)
            self._choices = [Choice(self.wanted, index) for index in range(self.wanted.params.n)]
            await self._answer(self.wanted, sink)
            aborted = any(choice.aborted for choice in self._choices)
            outcome = RequestEvent.ABORTED if aborted else RequestEvent.FINISHED
        except ServiceError as error:
            outcome, problem = RequestEvent.FAILED, f"{error.code.name}: {error.message}"
            raise
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            outcome, problem = RequestEvent.FAILED, type(error).__name__
            raise
        finally:
            self.journey.ended(outcome, self.wanted, self._num_emitted, problem)

    async def _answer(self, wanted: GenerationRequest, sink: Sink) -> None:
        """Writes the whole answer; an abort ends it with one last message per choice."""
        relay = Relay(wanted, sink)
        async with relay.until_aborted():
            with self._running.entered(self._caller.label(wanted.label), relay.abort):
                await self._admitted(wanted, relay)
        if relay.aborted:
            await relay.catch_up()
            for choice in self._choices:
                if not choice.finished:
                    await relay.emit(choice.abort())

    async def _admitted(self, wanted: GenerationRequest, relay: Relay) -> None:
        """The request's work, once there is room for it. What waits for room can be aborted like what runs."""
        async with self._admission.admit(wanted) as place:
            self.journey.admitted()
            relay.on_begin(lambda: self._admission.prefilled(place))
            try:
                await self._generator.generate(self._choices, self.journey, relay.emit)
            finally:
                place.num_output_tokens = self._num_emitted

    @property
    def _num_emitted(self) -> int:
        return sum(choice.num_emitted for choice in self._choices)
