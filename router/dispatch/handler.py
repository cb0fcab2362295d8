"""Handles one generate request, from what the client sent to its end, for every protocol.

    received ──▶ validated ──▶ admitted ──▶ generated, message by message into the sink ──▶ finished
        └─rejected─▶ failed        └─cancelled: the client has gone──▶ aborted     └─Abort by label──▶ aborted

The gRPC service, the OpenAI API and the VllmEngine service all use it: validation, admission, metrics and the log line
are the same for all of them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from protos.tandem.v1 import generation_pb2
from router.admission.controller import AdmissionController
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.response_writer import ResponseWriter, Sink
from router.dispatch.trace import RequestTrace
from router.metrics import RouterMetrics
from router.request.caller import Caller, Callers
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from router.request.validation import ModelLimits, ServedModel, validated
from serving.auth import Metadata
from serving.errors import ServiceError
from serving.logging import RequestEvent, set_request_id


class AbortRegistry:
    """The running requests by their clients' labels, which need not be unique. Belongs to one event loop."""

    def __init__(self) -> None:
        self._aborts: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)

    @property
    def num_requests(self) -> int:
        return sum(map(len, self._aborts.values()))

    @contextmanager
    def registered(self, label: str, abort: Callable[[], None]) -> Iterator[None]:
        """While inside, an abort of `label` calls `abort`, at most once."""
        self._aborts[label].append(abort)
        try:
            yield
        finally:
            if abort in self._aborts[label]:
                self._aborts[label].remove(abort)
            if not self._aborts[label]:
                del self._aborts[label]

    def abort(self, labels: Iterable[str]) -> int:
        """Ends every request with one of `labels`; returns their number."""
        aborts = [abort for label in set(labels) for abort in self._aborts.pop(label, ())]
        for abort in aborts:
            abort()
        return len(aborts)


@dataclass(eq=False)
class RequestHandler:
    """One request and its outcome. Owned by the call's task, which calls `handle` once."""

    model: ServedModel
    limits: Callable[[], ModelLimits]
    admission: AdmissionController
    dispatcher: Dispatcher
    abort_registry: AbortRegistry
    metrics: RouterMetrics
    callers: Callers

    def __post_init__(self) -> None:
        self.trace = RequestTrace(self.metrics)
        self.request: GenerationRequest | None = None
        """With every default resolved; None until it is known to be valid."""
        self._caller = Caller()
        self._choices: list[Choice] = []

    async def handle(
        self,
        message: generation_pb2.GenerateRequest,
        sink: Sink,
        *,
        metadata: Metadata | None,
        remaining_s: float | None,
    ) -> None:
        """Writes the whole answer to `sink`; `remaining_s` is the time to the call's deadline. Raises ServiceError."""
        outcome, problem = RequestEvent.ABORTED, ""  # unless set below, the client has gone
        try:
            self._caller = caller = self.callers.of(metadata)
            await self.admission.instance_available()
            self.request = request = await validated(
                message, self.model, self.limits(), remaining_s=remaining_s, caller=caller
            )
            set_request_id(request.label)
            self._choices = [Choice(request, index) for index in range(request.params.n)]
            self.trace.validated(request, self._choices)
            await self._answer(request, sink)
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
            self.trace.ended(outcome, self.request, self._num_emitted, problem)

    async def _answer(self, request: GenerationRequest, sink: Sink) -> None:
        """Writes the whole answer; an abort ends it with one last message per choice."""
        writer = ResponseWriter(request, sink)
        async with writer.until_aborted():
            with self.abort_registry.registered(self._caller.label(request.label), writer.abort):
                await self._generate(request, writer)
        if writer.aborted:
            await writer.write_unsent()
            for choice in self._choices:
                if not choice.finished:
                    await writer.emit(choice.abort())

    async def _generate(self, request: GenerationRequest, writer: ResponseWriter) -> None:
        """The request's work, once it is admitted. A request that waits for admission can be aborted too."""
        async with self.admission.admit(request) as ticket:
            self.trace.admitted()
            writer.on_first_chunk(lambda: self.admission.prefilled(ticket))
            ticket.num_emitted = lambda: self._num_emitted
            await self.dispatcher.generate(self._choices, self.trace, writer.emit, ticket.slot)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids; only once a message is written."""
        assert self.request is not None, "a call that writes has been validated"
        return self.request.prompt_token_ids

    @property
    def _num_emitted(self) -> int:
        return sum(choice.num_emitted for choice in self._choices)
