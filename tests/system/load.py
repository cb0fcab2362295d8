"""Clients that send one question after another while a test injects faults, and the times of all messages."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

from protos.tandem.v1 import generation_pb2_grpc
from tandem.client.channel import open_async_channel
from tandem.client.completion import Completion, CompletionAssembler
from tandem.client.credentials import PLAINTEXT, Credentials
from tandem.client.request import generate_request
from tests.system.questions import Question

TIMEOUT_S = 120.0
"""Of one answer: a hang guard."""


class Arrival(NamedTuple):
    """One message of a stream."""

    at_s: float
    choice: int
    stream_epoch: int
    token_index: int


@dataclass
class Outcome:
    """The outcome of one question."""

    question: Question
    sent_s: float
    arrivals: list[Arrival] = field(default_factory=list)
    completion: Completion | None = None
    error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.completion is not None or self.error is not None

    @property
    def has_begun(self) -> bool:
        """Whether every choice has a token."""
        return len({arrival.choice for arrival in self.arrivals}) == self.question.sampling.get("n", 1)

    @property
    def was_cut(self) -> bool:
        """Whether it continued on another instance after its first token."""
        return any(later.stream_epoch > first.stream_epoch for first, later in self.steps())

    @property
    def stall_s(self) -> float:
        """The longest pause between two messages of a choice, in seconds."""
        return max((later.at_s - first.at_s for first, later in self.steps()), default=0.0)

    @property
    def cut_after(self) -> list[int]:
        """How many tokens the choices had where they continued on another instance."""
        return [later.token_index for first, later in self.steps() if later.stream_epoch > first.stream_epoch]

    def steps(self) -> list[tuple[Arrival, Arrival]]:
        """Each message of a choice and the next one of the same."""
        found = []
        for choice in range(self.question.sampling.get("n", 1)):
            own = [arrival for arrival in self.arrivals if arrival.choice == choice]
            found += itertools.pairwise(own)
        return found

    def assert_exact(self) -> None:
        """The fault-free run's answer, in every respect."""
        if self.error is not None:
            raise AssertionError(f"a {self.question.kind} request failed: {self.error}") from self.error
        assert self.completion is not None
        self.question.assert_answered(self.completion)


class Load:
    """`num_clients` clients on a thread of their own send questions until `finish`. A context manager."""

    def __init__(
        self,
        address: str,
        questions: Sequence[Question],
        num_clients: int,
        credentials: Credentials = PLAINTEXT,
    ) -> None:
        self.timeout_s = TIMEOUT_S
        """Of an answer."""
        self.outcomes: list[Outcome] = []
        """Of every question sent so far, in order; grows while the load runs."""
        self._address = address
        self._questions = questions
        self._num_clients = num_clients
        self._credentials = credentials
        self._finishing = threading.Event()
        self._is_paused = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish()

    def finish(self) -> list[Outcome]:
        """Sends no more, waits for the running answers, and returns all. Idempotent."""
        self._finishing.set()
        self._thread.join(self.timeout_s + 10)
        assert not self._thread.is_alive(), "answers do not end"
        return self.outcomes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No new questions inside of the `with`; those that were sent go on."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @property
    def num_cut(self) -> int:
        """Streams that continued on another instance so far."""
        return sum(outcome.was_cut for outcome in list(self.outcomes))

    @property
    def kinds_cut(self) -> set[str]:
        """Kinds of the questions whose streams continued on another instance so far."""
        return {outcome.question.kind for outcome in list(self.outcomes) if outcome.was_cut}

    @property
    def num_waiting(self) -> int:
        """Questions that were sent and have a choice without a token."""
        return sum(not (outcome.is_over or outcome.has_begun) for outcome in list(self.outcomes))

    def bears_another_kill(self, kills_s: Sequence[float]) -> bool:
        """Whether one more kill, after those at these times, is within the router's promise for every stream: three
        resumptions of a choice that has begun, two retries of one that has not."""
        return all(
            sum(kill_s >= outcome.sent_s for kill_s in kills_s) <= (2 if outcome.has_begun else 1)
            for outcome in list(self.outcomes)
            if not outcome.is_over
        )

    async def _run(self) -> None:
        async with open_async_channel(self._address, (), self._credentials) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            await asyncio.gather(*(self._ask_in_turn(stub) for _ in range(self._num_clients)))

    async def _ask_in_turn(self, stub: Any) -> None:
        while not self._finishing.is_set():
            if self._is_paused:
                await asyncio.sleep(0.05)
            else:
                await self._ask_next(stub)

    async def _ask_next(self, stub: Any) -> None:
        number = len(self.outcomes)
        outcome = Outcome(self._questions[number % len(self._questions)], time.monotonic())
        self.outcomes.append(outcome)
        try:
            outcome.completion = await self._ask(stub, outcome, round_=number // len(self._questions))
        except Exception as error:
            outcome.error = error
            await asyncio.sleep(0.1)

    async def _ask(self, stub: Any, outcome: Outcome, round_: int) -> Completion:
        question = outcome.question
        # A salt for each round: no prefix cache knows the answer from the last one.
        request = generate_request(list(question.prompt), {**question.sampling, "cache_salt": f"round {round_}"})
        assembler = CompletionAssembler(question.sampling.get("n", 1))
        metadata = self._credentials.metadata()
        async for response in stub.Generate(request, timeout=self.timeout_s, metadata=metadata):
            tokens = response.tokens
            arrival = Arrival(time.monotonic(), tokens.choice, tokens.stream_epoch, tokens.token_index)
            outcome.arrivals.append(arrival)
            assembler.add(response)
        return assembler.finish()
