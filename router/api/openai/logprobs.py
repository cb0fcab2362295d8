"""Log-probabilities in the two endpoints' formats, and the text of a single token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.text.tokenizer import Tokenizer
from protos.tandem.v1 import common_pb2

Candidates = Sequence[common_pb2.Logprob]  # of one position: the chosen token, then the best ones
Logprobs = dict[str, list[Any]]  # columns with one entry for each token

_LOWEST = -9999.0  # vLLM's value for minus infinity, which JSON does not have


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Texts of tokens. Without a tokenizer a single token is shown as its id."""

    tokenizer: Tokenizer | None

    def data(self, token_id: int) -> bytes | None:
        """The token's bytes, maybe a part of a character; None where the vocabulary has none."""
        if self.tokenizer is None or self.tokenizer.token_bytes is None:
            return None
        return self.tokenizer.token_bytes.of(token_id)

    def of(self, token_id: int) -> str:
        """The token's own text; U+FFFD for a part of a character."""
        if (data := self.data(token_id)) is not None:
            return data.decode(errors="replace")
        return f"token_id:{token_id}" if self.tokenizer is None else self.of_all([token_id])

    def of_all(self, token_ids: Sequence[int]) -> str:
        """The text of a whole prompt with its special tokens; "" without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=False)


def completion_logprobs(texts: TokenTexts, positions: Sequence[Candidates], text_offset: int, top: int) -> Logprobs:
    """The four columns of /v1/completions; the first token's text begins at `text_offset` characters."""
    columns: Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for candidates in positions:
        chosen = candidates[0]
        token = texts.of(chosen.token_id)
        best = [chosen, *(item for item in candidates[1:] if item.rank <= top)]
        columns["tokens"].append(token)
        columns["token_logprobs"].append(_finite(chosen.logprob))
        columns["top_logprobs"].append({texts.of(item.token_id): _finite(item.logprob) for item in best})
        columns["text_offset"].append(text_offset)
        text_offset += len(token)
    return columns


def prompt_logprobs(texts: TokenTexts, prompt: Sequence[int], positions: Sequence[Candidates], top: int) -> Logprobs:
    """The same of an echoed prompt, whose first token has no prediction."""
    first = texts.of(prompt[0])
    columns: Logprobs = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    for name, column in completion_logprobs(texts, positions[1:], len(first), top).items():
        columns[name] += column
    return columns


def chat_logprobs(texts: TokenTexts, positions: Sequence[Candidates], top: int) -> Logprobs:
    """The one column of /v1/chat/completions, an object for each token."""
    content = []
    for candidates in positions:
        best = sorted((item for item in candidates if item.rank <= top), key=lambda item: item.rank)
        top_logprobs = [_chat_entry(texts, item) for item in best]
        content.append({**_chat_entry(texts, candidates[0]), "top_logprobs": top_logprobs})
    return {"content": content}


def joined(parts: Iterable[Logprobs | None]) -> Logprobs | None:
    """The columns concatenated; None where there are none."""
    present = [part for part in parts if part is not None]
    if len(present) <= 1:
        return present[0] if present else None
    return {name: [entry for part in present for entry in part[name]] for name in present[0]}


def _chat_entry(texts: TokenTexts, item: common_pb2.Logprob) -> dict[str, Any]:
    data = texts.data(item.token_id)
    return {
        "token": texts.of(item.token_id),
        "logprob": _finite(item.logprob),
        "bytes": None if data is None else list(data),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
