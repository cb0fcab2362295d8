"""The text of an output, and its end at a stop string. The engine core ends it by token (Request.check_stop).

    push … push ─▶ finished          by a stop string, or by the core
             └───▶ handed over       another instance replays the ids and continues

Text is delivered as soon as it can no longer become part of a stop string. The text delivered after k ids is a function
of those ids alone, not of how they were divided into pushes: an instance that replays k ids continues at the same
character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.messages import FinishReason
from engine.sampling.params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer


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
            skip = params.skip_special_tokens
            self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prompt=prompt)
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
        num_kept = max((matcher.num_matched for matcher in self._matchers), default=0)
        return self._delta(self._take(len(self._held) - num_kept), len(token_ids))

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
