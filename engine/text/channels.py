"""The output of a model that writes into channels (OpenAI's harmony format, gpt-oss), divided piece by piece.

    <|channel|>analysis<|message|>…<|end|>                                        reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>    a call of f
    <|start|>assistant<|channel|>final<|message|>…<|return|>                      content

The prompt ends with "<|start|>assistant". The recipient may stand before the channel as well. A message to another one
than a function of the request (a tool that the model was trained with) is reasoning; one in the channel commentary
without a recipient is content. Reasoning, and content, of several messages are divided by line feeds. What begins like
no message is content.

Heads come in other forms, too: a function without "functions.", no channel or several, of which the last counts, or an
end in place of <|message|>: then what they say is reasoning.

The marks are special tokens, which every constraint excludes: a constrained answer begins behind ANSWER_HEAD.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from engine.text.chat_output import ChatDelta, StateParser, ToolCallDelta, overlap

CHANNEL, HEAD_END, MESSAGE_END = "<|channel|>", "<|message|>", "<|end|>"
ANSWER_HEAD = f"{CHANNEL}final{HEAD_END}"
_START, _CONSTRAIN = "<|start|>", "<|constrain|>"
_ENDS = (MESSAGE_END, "<|call|>", "<|return|>", _START)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_HEAD = re.compile(r"assistant\s{0,64}(?:to=[^\s<]{1,256}\s{0,64})?(?:<\|(?:channel|constrain)\|>[^<]{0,320}){0,4}")
_HEAD_ENDS = (HEAD_END, *_ENDS)
_GOES_ON = (CHANNEL, _CONSTRAIN, *_HEAD_ENDS)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_ANALYSIS = re.compile(r"\s*analysis\b")
_FUNCTIONS = "functions."


class ChannelParser(StateParser):
    """Divides the text of one choice."""

    def __init__(self, names: Collection[str], *, max_calls: int | None = None, is_answer: bool = False) -> None:
        """`names`: of the tools; `max_calls`: what follows them is dropped; `is_answer`: the prompt ends with
        ANSWER_HEAD, and a constraint excludes the marks: what looks like one is text."""
        self._names = names
        self._max_calls = max_calls
        self._buffer = "" if is_answer else "assistant"  # with which the prompt ends
        self._state = self._answer if is_answer else self._head
        self._has_reasoning = self._has_content = False
        self._num_calls = 0

    def _head(self, delta: ChatDelta, final: bool) -> bool:
        found = _HEAD.match(self._buffer)
        head = found[0] if found else ""
        rest = self._buffer[len(head) :]
        end = next(filter(rest.startswith, _HEAD_ENDS), None)
        if end is not None and found:
            self._buffer = rest.removeprefix(HEAD_END)
            self._begin(delta, head.removeprefix("assistant"), has_body=end == HEAD_END)
            return True
        begins = _GOES_ON if found else ("assistant",)
        if any(mark.startswith(rest) for mark in begins) or (head.strip() == "assistant" and "to=".startswith(rest)):
            self._buffer = "" if final else self._buffer  # a head that is cut is no content
            return False
        self._buffer = self._buffer.removeprefix("assistant")
        self._state = self._content
        return True

    def _begin(self, delta: ChatDelta, head: str, *, has_body: bool) -> None:
        recipients = [one for one in _RECIPIENT.findall(head) if one != "assistant"]
        name = next((name for one in recipients if (name := one.removeprefix(_FUNCTIONS)) in self._names), None)
        first, last = head.partition(CHANNEL)[0], head.rpartition(CHANNEL)[2]
        if not has_body:
            self._buffer = last.replace(_CONSTRAIN, " ").strip() + self._buffer
        if has_body and name is not None:
            delta.tool_calls.append(ToolCallDelta(self._num_calls, name))
            self._num_calls += 1
            self._state = self._arguments
        elif not has_body or _RECIPIENT.search(f"{first} {last}") or _ANALYSIS.match(last):
            delta.reasoning += "\n" if self._has_reasoning else ""
            self._state = self._reasoning
        else:
            delta.content += "\n" if self._has_content else ""
            self._state = self._content

    def _reasoning(self, delta: ChatDelta, final: bool) -> bool:
        text, is_over = self._body(final)
        delta.reasoning += text
        self._has_reasoning = self._has_reasoning or bool(text)
        return is_over

    def _content(self, delta: ChatDelta, final: bool) -> bool:
        text, is_over = self._body(final)
        delta.content += text
        self._has_content = self._has_content or bool(text)
        return is_over

    def _answer(self, delta: ChatDelta, final: bool) -> bool:
        delta.content, self._buffer = self._buffer, ""
        return False

    def _arguments(self, delta: ChatDelta, final: bool) -> bool:
        text, is_over = self._body(final)
        delta.add_arguments(self._num_calls - 1, text)
        if is_over and self._num_calls == self._max_calls:
            self._state = self._done
        return is_over

    def _body(self, final: bool) -> tuple[str, bool]:
        """The next text of a message, and whether that is its last."""
        found = _END.search(self._buffer)
        if found is None:
            held = 0 if final else max(overlap(self._buffer, end) for end in _ENDS)
            size = len(self._buffer) - held
            text, self._buffer = self._buffer[:size], self._buffer[size:]
            return text, False
        text, self._buffer = self._buffer[: found.start()], self._buffer[found.start() :]
        self._state = self._between
        return text, True

    def _between(self, delta: ChatDelta, final: bool) -> bool:
        """Nothing stands between a message's end and the start of the next one."""
        _, start, after = self._buffer.partition(_START)
        self._buffer = after if start else self._buffer[len(self._buffer) - overlap(self._buffer, _START) :]
        self._state = self._head if start else self._between
        return bool(start)

    def _done(self, delta: ChatDelta, final: bool) -> bool:
        self._buffer = ""
        return False
