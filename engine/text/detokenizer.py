"""Incremental detokenizer: token ids to text in pieces that never end inside a character.

    push ─▶ text whose characters are complete     (the beginning of a character is held back)
    finish ─▶ the held bytes, as U+FFFD where they are no character

The text is a function of the ids alone, however they are divided into pushes, so another instance that pushes the same
ids is in the same state.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.token_bytes import TokenBytes, decode_utf8
from engine.text.tokenizer import Tokenizer

_MAX_PROMPT_TAIL = 8
"""Prompt tokens as context: enough for a character of four byte tokens and the space before a word."""
_MAX_WINDOW = 32


class IncrementalDetokenizer:
    """The text of one request's output. One caller at a time.

    With a `prompt` the output is the text after the prompt's: a first word keeps the space before it. Without one it
    equals `tokenizer.decode(ids)`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        table = tokenizer.token_bytes
        self._stream: _ByteStream | _WindowStream = _ByteStream(table) if table else _WindowStream(tokenizer)
        tail = [i for i in prompt[-2 * _MAX_PROMPT_TAIL :] if i not in tokenizer.special_ids][-_MAX_PROMPT_TAIL:]
        self._stream.push(tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text that they complete."""
        if self._hidden:
            token_ids = [i for i in token_ids if i not in self._hidden]
        return self._stream.push(token_ids)

    def finish(self) -> str:
        """The held text, at the end."""
        return self._stream.finish()


class _ByteStream:
    """For vocabularies whose tokens have bytes: constant time per token, at most three bytes held back."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._pending = b""
        self._num_to_strip = table.num_stripped

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
