"""Handles one generate request, from what the client sent to its end, for every protocol.

    received ──▶ validated ──▶ admitted ──▶ generated, message by message into the sink ──▶ finished
        └─rejected─▶ failed        ├─cancelled: the client has gone──▶ aborted     └─Abort by label──▶ aborted
                                   └─cancelled by the server: cut off by a drain, gRPC client too slow──▶ failed

The gRPC service, the OpenAI API and the VllmEngine service all use it: validation, admission, metrics and the log line
are the same for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from engine.errors import shown
from engine.text.detokenizer import OutputProcessor
from protos.tandem.v1 import common_pb2, generation_pb2
from router.admission.controller import AdmissionController
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.trace import RequestTrace
from router.metrics import RouterMetrics
from router.request.caller import Caller, Callers
from router.request.chat import ChatDeltas
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from router.request.validation import ModelLimits, ServedModel, validated
from serving.auth import Metadata
from serving.errors import Aborted, Overloaded, ServiceError, Unavailable
from serving.limits import call_end, start_in_thread
from serving.logging import RequestEvent, set_request_id
from serving.waits import within

_DEADLINE_SLACK_S = 0.1  # a call that is cancelled so shortly before its deadline was ended by that
_WRITE_GRACE_S = 0.5  # how long an abort waits for the message that is being written: gRPC takes no other one before
Sink = Callable[[generation_pb2.GenerateResponse], Awaitable[None]]
"""Where an answer goes, in any protocol: returns when the message is on its way. The message is reused for the next one
and must not be kept."""


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


class ResponseWriter:
    """Writes one request's token chunks to its client, one message at a time, and ends its work on an abort.

        open ──abort──▶ ending: no message begins; the work is cancelled when the current one is written ──▶ aborted
         └──the work ends by itself──▶ over

    The work runs in the call's own task and writes what it emits: a queue between two tasks would cost each token
    another turn of the event loop. A client that does not read makes the work wait. Choices share the stream and write
    one after the other. What has been emitted is delivered, whatever the moment of an abort.
    """

    def __init__(self, request: GenerationRequest, choices: Sequence[Choice], sink: Sink) -> None:
        self._sink = sink
        self._choices = choices
        self.on_first_chunk: Callable[[], object] | None = None
        """Called once, before the first message is written."""
        self._write_lock = asyncio.Lock()
        self._response = generation_pb2.GenerateResponse(
            request_id=request.label,
            seed=request.params.seed,
            prompt_tokens=request.num_prompt_tokens,
            model=request.model,
        )
        self._deltas = None
        if request.chat_output:
            is_constrained = request.params.is_constrained
            self._deltas = ChatDeltas(request.request_id, request.chat_output, is_constrained=is_constrained)
            for index, resumed in request.resumed.items():
                self._deltas.skip(index, resumed.text)
        self._is_writing = False
        self._is_ending = False
        self._unsent: list[common_pb2.TokenChunk] = []
        self._scope: asyncio.Timeout | None = None
        self.aborted = False  # whether `abort` ended the work before it was over

    def abort(self) -> None:
        """Ends the work. Only inside `until_aborted`."""
        self._is_ending = True
        self._end_work(_WRITE_GRACE_S if self._is_writing else 0.0)

    @asynccontextmanager
    async def until_aborted(self) -> AsyncIterator[None]:
        """The work runs inside. An abort ends it without an error, unless the client blocks the current message."""
        self._scope = scope = asyncio.timeout(None)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            if self._is_writing:
                raise Overloaded("client too slow: the request was aborted while a message waited", None) from None
            self.aborted = True
        finally:
            self._scope, self._is_ending = None, False

    async def emit(self, chunk: common_pb2.TokenChunk) -> None:
        """Returns when the message with `chunk` is on its way. The first one carries seed, prompt length and model."""
        if self.on_first_chunk is not None:
            self.on_first_chunk()
            self.on_first_chunk = None
        try:
            await self._write_lock.acquire()
        except asyncio.CancelledError:
            self._unsent.append(chunk)
            raise
        try:
            await self._write(chunk)
        finally:
            self._write_lock.release()

    async def write_unsent(self) -> None:
        """After an abort: writes what was emitted while the work was ending."""
        for chunk in self._unsent:
            await self._write(chunk)

    async def _write(self, chunk: common_pb2.TokenChunk) -> None:
        if self._is_ending:
            self._unsent.append(chunk)
            await asyncio.Event().wait()  # until it is cancelled
        response = self._response
        response.tokens.CopyFrom(chunk)
        if self._deltas is not None:
            response.delta.CopyFrom(self._deltas.of(chunk))
        response.fingerprint = "" if chunk.token_index else self._choices[chunk.choice].fingerprint
        self._is_writing = True
        await self._sink(response)
        self._is_writing = False
        if response.model:  # it was the first
            for field in ("seed", "prompt_tokens", "model"):
                response.ClearField(field)
        if self._is_ending:
            self._end_work(0.0)

    def _end_work(self, delay_s: float) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time() + delay_s)


class Siblings:
    """The calls that make one response together. One that is rejected while others run waits until one of those ends:
    they have the room, and the client would meet the same again. Belongs to one event loop."""

    def __init__(self) -> None:
        self._num_running = 0
        self._ended = asyncio.Condition()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside, a call runs."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            async with self._ended:
                self._ended.notify(1 if self._num_running else sys.maxsize)

    async def one_ended(self) -> bool:
        """Returns when one has ended, to one of those that wait and at the last end to all; False if none runs."""
        await asyncio.sleep(0)  # one that was just admitted runs from its task's next step on
        if not self._num_running:
            return False
        async with self._ended:
            return await self._ended.wait()


@dataclass(eq=False)
class RequestHandler:
    """One request and its outcome. Owned by the call's task, which calls `handle` once."""

    model: ServedModel
    limits: Callable[[generation_pb2.GenerateRequest], ModelLimits]
    admission: AdmissionController
    dispatcher: Dispatcher
    abort_registry: AbortRegistry
    metrics: RouterMetrics
    callers: Callers
    siblings: Siblings = field(default_factory=Siblings)

    def __post_init__(self) -> None:
        self.trace = RequestTrace(self.metrics)
        self._caller = Caller()
        self._found_instance = True
        """False: it has waited for the first decode instance, and none came."""

    async def handle(
        self,
        message: generation_pb2.GenerateRequest,
        sink: Sink,
        *,
        metadata: Metadata | None,
        remaining_s: float | None,
    ) -> None:
        """Writes the whole answer to `sink`; `remaining_s` is the time to the call's deadline. Raises ServiceError."""
        deadline_s = None if remaining_s is None else time.monotonic() + remaining_s  # before any wait
        outcome, problem = RequestEvent.ABORTED, ""  # unless set below, the client has gone
        try:
            self._caller = self.callers.of(metadata)
            self.trace.request = request = await self._validated(message, deadline_s)
            set_request_id(request.label)
            choices = [self._choice(request, index) for index in range(request.params.n)]
            self.trace.validated(choices)
            await self._answer(request, choices, sink)
            aborted = any(choice.aborted for choice in choices)
            outcome = RequestEvent.ABORTED if aborted else RequestEvent.FINISHED
        except ServiceError as error:
            outcome, problem = RequestEvent.FAILED, _problem(error)
            has_attempt = any(choice.stream_epoch for choice in self.trace.choices)
            if isinstance(error, Unavailable) and not self._found_instance and not has_attempt:
                self.admission.no_instance_came()
            raise
        except asyncio.CancelledError:
            if (end := call_end().error) is not None:
                outcome, problem = RequestEvent.FAILED, _problem(end)
            elif deadline_s is not None and time.monotonic() >= deadline_s - _DEADLINE_SLACK_S:
                outcome, problem = RequestEvent.FAILED, "DEADLINE_EXCEEDED: the request's deadline has passed"
            raise
        except BaseException as error:
            outcome, problem = RequestEvent.FAILED, type(error).__name__
            raise
        finally:
            self.trace.ended(outcome, problem)

    async def _validated(self, message: generation_pb2.GenerateRequest, deadline_s: float | None) -> GenerationRequest:
        """Waits for the first instance where requests may, and validates. Raises Aborted for an abort meanwhile: what
        is not validated yet has no choices to finish."""
        scope, registry = asyncio.timeout(None), self.abort_registry
        with contextlib.ExitStack() as registered:
            if message.request_id:
                label = self._caller.label(message.request_id)
                registered.enter_context(registry.registered(label, lambda: scope.reschedule(0.0)))
            async with within(scope, lambda: Aborted("aborted before it was validated")):
                self._found_instance = await self.admission.instance_available()
                limits, caller = self.limits(message), self._caller
                return await validated(message, self.model, limits, deadline_s=deadline_s, caller=caller)

    def _choice(self, request: GenerationRequest, index: int) -> Choice:
        """Raises Unavailable for a resumed one that has not finished and whose identity no instance has. One that has
        not begun gets that of another one that has, if it can."""
        choice = Choice(request, index)
        if choice.token_ids and not choice.finished and (fingerprint := request.resumed[index].fingerprint):
            choice.identity = self.dispatcher.pools.identity(fingerprint)
            if choice.identity is None:
                known = "no instance computes what the answer began with: its fingerprint is"
                raise Unavailable(f"{known} {shown(fingerprint)}")
        elif not choice.token_ids:
            fingerprints = filter(None, (one.fingerprint for one in request.resumed.values()))
            choice.preferred_identity = next(filter(None, map(self.dispatcher.pools.identity, fingerprints)), None)
        return choice

    async def _answer(self, request: GenerationRequest, choices: list[Choice], sink: Sink) -> None:
        """Writes the whole answer; an abort ends it with one last message per choice."""
        writer = ResponseWriter(request, choices, sink)
        async with writer.until_aborted():
            with self.abort_registry.registered(self._caller.label(request.label), writer.abort):
                await self._generate(request, choices, writer)
        if writer.aborted:
            await writer.write_unsent()
            for choice in choices:
                if not choice.finished:
                    await writer.emit(choice.abort(await self._held_text(request, choice)))

    async def _held_text(self, request: GenerationRequest, choice: Choice) -> str:
        """What of the emitted tokens' text might have become a stop string: an instance has held it back."""
        if not request.params.stop:
            return ""
        processor = OutputProcessor(self.model.tokenizer, request.params, prompt=request.prompt_token_ids)

        def held() -> str:
            processor.replay(choice.token_ids)
            is_same = processor.num_delivered == choice.num_chars  # as long as the instance has the same tokenizer
            return processor.push((), finish_reason="abort").text if is_same else ""

        return await start_in_thread(held, "end the text of an aborted answer")

    async def _generate(self, request: GenerationRequest, choices: list[Choice], writer: ResponseWriter) -> None:
        """The request's work, once it is admitted. A request that waits for admission can be aborted too."""
        async with contextlib.AsyncExitStack() as stack:
            ticket = await stack.enter_async_context(self.admission.admit(request, self.siblings.one_ended))
            await stack.enter_async_context(self.siblings.running())
            self.trace.admitted()
            writer.on_first_chunk = lambda: self.admission.prefilled(ticket)
            ticket.num_emitted = lambda: self.trace.num_generated
            await self.dispatcher.generate(choices, self.trace, writer.emit, ticket.slot)

    @property
    def request(self) -> GenerationRequest:
        """Only once it is validated, as it is when a message is written."""
        assert self.trace.request is not None, "not validated"
        return self.trace.request

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids."""
        return self.request.prompt_token_ids


def _problem(error: ServiceError) -> str:
    return f"{error.code.name}: {error.message}"
