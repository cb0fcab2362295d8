"""When an output ends: by token in the engine core, by text in the front.

The core calls `check_token_stop` after each sampled token. The front gives the tokens to an `OutputProcessor`, whose
life is

    (replay) ─▶ push … push ─▶ finished          by a stop string, or because the core said so
                        └────▶ handed over        another instance replays the ids and goes on

Text is delivered as soon as it can no longer become part of a stop string. What has been delivered after k ids is
a function of those ids alone, not of how they were cut into pushes: an instance that replays k ids delivers from the
same character on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.detokenizer import IncrementalDetokenizer
from engine.messages import FinishReason
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer


class TokenStop(NamedTuple):
    """Whether, and why, the engine core ends a request after a token."""

    finish_reason: FinishReason | None = None
    """None: it goes on."""
    stop_token_id: int | None = None
    """Set for one of the request's own stop tokens, not for EOS."""


_GOES_ON, _EOS, _LENGTH = TokenStop(), TokenStop("stop"), TokenStop("length")


def check_token_stop(
    token_id: int,
    num_output_tokens: int,
    params: SamplingParams,
    *,
    eos_token_ids: Collection[int],
    num_tokens: int,
    max_model_len: int,
) -> TokenStop:
    """Whether the request ends with `token_id`, the newest token, which both counts include.

    `num_tokens` is prompt + output. Before `min_tokens` only the lengths end it; a stop token in the last possible
    place is a stop, not a length.
    """
    if num_output_tokens >= params.min_tokens:
        if token_id in params.stop_token_ids:
            return TokenStop("stop", token_id)
        if token_id in eos_token_ids and not params.ignore_eos:
            return _EOS
    if num_tokens >= max_model_len or (params.max_tokens is not None and num_output_tokens >= params.max_tokens):
        return _LENGTH
    return _GOES_ON


class _Matcher:
    """Finds one stop string in a stream of characters, in constant time per character.

    `num_matched` is the length of the longest end of the stream that is a beginning of the string. Source: Knuth,
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
        """Take a character; whether the string ends with it."""
        if self.num_matched == len(self.string):
            self.num_matched = self._fallback[self.num_matched]
        self.num_matched = self._step(self.num_matched, char)
        return self.num_matched == len(self.string)


@dataclass(slots=True, frozen=True)
class Delta:
    """What one push brings to the client."""

    text: str
    text_offset: int
    """Characters delivered before `text`."""
    num_tokens: int
    """How many of the pushed ids belong to the output: fewer than were pushed when a stop string ended it."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token's id or the stop string that ended the output; None for EOS and all other ends."""


class OutputProcessor:
    """The text of one choice, with stop strings. Owned by the front; one caller at a time.

    Of several stop strings the one that is complete first ends the output, of those the longest; so the result does not
    depend on how the text is cut. A stop string counts once `min_tokens` ids have come, wherever it began.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, prompt: Sequence[int] = ()) -> None:
        self._params = params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, prompt=prompt
        )
        # Longest first: of two that end with the same character the longer one leaves less of itself behind.
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
    ) -> Delta:
        """Take the next ids and, when the core ended the request, why. After the end nothing more is taken.

        With "stop" the last id is the stop token: it has text only with include_stop_str_in_output. With "hand_over"
        the held text stays held: another instance delivers it.
        """
        if self.finish_reason is not None:
            return self._delta("", 0)
        hidden = 1 if finish_reason == "stop" and not self._params.include_stop_str_in_output else 0
        visible = len(token_ids) - hidden
        for i, token_id in enumerate(token_ids):
            self._num_ids += 1
            if i < visible and self._append(self._detokenizer.push((token_id,)) if self._params.detokenize else ""):
                return self._delta(self._take(len(self._held)), i + 1)
        if finish_reason is not None:
            self.finish_reason, self._stop_reason = finish_reason, stop_token_id
            if finish_reason != "hand_over":
                self._append(self._detokenizer.finish())
                return self._delta(self._take(len(self._held)), len(token_ids))
        num_kept = max((matcher.num_matched for matcher in self._matchers), default=0)
        return self._delta(self._take(len(self._held) - num_kept), len(token_ids))

    def replay(self, token_ids: Sequence[int]) -> Delta:
        """Take ids that another instance has emitted, on a fresh processor; it delivered the result's text."""
        return self.push(token_ids)

    def _append(self, text: str) -> bool:
        """Add `text` to what is held; at a stop string cut it there, note the end and return True."""
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

    def _delta(self, text: str, num_tokens: int) -> Delta:
        offset = self.num_delivered
        self.num_delivered += len(text)
        return Delta(text, offset, num_tokens, self.finish_reason, self._stop_reason)
