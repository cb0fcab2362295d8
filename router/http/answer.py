"""An answer in the making: token messages of one or several calls become OpenAI's choices, as events or as a whole.

GenerateResponse ──Answer.took──▶ Delta ──┬─ StreamedAnswer ─▶ an event each
  (of prompt p, choice c)   index p·n + c  └─ WholeAnswer ─▶ kept, and written when all calls are over
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from protos.tandem.v1 import common_pb2, generation_pb2
from router.call import GenerateCall
from router.http.exchange import Exchange
from router.http.logprobs import Columns, joined

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}
_HEADERS = ("tandem-disaggregated", "tandem-reason", "tandem-prefill", "tandem-decode")


@dataclass(frozen=True, slots=True)
class Delta:
    """What one message adds to one choice."""

    index: int
    text: str
    token_ids: list[int]
    prompt_token_ids: tuple[int, ...] | None = None
    """On the choice's first one."""
    logprobs: Columns | None = None
    finish_reason: str | None = None
    """On the choice's last one."""
    stop_reason: str | int | None = None
    """The stop string or token id that ended the choice, as vLLM tells it."""

    @classmethod
    def sum(cls, deltas: Sequence[Delta]) -> Delta:
        """A whole choice."""
        first, last = deltas[0], deltas[-1]
        return cls(
            index=first.index,
            text="".join(delta.text for delta in deltas),
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            prompt_token_ids=first.prompt_token_ids,
            logprobs=joined([delta.logprobs for delta in deltas if delta.logprobs is not None]),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )


@dataclass(slots=True)
class Usage:
    """What all choices of all prompts cost, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def content(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Dialect(Protocol):
    """How one endpoint words its answers."""

    whole_object: str
    event_object: str

    def columns(self, chunk: common_pb2.TokenChunk, num_chars: int) -> Columns | None:
        """The chunk's log-probabilities, if they were asked for; `num_chars` of the choice's text came before it."""
        ...

    def echoed(self, prompt: tuple[int, ...], chunk: common_pb2.TokenChunk) -> tuple[str, Columns | None]:
        """What stands before a choice's own text: the prompt, where the client asked for it. `chunk` is the first one
        of its first choice."""
        ...

    def event(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        """One entry of an event's `choices`."""
        ...

    def choice(self, whole: Delta) -> dict[str, Any]:
        """One entry of a whole answer's `choices`."""
        ...


class Answer(ABC):
    """The answer to one HTTP request. Its calls may run side by side, each in a task of its own."""

    def __init__(self, exchange: Exchange, dialect: Dialect, head: Mapping[str, Any], num_choices: int) -> None:
        self._exchange = exchange
        self._dialect = dialect
        self._head = dict(head)
        self._num_choices = num_choices
        self._usage = Usage()
        self._num_chars: dict[int, int] = {}
        self._echoes: dict[int, tuple[str, Columns | None]] = {}

    def taking(self, prompt_index: int, call: GenerateCall) -> Sink:
        """Where `call`, which answers the prompt with that index, writes."""
        return Sink(self, prompt_index, call)

    @abstractmethod
    async def take(self, prompt_index: int, call: GenerateCall, message: generation_pb2.GenerateResponse) -> None:
        """The next message of a call."""

    @abstractmethod
    async def finish(self, headers: Mapping[str, str]) -> None:
        """Every call is over."""

    def took(self, prompt_index: int, call: GenerateCall, message: generation_pb2.GenerateResponse) -> Delta:
        """What `message` adds."""
        chunk, wanted = message.tokens, call.wanted
        assert wanted is not None, "a call that writes has been validated"
        if message.HasField("prompt_tokens"):
            self._usage.prompt_tokens += message.prompt_tokens
            self._echoes[prompt_index] = self._dialect.echoed(wanted.prompt_token_ids, chunk)
        self._usage.completion_tokens += len(chunk.token_ids)
        index = prompt_index * self._num_choices + chunk.choice
        is_first = index not in self._num_chars
        echo, echoed_columns = self._echoes[prompt_index] if is_first else ("", None)
        num_chars = self._num_chars.get(index, len(echo))
        self._num_chars[index] = num_chars + len(chunk.text)
        columns = self._dialect.columns(chunk, num_chars)
        has_ended = chunk.HasField("finish")
        if has_ended and chunk.choice == 0:
            self._usage.cached_tokens += chunk.finish.usage.cached_tokens
        return Delta(
            index,
            echo + chunk.text,
            list(chunk.token_ids),
            wanted.prompt_token_ids if is_first else None,
            joined([part for part in (echoed_columns, columns) if part is not None]),
            _REASONS.get(chunk.finish.reason, "error") if has_ended else None,
            _stop_reason(chunk.finish) if has_ended else None,
        )


