"""Log-probabilities in OpenAI's two shapes, one for each endpoint, and what a single token looks like in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.tokenizer import Tokenizer
from protos.tandem.v1 import common_pb2

Candidates = Sequence[common_pb2.Logprob]
"""Of one position: the token that stands there first, then the best ones."""
Columns = dict[str, list[Any]]
"""Grows by one entry a column with each token."""

_LOWEST = -9999.0
"""What vLLM writes for minus infinity, which JSON does not have."""


class TokenTexts:
    """What tokens stand for. Without a tokenizer a single one is shown as its id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def data(self, token_id: int) -> bytes | None:
        """The token's bytes, which may be a part of a character; None where the vocabulary has none."""
        if self._tokenizer is None or self._tokenizer.token_bytes is None:
            return None
        return self._tokenizer.token_bytes.of(token_id)

    def of(self, token_id: int) -> str:
        """The token's own text; U+FFFD for a part of a character."""
        if (data := self.data(token_id)) is not None:
            return data.decode(errors="replace")
        return f"token_id:{token_id}" if self._tokenizer is None else self.of_all([token_id])

    def of_all(self, token_ids: Sequence[int]) -> str:
        """The text of a whole prompt, special tokens included; "" without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids, skip_special_tokens=False)


def completion_columns(texts: TokenTexts, positions: Sequence[Candidates], text_offset: int, top: int) -> Columns:
    """The four columns of /v1/completions; the first token's text begins at `text_offset` characters."""
    columns: Columns = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for candidates in positions:
        chosen = candidates[0]
        token = texts.of(chosen.token_id)
        shown = [chosen, *(item for item in candidates[1:] if item.rank <= top)]
        columns["tokens"].append(token)
        columns["token_logprobs"].append(_finite(chosen.logprob))
        columns["top_logprobs"].append({texts.of(item.token_id): _finite(item.logprob) for item in shown})
        columns["text_offset"].append(text_offset)
        text_offset += len(token)
    return columns


def prompt_columns(texts: TokenTexts, prompt: Sequence[int], positions: Sequence[Candidates], top: int) -> Columns:
    """The same of an echoed prompt, whose first token nothing predicts."""
    first = texts.of(prompt[0])
    columns: Columns = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    for name, column in completion_columns(texts, positions[1:], len(first), top).items():
        columns[name] += column
    return columns


def chat_columns(texts: TokenTexts, positions: Sequence[Candidates], top: int) -> Columns:
    """The one column of /v1/chat/completions, an object for each token."""
    content = []
    for candidates in positions:
        best = sorted((item for item in candidates if item.rank <= top), key=lambda item: item.rank)
        told = _chat_entry(texts, candidates[0])
        content.append({**told, "top_logprobs": [_chat_entry(texts, item) for item in best]})
    return {"content": content}


def joined(parts: Sequence[Columns]) -> Columns | None:
    """One after the other; None where there are none."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}


def _chat_entry(texts: TokenTexts, item: common_pb2.Logprob) -> dict[str, Any]:
    data = texts.data(item.token_id)
    return {
        "token": texts.of(item.token_id),
        "logprob": _finite(item.logprob),
        "bytes": None if data is None else list(data),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
