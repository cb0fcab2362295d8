"""From a caller's words to a GenerateRequest: the three kinds of prompt, the sampling parameters by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypedDict

from protos.tandem.v1 import common_pb2, generation_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or the messages of a chat: `[{"role": "user", "content": "…"}]`."""

_LABELS = ("request_id", "model", "priority", "cache_salt", "idempotency_key")


class Sampling(TypedDict, total=False):
    """What `generate` and `stream` take by name; protos/tandem/v1/common.proto says what each does and allows."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    n: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logprobs: int
    prompt_logprobs: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    bad_word_ids: Sequence[Sequence[int]]
    best_of: int


class RequestOptions(Sampling, total=False):
    """Everything that a call takes by name: the sampling parameters and what concerns the request as a whole."""

    request_id: str
    """A label for logs and for abort; the router makes one if there is none."""
    model: str
    priority: int
    """Larger goes first; -100..100."""
    cache_salt: str
    """Requests with different salts share no prefix cache."""
    idempotency_key: str
    timeout_s: float
    """How long this request may take in all; the client's own default otherwise."""


def sampling_params(sampling: Mapping[str, object]) -> common_pb2.SamplingParams:
    """The message for `sampling`; None counts as not given. Raises TypeError for a name that does not exist."""
    params = common_pb2.SamplingParams()
    known = params.DESCRIPTOR.fields_by_name
    for name, value in sampling.items():
        if name not in known:
            similar = difflib.get_close_matches(name, [*known, *_LABELS, "timeout_s"], n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else f"; known: {', '.join(sorted(known))}"
            raise TypeError(f"no option is called {name!r}{hint}")
        if value is not None:
            _set(params, name, value)
    return params


def _set(params: common_pb2.SamplingParams, name: str, value: object) -> None:
    try:
        if name == "stop" and isinstance(value, str):
            params.stop.append(value)
        elif name == "allowed_token_ids":
            params.allowed_token_ids.ids.extend(value)  # type: ignore[arg-type]
            params.allowed_token_ids.SetInParent()
        elif name == "bad_word_ids":
            params.bad_word_ids.extend(common_pb2.TokenIds(ids=ids) for ids in value)  # type: ignore[attr-defined]
        elif name == "logit_bias":
            params.logit_bias.update(value)  # type: ignore[call-overload]
        elif name in ("stop", "stop_token_ids", "bad_words"):
            getattr(params, name).extend(value)
        else:
            setattr(params, name, value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def generate_request(prompt: Prompt, options: Mapping[str, object]) -> generation_pb2.GenerateRequest:
    """The wire's form of a call; `options` are RequestOptions, of which timeout_s is not the wire's business."""
    labels = {name: value for name, value in options.items() if name in _LABELS}
    sampling = {name: value for name, value in options.items() if name not in _LABELS and name != "timeout_s"}
    request = generation_pb2.GenerateRequest(sampling=sampling_params(sampling), **labels)  # type: ignore[arg-type]
    if isinstance(prompt, str):
        request.text = prompt
        return request
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        for message in items:
            assert isinstance(message, Mapping)
            if set(message) != {"role", "content"}:
                raise TypeError(f"a chat message has the keys role and content, not {sorted(message)}")
            request.chat.messages.add(role=message["role"], content=message["content"])
    elif all(isinstance(item, int) for item in items):
        request.token_ids.ids.extend(items)  # type: ignore[arg-type]
        request.token_ids.SetInParent()
    else:
        raise TypeError("a prompt is text, a list of token ids, or a list of {'role': …, 'content': …}")
    return request
