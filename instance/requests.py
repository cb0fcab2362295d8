"""Choices of requests in this instance's engine, and their events as messages for the router.

    ActiveChoices.open ──add_request──▶ running ──last chunk──▶ finished
                                           └──error, cancelled, core dead──▶ aborted, blocks free within a step

Leaving the `open` block ends the choice on every path. A `ChunkBuilder` turns the engine's events into chunks whose ids
and text are delivered exactly once: index and offset continue where the replayed ids ended, whichever instance emitted
those, because the text delivered after k ids is a function of the k ids alone. A stop string ends the choice here,
exactly cut, while the core continues until the choice is aborted there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial

from engine.core.async_engine import AsyncEngine, RequestStream
from engine.core.messages import Command, FinishReason, LoadedEvent, ReservedEvent, Seed, TokenLogprob, TokensEvent
from engine.errors import CapacityError, EngineDeadError, EngineError, InvalidRequest
from engine.text.detokenizer import OutputProcessor
from engine.text.tokenizer import Tokenizer
from instance.convert import FINISH_REASONS, Choice, Limits
from protos.tandem.v1 import common_pb2
from serving.errors import (
    Aborted,
    AlreadyExists,
    Crashed,
    InternalError,
    Overloaded,
    ServiceError,
    Unavailable,
    invalid_argument,
)
from serving.limits import start_in_thread

RETRY_AFTER_S = 0.5
"""Blocks are freed at the rate at which whole requests finish; an earlier retry would mostly be rejected again."""

ChoiceStreamEvent = ReservedEvent | LoadedEvent | common_pb2.TokenChunk


class ChunkBuilder:
    """Builds the chunks of one choice. Without a tokenizer the text is empty."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer | None) -> None:
        """Replays the ids emitted so far. Raises InvalidArgument for stop strings without a tokenizer."""
        request = choice.engine_request
        if tokenizer is None and request.params.stop:
            raise invalid_argument("request.sampling.stop", "this model has no tokenizer", "no stop strings")
        self._choice = choice
        self._processor = OutputProcessor(tokenizer, request.params, prompt=request.prompt_token_ids)
        self._num_ids = 0
        self.finished = False
        self.replay(request.output_token_ids)

    def replay(self, token_ids: list[int]) -> None:
        """Take ids that another instance emitted. Raises InvalidArgument if they end the choice."""
        self._num_ids += len(token_ids)
        if self._processor.replay(token_ids) is None:
            raise invalid_argument("emitted_token_ids", "contain a stop string: the choice has ended")

    def chunk(self, event: TokensEvent) -> common_pb2.TokenChunk:
        """The chunk of the engine's next tokens; it has `finish` and is the last one if they end the choice."""
        delta = self._processor.push(
            event.token_ids, finish_reason=event.finish_reason, stop_token_id=event.stop_token_id
        )
        chunk = common_pb2.TokenChunk(
            stream_epoch=self._choice.stream_epoch,
            choice=self._choice.index,
            token_index=self._num_ids,
            token_ids=event.token_ids[: delta.num_tokens],
            text_offset=delta.text_offset,
            text=delta.text,
            logprobs=[_token_logprobs(entries) for entries in event.logprobs[: delta.num_tokens]],
            prompt_logprobs=[_token_logprobs(entries) for entries in event.prompt_logprobs],
        )
        self._num_ids += delta.num_tokens
        if delta.finish_reason is not None:
            self.finished = True
            chunk.finish.CopyFrom(self._finish(delta.finish_reason, delta.stop_reason, event))
        return chunk

    def first_chunk(self, event: TokensEvent) -> common_pb2.TokenChunk:
        """The first one has the counts, which an attempt that is cut off cannot report at its end."""
        chunk = self.chunk(event)
        if not self.finished:
            chunk.usage.CopyFrom(self._usage(event))
        return chunk

    def _finish(self, reason: FinishReason, stop_reason: int | str | None, event: TokensEvent) -> common_pb2.Finish:
        return common_pb2.Finish(
            reason=FINISH_REASONS[reason],
            stop_string=stop_reason if isinstance(stop_reason, str) else None,
            stop_token_id=stop_reason if isinstance(stop_reason, int) else None,
            usage=self._usage(event),
        )

    def _usage(self, event: TokensEvent) -> common_pb2.Usage:
        """Of the prompt: the engine's counts of a resumed choice include the ids emitted before, which come last. KV is
        contiguous: first what was cached here, then what came from elsewhere, then what was missing of that."""
        request = self._choice.engine_request
        num_prompt = len(request.prompt_token_ids)
        cached = min(event.num_cached_tokens, num_prompt)
        external = min(event.num_external_tokens, num_prompt - cached)
        recomputed = min(event.num_recomputed_tokens, num_prompt - cached - external)
        stored = external if request.remote_kv is None else 0  # without a transfer it was in a store
        return common_pb2.Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self._num_ids,
            cached_tokens=cached + stored,
            external_tokens=external - stored,
            recomputed_tokens=recomputed,
            stored_tokens=stored,
        )


