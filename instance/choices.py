"""Choices of requests on their way through this instance's engine: the one place where they enter and leave it.

open ──add_request──▶ running ──last chunk──▶ ended
                         └──error, cancelled, core dead──▶ aborted in the core, its blocks free within a step

Whoever enters `Choices.open` owns the choice, and leaving the block ends it on every path.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from engine.async_engine import AsyncEngine, RequestStream
from engine.errors import EngineError
from engine.messages import Command, LoadedEvent, ReservedEvent, Seed, TokensEvent
from instance.convert import Choice, Limits
from instance.status import RETRY_AFTER_S, ended_with_error, service_error
from instance.text import ChoiceText, TextMaker
from protos.tandem.v1 import common_pb2
from serving.errors import AlreadyExists, Overloaded

ChoiceEvent = ReservedEvent | LoadedEvent | common_pb2.TokenChunk


class RunningChoice:
    """One choice that the engine has. Iterate it once: events as they are, tokens as chunks, the last with finish."""

    def __init__(self, choice: Choice, stream: RequestStream, text: ChoiceText, engine: AsyncEngine) -> None:
        self.choice = choice
        self.first: TokensEvent | None = None
        """What the engine said with the first token: what was cached, what came from elsewhere, how long it waited."""
        self._stream = stream
        self._text = text
        self._engine = engine

    def seed(self, token_ids: list[int]) -> None:
        """Ids that another instance has emitted since the start. Text before engine: tokens may follow at once."""
        self._text.replay(token_ids)
        self._engine.send(Seed(self.choice.request_id, token_ids))

    def __aiter__(self) -> RunningChoice:
        return self

    async def __anext__(self) -> ChoiceEvent:
        """The next event; safe to cancel. Raises ServiceError where the engine gives up."""
        if self._text.finished:
            raise StopAsyncIteration
        try:
            event = await anext(self._stream)
        except EngineError as error:
            raise service_error(error) from error
        if isinstance(event, ReservedEvent | LoadedEvent):
            return event
        if event.finish_reason == "error":
            raise ended_with_error(event)
        self.first = self.first or event
        return self._text.chunk(event)


class Choices:
    """Opens choices on one engine. Belongs to the front's event loop."""

    def __init__(self, engine: AsyncEngine, texts: TextMaker, limits: Limits) -> None:
        self._engine = engine
        self._texts = texts
        self.limits = limits
        self._running: set[str] = set()

    @asynccontextmanager
    async def open(self, choice: Choice) -> AsyncIterator[RunningChoice]:
        """Runs `choice`; raises AlreadyExists, Overloaded, or Unavailable when the engine has ended."""
        if choice.request_id in self._running:
            raise AlreadyExists(f"request id {choice.request_id} is running here")
        if len(self._running) >= self.limits.max_requests:
            raise Overloaded(f"{len(self._running)} requests are here, the most allowed", RETRY_AFTER_S)
        self._running.add(choice.request_id)
        try:
            text = self._texts.begin(choice)
            try:
                stream = self._engine.add_request(choice.engine_request)
            except EngineError as error:
                raise service_error(error) from error
            async with stream:
                yield RunningChoice(choice, stream, text, self._engine)
        finally:
            self._running.discard(choice.request_id)

    def send(self, command: Command) -> None:
        """A command for the core, which may be dead: then there is nothing left to command."""
        self._engine.send(command)

    @property
    def running_ids(self) -> Iterable[str]:
        """Ids of the requests that run now."""
        return frozenset(self._running)
