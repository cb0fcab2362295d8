"""From a caller's prompt (one of three kinds) and keyword options to a GenerateRequest."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from protos.tandem.v1 import common_pb2, generation_pb2

F = TypeVar("F", bound=Callable[..., Any])
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or the messages of a chat: `[{"role": "user", "content": "…"}]`."""

_REQUEST_FIELDS = ("request_id", "model", "priority", "cache_salt", "idempotency_key")


class Sampling(TypedDict, total=False):
    """Keyword options of `generate` and `stream`; docs/python.md documents each."""

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
    json_object: bool
    """At most one of this and the next four."""
    json_schema: str | Mapping[str, object]
    regex: str
    choice: Sequence[str]
    grammar: str


class RequestOptions(Sampling, total=False):
    """All keyword options of a call: the sampling parameters, and those of the request as a whole."""

    request_id: str
    """For logs and for abort; the router makes one if absent."""
    model: str
    priority: int
    """Larger is served first; -100..100."""
    cache_salt: str
    """Requests with different salts share no prefix cache."""
    idempotency_key: str
    timeout_s: float
    """Limit on the whole time of this request; absent: the client's."""


def shows_options(method: F) -> F:
    """Gives a method with `**options: Unpack[RequestOptions]` the options as parameters in its signature, for `help`
    and for editors that read no types."""
    signature = inspect.signature(method)
    parameters = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, kind in RequestOptions.__annotations__.items():
        annotation = f"{getattr(kind, '__forward_arg__', kind)} | None"
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


def sampling_params(sampling: Mapping[str, object]) -> common_pb2.SamplingParams:
    """The message for `sampling`; None counts as absent. Raises TypeError for an unknown name."""
    params = common_pb2.SamplingParams()
    known = params.DESCRIPTOR.fields_by_name
    for name, value in sampling.items():
        if name not in known:
            similar = difflib.get_close_matches(name, [*known, *_REQUEST_FIELDS, "timeout_s"], n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else f"; known: {', '.join(sorted(known))}"
            raise TypeError(f"no option is called {name!r}{hint}")
        if value is not None:
            _set(params, name, value)
    return params


def _set(params: common_pb2.SamplingParams, name: str, value: object) -> None:
    try:
        if name == "stop" and isinstance(value, str):
            value = [value]
        elif name == "allowed_token_ids":
            value = common_pb2.TokenIds(ids=value)  # type: ignore[arg-type]
        elif name == "choice":
            value = common_pb2.Texts(texts=value)  # type: ignore[arg-type]
        elif name == "json_schema" and not isinstance(value, str):
            value = json.dumps(value)
        elif name == "bad_word_ids":
            value = [common_pb2.TokenIds(ids=ids) for ids in value]  # type: ignore[attr-defined]
        params.MergeFrom(common_pb2.SamplingParams(**{name: value}))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def generate_request(prompt: Prompt, options: Mapping[str, object]) -> generation_pb2.GenerateRequest:
    """The message of a call; `options` are RequestOptions, of which timeout_s is not sent."""
    fields = {name: value for name, value in options.items() if name in _REQUEST_FIELDS}
    sampling = {name: value for name, value in options.items() if name not in _REQUEST_FIELDS and name != "timeout_s"}
    request = generation_pb2.GenerateRequest(sampling=sampling_params(sampling), **fields)  # type: ignore[arg-type]
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
