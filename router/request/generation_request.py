"""A validated request, as everything behind validation sees it: ids, not text; every default resolved."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.sampling.constraints import CONSTRAINTS
from engine.sampling.params import SamplingParams
from protos.tandem.v1 import common_pb2
from router.request.chat import ChatOutput

_DEADLINE_MARGIN_S = 0.02
"""Calls end this much before the request does, so that the router ends it and not a timer at the client."""
_SCALARS = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "n", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logprobs", "prompt_logprobs", "seed", "max_tokens",
)  # fmt: skip
_LISTS = ("stop", "stop_token_ids", "bad_words")


def from_wire(message: common_pb2.SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
    """The client's values over the model's defaults over Tandem's own, unchecked. `max_tokens` None: as many as fit."""
    values: dict[str, Any] = {"max_tokens": None, **defaults}
    values |= {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}  # type: ignore[arg-type]
    for name in _LISTS:
        if given := getattr(message, name):
            values[name] = tuple(given)
    if message.logit_bias:
        values["logit_bias"] = dict(message.logit_bias)
    if message.HasField("allowed_token_ids"):
        values["allowed_token_ids"] = tuple(message.allowed_token_ids.ids)
    if message.bad_word_ids:
        values["bad_word_ids"] = tuple(tuple(sequence.ids) for sequence in message.bad_word_ids)
    if (constraint := message.WhichOneof("constraint")) is not None:
        is_choice = constraint == "choice"
        values[constraint] = tuple(message.choice.texts) if is_choice else getattr(message, constraint)
    return SamplingParams(**values)


def to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    """For an instance, which has no defaults: every field set but `n`, since each choice is a request of its own."""
    message = common_pb2.SamplingParams()
    for name in _SCALARS:
        if name != "n" and (value := getattr(params, name)) is not None:
            setattr(message, name, value)
    for name in _LISTS:
        getattr(message, name).extend(getattr(params, name))
    if params.logit_bias:
        message.logit_bias.update(params.logit_bias)
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.ids.extend(params.allowed_token_ids)
    message.bad_word_ids.extend(common_pb2.TokenIds(ids=ids) for ids in params.bad_word_ids)
    for constraint in CONSTRAINTS:
        if constraint != "choice" and (value := getattr(params, constraint)):
            setattr(message, constraint, value)
    if params.choice is not None:
        message.choice.texts.extend(params.choice)
    return message


class Objectives(NamedTuple):
    """Of one request, in seconds from now; None: there is none."""

    ttft_s: float | None = None
    itl_s: float | None = None
    begin_s: float | None = None
    """Within which a step must begin the prompt."""


NO_OBJECTIVES = Objectives()


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """One choice of an answer whose router has died, as far as the client has it."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Delivered with these ids. Of a finished choice it is not needed, and empty."""
    is_finished: bool = False
    fingerprint: str = ""
    """Of the identity that computed it; empty: unknown."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A valid request. Immutable; each of its `n` choices runs as requests of their own on the instances."""

    label: str  # the client's name for it; need not be unique, so only Abort uses it as a key
    request_id: str  # this router's name for it, unique and unguessable
    model: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # with max_tokens and seed filled in
    priority: int = 0  # among its tenant's requests
    instance_priority: int = 0  # among all requests of an instance
    cache_salt: str = ""
    lora: str = ""  # name of the adapter; empty for none
    session: str = ""  # the conversation it belongs to; used for affinity only
    deadline_s: float | None = None  # monotonic time at which it must be over
    tenant: str = ""  # decides its share of admission
    chat_output: ChatOutput = field(default_factory=ChatOutput)  # how the output is divided; false: not at all
    resumed: Mapping[int, ResumedChoice] = field(default_factory=dict)  # by choice, what its client has already
    eos_token_ids: tuple[int, ...] = ()  # of the model: an attempt ends where another would; empty: each instance's own

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the router ends it, shortly before its deadline; None: it has no deadline."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic() - _DEADLINE_MARGIN_S

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def max_length(self) -> int:
        """Most tokens of the prompt and the output of one choice together."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def has_begun(self) -> bool:
        """Its client has tokens from another router."""
        return any(choice.token_ids or choice.is_finished for choice in self.resumed.values())

    @property
    def num_resumed_tokens(self) -> int:
        """Output that has to be prefilled again, of the longest choice that goes on."""
        going_on = (choice for choice in self.resumed.values() if not choice.is_finished)
        return max((len(choice.token_ids) for choice in going_on), default=0)

    @property
    def num_tokens_left(self) -> int:
        """Most output tokens that a choice may still get: the one of which least has come."""
        begun = [len(choice.token_ids) for choice in self.resumed.values() if not choice.is_finished]
        return self.max_tokens - (min(begun, default=0) if len(begun) == self.num_choices_left else 0)

    @property
    def num_choices_left(self) -> int:
        """Without those that have finished at another router."""
        return self.params.n - sum(choice.is_finished for choice in self.resumed.values())

    @property
    def max_tokens(self) -> int:
        """Most output tokens of one choice."""
        assert self.params.max_tokens is not None, "validation fills max_tokens in"
        return self.params.max_tokens