def _token_logprobs(entries: list[TokenLogprob]) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        candidates=[
            common_pb2.Logprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank) for entry in entries
        ]
    )


class ChoiceStream:
    """The events of one open choice, to be iterated once: tokens as chunks, other events as they are."""

    def __init__(self, choice: Choice, events: RequestStream, chunks: ChunkBuilder, engine: AsyncEngine) -> None:
        self.choice = choice
        self.first: TokensEvent | None = None
        """The engine's event with the first token: what was cached or external, how long the request was queued."""
        self._events = events
        self._chunks = chunks
        self._engine = engine

    def seed(self, token_ids: list[int]) -> None:
        """Ids that another instance has emitted since the start. The text comes first: tokens may follow at once."""
        self._chunks.replay(token_ids)
        self._engine.send(Seed(self.choice.request_id, token_ids))

    def __aiter__(self) -> ChoiceStream:
        return self

    async def __anext__(self) -> ChoiceStreamEvent:
        """The next event; may be cancelled. Raises ServiceError if the engine fails or gives the request up."""
        if self._chunks.finished:
            raise StopAsyncIteration
        try:
            event = await anext(self._events)
        except EngineError as error:
            raise service_error(error) from error
        if isinstance(event, ReservedEvent | LoadedEvent):
            return event
        if event.finish_reason == "error":
            raise ended_with_error(event)
        if self.first is not None:
            return self._chunks.chunk(event)
        self.first = event
        if not event.prompt_logprobs:
            return self._chunks.first_chunk(event)
        # Of a long prompt they take a second, in which no other choice would get a token, and the router no report.
        return await start_in_thread(partial(self._chunks.first_chunk, event), "convert log-probabilities")


class ActiveChoices:
    """The choices that this instance serves now, on one engine. Belongs to the server's event loop."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self._engine = engine
        self.tokenizer = tokenizer
        self.limits = limits
        self._request_ids: set[str] = set()

    @asynccontextmanager
    async def open(self, choice: Choice) -> AsyncIterator[ChoiceStream]:
        """Adds `choice` to the engine. Raises AlreadyExists, Overloaded, or Unavailable when the engine has ended."""
        if choice.request_id in self._request_ids:
            raise AlreadyExists(f"request id {choice.request_id} is already running")
        if len(self._request_ids) >= self.limits.max_requests:
            raise Overloaded(f"limit of {self.limits.max_requests} concurrent requests reached", RETRY_AFTER_S)
        self._request_ids.add(choice.request_id)
        try:
            chunks = ChunkBuilder(choice, self.tokenizer)
            try:
                events = self._engine.add_request(choice.engine_request)
            except EngineError as error:
                raise service_error(error) from error
            async with aclosing(events):
                yield ChoiceStream(choice, events, chunks, self._engine)
        finally:
            self._request_ids.discard(choice.request_id)

    def send(self, command: Command) -> None:
        self._engine.send(command)


def service_error(error: EngineError) -> ServiceError:
    match error:
        case InvalidRequest():
            return invalid_argument(f"request.{error.field}", error.problem, error.allowed)
        case CapacityError():
            return Overloaded(str(error), RETRY_AFTER_S)
        case EngineDeadError():
            return (Crashed if error.crashed else Unavailable)("the engine of this instance has ended")
        case _:
            return InternalError(str(error))


def ended_with_error(event: TokensEvent) -> ServiceError:
    """The gRPC error for a request that the core ended with `finish_reason` "error"."""
    text = event.error or "the engine gave up the request"
    match event.error_kind:
        case "no_room":
            return Overloaded(text, RETRY_AFTER_S)
        case "too_large":
            return Overloaded(text, None)
        case "id_in_use":
            return AlreadyExists(text)
        case "nothing_allowed" | "invalid_constraint":
            return invalid_argument("request.sampling", text)
        case "timeout":
            return Aborted(text)  # of the reservation, not of the request: the router retries
        case _:
            return InternalError(text)
