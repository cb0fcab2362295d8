"""The text of an output: token ids to text in pieces that never end inside a character, up to a stop string. The engine
core ends an output by token (Request.check_stop).

    (replay ─▶) push … push ─▶ finished          by a stop string, or by the core
                        └───▶ handed over       another instance replays the ids and continues

Text is delivered as soon as its characters are complete and it can no longer become part of a stop string. The text
delivered after k ids is a function of those ids alone, not of how they were divided into pushes: an instance that
replays k ids continues at the same character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.messages import FinishReason
from engine.sampling.params import SamplingParams
from engine.text.token_bytes import TokenBytes, decode_utf8
from engine.text.tokenizer import Tokenizer

_MAX_PROMPT_TAIL = 8
"""Prompt tokens as context: enough for a character of four byte tokens and the space before a word."""
_MAX_WINDOW = 32
_REPLAYED = 256
"""Ids that are replayed at once: the time of bytes that are no characters grows with the square of their number."""


class IncrementalDetokenizer:
    """The text of one request's output; the beginning of a character is held back until `finish`. One caller at a time.

    With a `prompt` the output is the text after the prompt's: a first word keeps the space before it, and a character
    that the prompt begins is completed. Without one it equals `tokenizer.decode(ids)`. A constrained output is the text
    of its own bytes, whatever the prompt: so its grammar has read it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
        is_constrained: bool = False,
    ) -> None:
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        table = tokenizer.token_bytes
        self._stream: _ByteStream | _WindowStream = _WindowStream(tokenizer)
        if table is not None:
            self._stream = _ByteStream(table, num_to_strip=0 if is_constrained else table.num_stripped)
            prompt = () if is_constrained else prompt
        tail = [i for i in prompt[-2 * _MAX_PROMPT_TAIL :] if i not in tokenizer.special_ids][-_MAX_PROMPT_TAIL:]
        self._stream.push(tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text that they complete."""
        if self._hidden:
            token_ids = [i for i in token_ids if i not in self._hidden]
        return self._stream.push(token_ids)

    def finish(self) -> str:
        """The held bytes, at the end, as U+FFFD where they are no character."""
        return self._stream.finish()


class _ByteStream:
    """For vocabularies whose tokens have bytes: constant time per token, at most three bytes held back."""

    def __init__(self, table: TokenBytes, *, num_to_strip: int) -> None:
        self._table = table
        self._pending = b""
        self._num_to_strip = num_to_strip

    def push(self, token_ids: Sequence[int]) -> str:
        return self._take(b"".join(map(self._table.of, token_ids)), final=False)

    def finish(self) -> str:
        return self._take(b"", final=True)

    def _take(self, data: bytes, *, final: bool) -> str:
        text, self._pending = decode_utf8(self._pending + data, per_byte=self._table.per_byte, final=final)
        if self._num_to_strip and text:
            text, self._num_to_strip = self._table.strip(text, self._num_to_strip)
        return text


class _WindowStream:
    """For other vocabularies: the difference between decoding the last tokens with and without the new ones.

    The window begins with context that was delivered already; it moves when a piece is complete, at the latest after 32
    tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._new_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._step, token_ids))

    def finish(self) -> str:
        text = self._difference()
        self._context, self._new_ids = [*self._context, *self._new_ids][-1:], []
        return text

    def _step(self, token_id: int) -> str:
        self._new_ids.append(token_id)
        text = self._difference()
        if (not text or text.endswith("\ufffd")) and len(self._new_ids) < _MAX_WINDOW:
            return ""
        self._context, self._new_ids = self._new_ids, []
        return text

    def _difference(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode([*self._context, *self._new_ids], skip_special_tokens=False)[len(before) :]


# Stop strings


class _Matcher:
    """Finds one stop string in a stream of characters, in constant time per character.

    `num_matched` is the length of the longest suffix of the stream that is a prefix of the string. Source: Knuth,
    Morris, Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
    """

    __slots__ = ("_fallback", "num_matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        self._fallback = [0, 0]  # of each matched length, the next shorter one to try
        for char in string[1:]:
            self._fallback.append(self._step(self._fallback[-1], char))

    def _step(self, num_matched: int, char: str) -> int:
        while num_matched and self.string[num_matched] != char:
            num_matched = self._fallback[num_matched]
        return num_matched + (self.string[num_matched] == char)

    def push(self, char: str) -> bool:
        """Take a character; True if it completes the string."""
        if self.num_matched == len(self.string):
            self.num_matched = self._fallback[self.num_matched]
        self.num_matched = self._step(self.num_matched, char)
        return self.num_matched == len(self.string)

    def ends_in(self, held: str, text: str) -> bool:
        """Whether the string is complete somewhere in `text`, which follows `held`."""
        return self.string in held[max(0, len(held) - len(self.string) + 1) :] + text

    def go_on_after(self, text: str) -> None:
        """Match as if `text` had been pushed; what is before it no longer matters."""
        self.num_matched = 0
        for char in text[-len(self.string) :]:
            self.push(char)


@dataclass(slots=True, frozen=True)
class TextDelta:
    """The text to deliver after one push."""

    text: str
    text_offset: int
    """Characters delivered before `text`."""
    num_tokens: int
    """How many of the pushed ids belong to the output: not all if a stop string ended it."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the output, else None."""


class OutputProcessor:
    """The text of one choice, with stop strings. One caller at a time.

    The first stop string to be complete ends the output, the longest of several, so that the result does not depend on
    how the text is divided. A stop string counts if it is complete after `min_tokens` ids, wherever it began.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, *, prompt: Sequence[int] = ()) -> None:
        """Without a tokenizer, as without `detokenize`, the text is empty."""
        self._params = params
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                prompt=prompt,
                is_constrained=params.is_constrained,
            )
        # Longest first: of two that end at the same character the longer one leaves less of itself in the text.
        self._matchers = [_Matcher(string) for string in sorted(set(params.stop), key=len, reverse=True)]
        self._held = ""
        self._num_ids = 0
        self.num_delivered = 0
        """Characters delivered so far."""
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    def push(
        self,
        token_ids: Sequence[int],
        *,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> TextDelta:
        """Take the next ids and the core's finish reason, if any. Ids after the end are ignored.

        With "stop" the last id is the stop token: it has text only with include_stop_str_in_output. With "hand_over"
        the held text stays held: another instance delivers it, after a first push of the ids emitted here.
        """
        if self.finish_reason is not None:
            return self._delta("", 0)
        hidden = 1 if finish_reason == "stop" and not self._params.include_stop_str_in_output else 0
        visible = len(token_ids) - hidden
        for i, token_id in enumerate(token_ids):
            self._num_ids += 1
            if i < visible and self._append(self._detokenizer.push((token_id,)) if self._detokenizer else ""):
                return self._delta(self._take(len(self._held)), i + 1)
        if finish_reason is not None:
            self.finish_reason, self._stop_reason = finish_reason, stop_token_id
            if finish_reason != "hand_over":
                self._append(self._detokenizer.finish() if self._detokenizer else "")
                return self._delta(self._take(len(self._held)), len(token_ids))
        return self._delta(self._take(len(self._held) - self._num_kept), len(token_ids))

    def replay(self, token_ids: Sequence[int]) -> str | None:
        """The text of a push of these ids; None if a stop string ends the output among them. In far less time: a client
        may send as many as the context has."""
        num_endless = max(0, min(self._params.min_tokens - 1 - self._num_ids, len(token_ids)))
        self._go_on_after(token_ids[:num_endless], may_end=False)
        if not self._go_on_after(token_ids[num_endless:], may_end=True):
            return None
        return self._delta(self._take(len(self._held) - self._num_kept), len(token_ids)).text

    def _go_on_after(self, token_ids: Sequence[int], *, may_end: bool) -> bool:
        """False if they end the output."""
        self._num_ids += len(token_ids)
        parts = (token_ids[at : at + _REPLAYED] for at in range(0, len(token_ids), _REPLAYED))
        text = "".join(map(self._detokenizer.push, parts)) if self._detokenizer else ""
        if may_end and any(matcher.ends_in(self._held, text) for matcher in self._matchers):
            return False
        self._held += text
        for matcher in self._matchers:
            matcher.go_on_after(self._held)
        return True

    @property
    def _num_kept(self) -> int:
        """Characters that may be the beginning of a stop string."""
        return max((matcher.num_matched for matcher in self._matchers), default=0)

    def _append(self, text: str) -> bool:
        """Add `text` to the held text; True if a stop string ends the output, and the text with it."""
        if not self._matchers:
            self._held += text
            return False
        for i, char in enumerate(text):
            ended = [matcher.string for matcher in self._matchers if matcher.push(char)]
            if ended and self._num_ids >= self._params.min_tokens:
                cut = 0 if self._params.include_stop_str_in_output else len(ended[0])
                self._held = (self._held + text[: i + 1])[: len(self._held) + i + 1 - cut]
                self.finish_reason, self._stop_reason = "stop", ended[0]
                return True
        self._held += text
        return False

    def _take(self, num_chars: int) -> str:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        return text

    def _delta(self, text: str, num_tokens: int) -> TextDelta:
        offset = self.num_delivered
        self.num_delivered += len(text)
        return TextDelta(text, offset, num_tokens, self.finish_reason, self._stop_reason)
