"""The output of a chat divided into content, reasoning and tool calls.

    ServedModel, chat ─▶ ChatOutput ─▶ a parser for each choice ─chunk by chunk─▶ GenerateResponse.delta

What a model thinks comes before its answer, so a constraint of the answer begins behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.sampling.params import SamplingParams
from engine.text.reasoning import BEGIN, END, ReasoningParser
from engine.text.tool_calls import ChatParser
from protos.tandem.v1 import common_pb2, generation_pb2
from router.request.tools import Tools, as_format, short_id, with_format

_GAP: dict[str, Any] = {"type": "regex", "pattern": "[ \\n]{0,4}"}


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """How the output of one chat is divided."""

    tools: Tools | None = None
    thinks: bool = False
    """Whether it may begin with reasoning."""
    is_thinking: bool = False
    """Whether the prompt ends in the middle of it."""

    def __bool__(self) -> bool:
        return self.tools is not None or self.thinks

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """`params` with the constraints that tools require, behind the reasoning. Raises InvalidRequest."""
        if self.tools is not None:
            params = self.tools.constrained(params)
        if not self.thinks or not params.is_constrained:
            return params
        tag = {"type": "tag", "begin": "" if self.is_thinking else BEGIN, "content": {"type": "any_text"}, "end": END}
        reasoning = {"type": "sequence", "elements": [tag, _GAP]}
        first = reasoning if self.is_thinking else {"type": "optional", "content": reasoning}
        return with_format(params, {"type": "sequence", "elements": [first, as_format(params)]})

    def parser(self, *, is_constrained: bool) -> ChatParser:
        rest = None if self.tools is None else self.tools.parser(is_constrained=is_constrained)
        if self.thinks:
            return ReasoningParser(rest, is_open=self.is_thinking)
        assert rest is not None, "a chat with neither tools nor reasoning is text"
        return rest


class ChatDeltas:
    """The deltas of one request's choices. Its caller passes each chunk once, in order."""

    def __init__(self, request_id: str, output: ChatOutput, *, is_constrained: bool) -> None:
        self._request_id = request_id
        self._output = output
        self._is_constrained = is_constrained
        self._parsers: dict[int, ChatParser] = {}

    def of(self, chunk: common_pb2.TokenChunk) -> generation_pb2.ChatDelta:
        if chunk.choice not in self._parsers:
            self._parsers[chunk.choice] = self._output.parser(is_constrained=self._is_constrained)
        delta = self._parsers[chunk.choice].push(chunk.text, final=chunk.HasField("finish"))
        message = generation_pb2.ChatDelta(content=delta.content, reasoning=delta.reasoning)
        for call in delta.tool_calls:
            # The request's own id is unguessable, and the same for all attempts.
            call_id = short_id(f"{self._request_id}/{chunk.choice}/{call.index}") if call.name else ""
            message.tool_calls.add(index=call.index, id=call_id, name=call.name, arguments=call.arguments)
        return message
