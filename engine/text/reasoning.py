"""What a model thinks before it answers: the text between <think> and </think> at the beginning of its output.

    start ─<think>, or the prompt ends with it─▶ thinking ─</think>─▶ rest, for the parser of tool calls if there is one
      └─anything else──────────────────────────────────────────────▶ rest

As with tool calls the result is a function of the text alone. White space around both marks is dropped; before an exact
answer, whose own white space counts, GAP alone.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.text.tool_calls import HERMES, ChatDelta, ChatParser, overlap

BEGIN, END = "<think>", "</think>"
GAP = "\n\n"
"""What models write between END and the answer."""
CHAT_MARKS = frozenset({BEGIN, END, HERMES.mark, HERMES.end})
"""Text in every output, and allowed by constraints, also where a tokenizer lists them as special tokens."""


class ReasoningParser:
    """Divides the text of one choice into reasoning and the rest; a `ChatParser`."""

    def __init__(self, rest: ChatParser | None, *, is_open: bool, is_exact: bool = False) -> None:
        """`is_open`: the prompt ends with <think>. Without `rest` all that follows is content. `is_exact`: a constraint
        lets the answer begin behind GAP."""
        self._rest = rest
        self._is_exact = is_exact
        self._buffer = ""
        self._state: Callable[[ChatDelta, bool], bool] = self._thinking if is_open else self._start
        self._is_blank = True

    def push(self, text: str, *, final: bool = False) -> ChatDelta:
        delta = ChatDelta()
        self._buffer += text
        while self._state(delta, final):
            pass
        return delta

    def _start(self, delta: ChatDelta, final: bool) -> bool:
        text = self._buffer.lstrip()
        if BEGIN.startswith(text) and text != BEGIN and not final:
            return False
        is_thought = text.startswith(BEGIN)
        if is_thought:
            self._buffer = text[len(BEGIN) :]
        self._state = self._thinking if is_thought else self._others
        return True

    def _thinking(self, delta: ChatDelta, final: bool) -> bool:
        if self._is_blank:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(END)
        text = self._buffer if at < 0 else self._buffer[:at]
        certain = text if final or at >= 0 else text[: len(text) - overlap(text, END)]
        certain = certain.rstrip()
        delta.reasoning += certain
        self._is_blank = self._is_blank and not certain
        self._buffer = self._buffer[len(certain) :] if at < 0 else self._buffer[at + len(END) :]
        self._state = self._thinking if at < 0 else self._gap
        return at >= 0

    def _gap(self, delta: ChatDelta, final: bool) -> bool:
        is_over = not GAP.startswith(self._buffer) if self._is_exact else bool(self._buffer.strip())
        if not (is_over or final):
            return False
        answer = self._buffer.removeprefix(GAP) if self._is_exact else self._buffer.lstrip()
        self._buffer = answer if is_over else ""
        self._state = self._others
        return True

    def _others(self, delta: ChatDelta, final: bool) -> bool:
        text, self._buffer = self._buffer, ""
        if self._rest is None:
            delta.content += text
        else:
            rest = self._rest.push(text, final=final)
            delta.content += rest.content
            delta.tool_calls += rest.tool_calls
        return False
