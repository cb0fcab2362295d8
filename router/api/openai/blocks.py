"""The parts of an answer: reasoning, text, tool calls. The Responses and the Messages API present them so.

They come in the order in which the model writes them, but for those of one message: there text precedes new calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai.exchange import Exchange
from router.api.openai.requests import FrontBody
from router.dispatch.handler import RequestHandler

BodyT = TypeVar("BodyT", bound=FrontBody)


@dataclass(slots=True, eq=False)
class Block:
    """One part. A block ends when another one begins, or the answer."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    """Among the answer's blocks."""
    text: str = ""
    """What came so far: of a call its arguments."""
    call_id: str = ""
    name: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of a text's tokens, if the request asks for them."""


class BlocksBuilder(ABC, Generic[BodyT]):
    """The answer to one request as blocks, whole or as events."""

    def __init__(self, exchange: Exchange, body: BodyT, model: str) -> None:
        self._exchange = exchange
        self._body = body
        self._model = model
        self._blocks: list[Block] = []
        self._open: Block | None = None
        self._num_prompt = self._num_tokens = 0
        self._finish = common_pb2.Finish()

    async def add(self, prompt_index: int, call: RequestHandler, message: generation_pb2.GenerateResponse) -> None:
        """The next message of the answer; `prompt_index` is 0."""
        self._num_tokens += len(message.tokens.token_ids)
        if message.tokens.HasField("finish"):
            self._finish.CopyFrom(message.tokens.finish)
        if message.HasField("prompt_tokens"):
            self._num_prompt = message.prompt_tokens
            if self._body.stream:
                await self._exchange.begin_events(dict(call.trace.trailers()))
                await self._send_begin()
        for block, added in self._added(message):
            if self._body.stream:
                await self._send_part(block, added)

    def _added(self, message: generation_pb2.GenerateResponse) -> Iterator[tuple[Block, str]]:
        """What the message adds to which block; a new block is the last of `_blocks`."""
        if not message.HasField("delta"):
            yield from self._added_text("text", message.tokens.text)
            return
        calls = list(message.delta.tool_calls)
        if calls and not calls[0].name:  # more of the open call: the text comes behind it
            yield self._extended(calls.pop(0).arguments)
        delta = message.delta
        parts: list[tuple[Literal["reasoning", "text"], str]] = [
            ("reasoning", delta.reasoning),
            ("text", delta.content),
        ]
        if self._blocks and self._blocks[-1].kind == "text":  # which goes on before the model thinks again
            parts.reverse()
        for kind, text in parts:
            yield from self._added_text(kind, text)
        for call in calls:
            self._blocks.append(Block("call", len(self._blocks), call_id=call.id, name=call.name))
            yield self._extended(call.arguments)

    def _added_text(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[tuple[Block, str]]:
        if text:
            if not self._blocks or self._blocks[-1].kind != kind:
                self._blocks.append(Block(kind, len(self._blocks)))
            yield self._extended(text)

    def _extended(self, text: str) -> tuple[Block, str]:
        self._blocks[-1].text += text
        return self._blocks[-1], text

    async def _send_part(self, block: Block, added: str) -> None:
        if block is not self._open:
            await self._close()
            self._open = block
            await self._send_open(Block(block.kind, block.index, "", block.call_id, block.name))
        if added:
            await self._send_added(block, added)

    async def _close(self) -> None:
        """Ends the open block."""
        block, self._open = self._open, None
        if block is not None:
            await self._send_close(block)

    @abstractmethod
    async def finish(self, headers: Mapping[str, str]) -> None:
        """The answer is complete."""

    @abstractmethod
    async def _send_begin(self) -> None:
        """The events before the first block."""

    @abstractmethod
    async def _send_open(self, empty: Block) -> None:
        """A block begins; it has no text yet."""

    @abstractmethod
    async def _send_added(self, block: Block, added: str) -> None:
        """A block goes on."""

    @abstractmethod
    async def _send_close(self, block: Block) -> None:
        """A block is complete."""
