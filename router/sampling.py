"""Sampling parameters: the wire's message ↔ the engine's value, once in each direction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.sampling_params import SamplingParams
from protos.tandem.v1 import common_pb2

_SCALARS = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "n", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logprobs", "prompt_logprobs", "seed", "max_tokens",
)  # fmt: skip
_LISTS = ("stop", "stop_token_ids", "bad_words")


def from_wire(message: common_pb2.SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
    """What the client asked for over the model's defaults over Tandem's own. Nothing is checked here.

    `max_tokens` stays None where neither says anything: as many as fit.
    """
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
    return SamplingParams(**values)


def to_wire(params: SamplingParams, seed: int | None) -> common_pb2.SamplingParams:
    """Every field set, for an instance, which has no defaults of its own. `n` stays out: each choice goes by itself."""
    message = common_pb2.SamplingParams(seed=seed)
    for name in _SCALARS:
        if name not in ("n", "seed") and (value := getattr(params, name)) is not None:
            setattr(message, name, value)
    for name in _LISTS:
        getattr(message, name).extend(getattr(params, name))
    if params.logit_bias:
        message.logit_bias.update(params.logit_bias)
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.ids.extend(params.allowed_token_ids)
    message.bad_word_ids.extend(common_pb2.TokenIds(ids=ids) for ids in params.bad_word_ids)
    return message
