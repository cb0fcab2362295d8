"""The parts of an answer in order: reasoning, text, tool calls. The Responses and the Messages API present them so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from protos.tandem.v1 import generation_pb2


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


class Blocks:
    """The blocks of one answer, as its messages come."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def add(self, message: generation_pb2.GenerateResponse) -> Iterator[tuple[Block, str]]:
        """What the next message adds to which block; a new block is the last of `blocks`."""
        if not message.HasField("delta"):
            yield from self._add("text", message.tokens.text)
            return
        yield from self._add("reasoning", message.delta.reasoning)
        yield from self._add("text", message.delta.content)
        for call in message.delta.tool_calls:
            if call.name:
                self.blocks.append(Block("call", len(self.blocks), call_id=call.id, name=call.name))
            yield self._extended(call.arguments)

    def _add(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[tuple[Block, str]]:
        if text:
            if not self.blocks or self.blocks[-1].kind != kind:
                self.blocks.append(Block(kind, len(self.blocks)))
            yield self._extended(text)

    def _extended(self, text: str) -> tuple[Block, str]:
        self.blocks[-1].text += text
        return self.blocks[-1], text