class Sink:
    """One call's way into an answer."""

    def __init__(self, answer: Answer, prompt_index: int, call: GenerateCall) -> None:
        self._answer = answer
        self._prompt_index = prompt_index
        self._call = call

    async def write(self, message: generation_pb2.GenerateResponse, /) -> None:
        await self._answer.take(self._prompt_index, self._call, message)


class WholeAnswer(Answer):
    """Kept until it is complete."""

    def __init__(self, exchange: Exchange, dialect: Dialect, head: Mapping[str, Any], num_choices: int) -> None:
        super().__init__(exchange, dialect, head, num_choices)
        self._choices: defaultdict[int, list[Delta]] = defaultdict(list)

    async def take(self, prompt_index: int, call: GenerateCall, message: generation_pb2.GenerateResponse) -> None:
        delta = self.took(prompt_index, call, message)
        self._choices[delta.index].append(delta)

    async def finish(self, headers: Mapping[str, str]) -> None:
        choices = [self._dialect.choice(Delta.sum(self._choices[index])) for index in sorted(self._choices)]
        content = {
            **self._head,
            "object": self._dialect.whole_object,
            "choices": choices,
            "usage": self._usage.content(),
        }
        await self._exchange.answer(content, headers)


class StreamedAnswer(Answer):
    """Each message goes out at once, as an event; the headers with the first one."""

    def __init__(
        self,
        exchange: Exchange,
        dialect: Dialect,
        head: Mapping[str, Any],
        num_choices: int,
        *,
        tells_usage: bool,
        continues_usage: bool,
    ) -> None:
        """`tells_usage` at the end; `continues_usage`, and with each event that of its choice so far."""
        super().__init__(exchange, dialect, {**head, "object": dialect.event_object}, num_choices)
        self._tells_usage = tells_usage
        self._continues_usage = continues_usage
        self._turn = asyncio.Lock()
        self._begun = False

    async def take(self, prompt_index: int, call: GenerateCall, message: generation_pb2.GenerateResponse) -> None:
        delta = self.took(prompt_index, call, message)
        is_first = delta.prompt_token_ids is not None
        event = {**self._head, "choices": [self._dialect.event(delta, is_first=is_first)]}
        if self._tells_usage:
            event["usage"] = _so_far(call, message.tokens) if self._continues_usage else None
        async with self._turn:
            if not self._begun:
                self._begun = True
                await self._exchange.begin_events(ways(call))
            await self._exchange.event(msgspec.json.encode(event))

    async def finish(self, headers: Mapping[str, str]) -> None:
        if self._tells_usage:
            event = {**self._head, "choices": [], "usage": self._usage.content()}
            await self._exchange.event(msgspec.json.encode(event))
        await self._exchange.end_events()


def ways(call: GenerateCall) -> dict[str, str]:
    """Which way the call went so far, and why, as headers: what a gRPC client sees in the trailers."""
    return {name: value for name, value in call.journey.trailers() if name in _HEADERS}


def _so_far(call: GenerateCall, chunk: common_pb2.TokenChunk) -> dict[str, Any]:
    """What one choice has cost; what of its prompt was cached is told at the end alone."""
    assert call.wanted is not None, "a call that writes has been validated"
    usage = Usage(len(call.wanted.prompt_token_ids), chunk.token_index + len(chunk.token_ids))
    return {**usage.content(), "prompt_tokens_details": None}


def _stop_reason(finish: common_pb2.Finish) -> str | int | None:
    if finish.HasField("stop_string"):
        return finish.stop_string
    return finish.stop_token_id if finish.HasField("stop_token_id") else None
