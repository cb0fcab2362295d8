"""Requests of every kind that a cut can affect, each with the answer of the aggregated engine.

One stop string is taken from the answer itself, so that it matches. Others begin like places of the answer and never
match: the detokenizer holds their beginnings back again and again, and a cut finds some of them in its buffer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.llm import CompletionOutput, Logprob
from tandem.client.completion import Choice, Completion, TokenLogprob

_NEVER = "¤"
_STOP_LEN = 5
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95},
    "penalised": {
        "temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
        "logit_bias": {7: 2.0}, "bad_word_ids": [[50], [60, 61]], "logprobs": 3,
    },
    "penalised greedy": {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 0},
    "stopped": {"temperature": 0.7},
    "two choices": {"temperature": 0.8, "n": 2, "logprobs": 1},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """A request and its expected output, one per choice."""

    kind: str
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    expected: tuple[CompletionOutput, ...]

    def assert_answered(self, completion: Completion) -> None:
        """Ids, text, log-probabilities, reason and usage of every choice are those of the fault-free run."""
        for choice, output in zip(completion.choices, self.expected, strict=True):
            assert list(choice.token_ids) == output.token_ids, self.kind
            assert choice.text == output.text, self.kind
            assert choice.finish_reason == output.finish_reason, self.kind
            assert choice.stop_string == (output.stop_reason if isinstance(output.stop_reason, str) else None)
            assert choice.usage.prompt_tokens == len(self.prompt)
            assert choice.usage.completion_tokens == len(output.token_ids)
            _assert_same_logprobs(choice, output.logprobs or [])


def make_questions(
    llm: LLM, count: int, source: random.Random, *, num_tokens: int, lengths: Sequence[int] = ()
) -> list[Question]:
    """`count` different ones, every kind in turn, short prompts and long ones. With `lengths`, one of every kind with
    the first length, then with the second."""
    fixed = [length for length in lengths for _ in _KINDS]
    prompts = [
        [source.randrange(0, 360) for _ in range(fixed[number] if fixed else source.choice((12, 40, 90, 150)))]
        for number in range(count)
    ]
    samplings = []
    for number, kind in zip(range(count), list(_KINDS) * count, strict=False):
        samplings.append({**_KINDS[kind], "max_tokens": num_tokens, "seed": number, "ignore_eos": True})
    stopped = [number for number in range(count) if _kind(number) == "stopped"]
    drafts = _answers(llm, [prompts[number] for number in stopped], [samplings[number] for number in stopped])
    for number, draft in zip(stopped, drafts, strict=True):
        samplings[number]["stop"] = _stops(draft[0].text)
    answers = _answers(llm, prompts, samplings)
    return [
        Question(_kind(number), tuple(prompts[number]), samplings[number], answer)
        for number, answer in enumerate(answers)
    ]


def _kind(number: int) -> str:
    return list(_KINDS)[number % len(_KINDS)]


def _answers(
    llm: LLM, prompts: Sequence[list[int]], samplings: Sequence[dict[str, Any]]
) -> list[tuple[CompletionOutput, ...]]:
    params = [SamplingParams(**sampling) for sampling in samplings]
    return [tuple(answer.outputs) for answer in llm.generate(list(prompts), params, use_tqdm=False)]


def _stops(text: str) -> list[str]:
    """One that ends the text in its last third (before it if that only repeats), and beginnings of others all over."""
    late = 2 * len(text) // 3
    met = next(
        text[at : at + _STOP_LEN]
        for at in (*range(late, len(text) - _STOP_LEN), *range(late - 1, -1, -1))
        if text.find(text[at : at + _STOP_LEN]) == at and "\N{REPLACEMENT CHARACTER}" not in text[at : at + _STOP_LEN]
    )
    begun = [text[at : at + 3] + _NEVER for at in range(3, len(text) - 3, max(len(text) // 12, 1))]
    return [met, *begun[:12]]


def _assert_same_logprobs(choice: Choice, expected: Sequence[dict[int, Logprob]]) -> None:
    found: tuple[tuple[TokenLogprob, ...], ...] = choice.logprobs
    assert len(found) == len(expected)
    for position, entries in zip(found, expected, strict=True):
        assert [(one.token_id, one.rank) for one in position] == [(one, entry.rank) for one, entry in entries.items()]
        assert [one.logprob for one in position] == pytest.approx([one.logprob for one in entries.values()], abs=1e-4)
