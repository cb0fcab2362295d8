"""What a client has of an answer already, whose router has died: checked, and replayed to where the answer continues.

    Resume ──checked──▶ ids ──OutputProcessor──▶ ResumedChoice: ids and the text that was delivered with them

The state of a stream is its ids. So a router needs nothing of the one before: the text that is delivered after some ids
is a function of those ids alone, as for a stream that continues at another instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.sampling.params import SamplingParams, check_each_id
from engine.text.detokenizer import OutputProcessor
from engine.text.tokenizer import Tokenizer
from protos.tandem.v1 import generation_pb2

_MAX_FINGERPRINT_CHARS = 128


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """One choice, as far as the client has it."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Delivered with these ids. Of a finished choice it is not needed, and empty."""
    is_finished: bool = False
    fingerprint: str = ""
    """Of the identity that computed it; empty: unknown."""


async def resumed_choices(
    resume: generation_pb2.Resume,
    params: SamplingParams,
    prompt: Sequence[int],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_model_len: int,
) -> Mapping[int, ResumedChoice]:
    """The choices of `resume` by their index; `params` with max_tokens filled in. Raises InvalidRequest."""
    if not resume.choices:
        return {}
    resumed: dict[int, ResumedChoice] = {}
    for index, choice in enumerate(resume.choices):
        field = f"resume.choices[{index}]"
        if not 0 <= choice.choice < params.n or choice.choice in resumed:
            raise InvalidRequest(f"{field}.choice", f"is {choice.choice}", f"each of 0..{params.n - 1} once")
        if len(choice.fingerprint) > _MAX_FINGERPRINT_CHARS:
            problem = f"has {len(choice.fingerprint)} characters"
            raise InvalidRequest(f"{field}.fingerprint", problem, f"at most {_MAX_FINGERPRINT_CHARS}")
        _check_number(field, len(choice.token_ids), choice.finished, params, max_model_len - len(prompt))
        ids = tuple(choice.token_ids)
        check_each_id(f"{field}.token_ids", ids, vocab_size)
        text = ""
        if not choice.finished:
            text = await asyncio.to_thread(_delivered, field, ids, params, prompt, tokenizer)
        resumed[choice.choice] = ResumedChoice(ids, text, choice.finished, choice.fingerprint)
    if len(resumed) == params.n and all(choice.is_finished for choice in resumed.values()):
        raise InvalidRequest("resume", "every choice has finished", "a choice that has not")
    return resumed


def _check_number(field: str, num_ids: int, finished: bool, params: SamplingParams, room: int) -> None:
    """Before any id is looked at: a message has room for millions. `room`: tokens that fit behind the prompt."""
    assert params.max_tokens is not None, "validation fills max_tokens in"
    most = min(params.max_tokens, room) - (not finished)
    if num_ids > most:
        problem = f"has {num_ids} ids, of at most {min(params.max_tokens, room)} that the choice can have"
        raise InvalidRequest(f"{field}.token_ids", problem, f"at most {most}, or finished")


def _delivered(
    field: str, ids: Sequence[int], params: SamplingParams, prompt: Sequence[int], tokenizer: Tokenizer | None
) -> str:
    text = OutputProcessor(tokenizer, params, prompt=prompt).replay(ids)
    if text is None:
        raise InvalidRequest(f"{field}.token_ids", "contain a stop string: the choice has ended", "finished")
    return text
