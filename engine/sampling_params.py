"""How a request wants its tokens chosen and when it wants to end: vLLM's names and defaults, every limit in one place.

`SamplingParams` is a plain value that travels between processes; building one checks nothing, so that a wrong value
can be answered with the field's name instead of a decoder's error. `validate` is the one gate, called at the edge
before anything is computed; what it returns has every default filled in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from engine.errors import InvalidRequest, NotServed, shown

GREEDY_BELOW = 1e-5
"""Temperatures below this choose the best token: the division would only overflow (vLLM's bound as well)."""
MAX_CHOICES = 8
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_SEED = 2**64 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request's wishes. Lists (and a single string for `stop`) are accepted and kept as tuples."""

    n: int = 1
    """Independent choices for one prompt."""
    temperature: float = 1.0
    """0 (anything below 1e-5) takes the best token; otherwise logits are divided by it."""
    top_p: float = 1.0
    """Keep the smallest set of best tokens that holds at least this probability."""
    top_k: int = 0
    """Keep this many best tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Keep tokens at least this probable, relative to the best one."""
    seed: int | None = None
    """Of this request's randomness; None: the router or `LLM` draws one."""
    stop: tuple[str, ...] = ()
    """Strings that end the output when they appear in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, besides the model's EOS."""
    ignore_eos: bool = False
    """Go on past the model's EOS."""
    max_tokens: int | None = 16
    """Output tokens at the most; None fills the context."""
    min_tokens: int = 0
    """No stop of any kind before this many output tokens."""
    include_stop_str_in_output: bool = False
    """Show the stop string (or the stop token's text) that ended the output."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """False: token ids only, no text, and so no stop strings."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the output has."""
    frequency_penalty: float = 0.0
    """The same, times how often the output has them."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens that prompt or output have."""
    logprobs: int | None = None
    """Log-probabilities of each output token and of this many best ones, of the raw logits; None: none."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens, before penalties and temperature."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens can be drawn; None: all."""
    bad_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given: object = self.stop
        if given is None or isinstance(given, str):
            msgspec.structs.force_setattr(self, "stop", () if given is None else (given,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            if isinstance(value := getattr(self, name), list):
                msgspec.structs.force_setattr(self, name, tuple(value))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_penalised(self) -> bool:
        """What the request has seen changes its logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        """Logits are not drawn from as the model made them."""
        return self.is_penalised or bool(self.logit_bias) or self.allowed_token_ids is not None


class _Range(NamedTuple):
    field: str
    low: float
    high: float
    allowed: str
    open_low: bool = False
    optional: bool = False


_FLOATS = (
    _Range("temperature", 0, 2, "0..2"),
    _Range("top_p", 0, 1, "(0,1]", open_low=True),
    _Range("min_p", 0, 1, "[0,1]"),
    _Range("presence_penalty", -2, 2, "[-2,2]"),
    _Range("frequency_penalty", -2, 2, "[-2,2]"),
    _Range("repetition_penalty", 0, 2, "(0,2]", open_low=True),
)
_INTS = (
    _Range("n", 1, MAX_CHOICES, f"1..{MAX_CHOICES}"),
    _Range("seed", 0, MAX_SEED, "0..2^64-1", optional=True),
    _Range("logprobs", 0, MAX_LOGPROBS, f"0..{MAX_LOGPROBS}", optional=True),
    _Range("prompt_logprobs", 0, MAX_LOGPROBS, f"0..{MAX_LOGPROBS}", optional=True),
)
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
_NOT_BUILT = {"prompt_logprobs": None, "bad_words": ()}
"""Fields of vLLM's that are checked but not served yet, with the value that asks for nothing."""


def validate(params: SamplingParams, *, vocab_size: int, max_model_len: int, num_prompt_tokens: int) -> SamplingParams:
    """Check every field; return `params` with `max_tokens` filled in.

    `vocab_size` is the model's (rows of its output matrix), `max_model_len` the longest prompt + output in tokens: the
    sum may equal it. Raises `InvalidRequest` with the field's name, the value and what is allowed.
    """
    for limits in _FLOATS:
        _check_float(limits, getattr(params, limits.field))
    for limits in _INTS:
        _check_int(limits, getattr(params, limits.field))
    for name in _FLAGS:
        if not isinstance(value := getattr(params, name), bool):
            raise InvalidRequest(name, f"{shown(value)} is not a boolean", "true, false")
    if params.top_k not in (0, -1):
        _check_int(_Range("top_k", 1, vocab_size, f"0 or -1 (off), or 1..{vocab_size}"), params.top_k)
    if params.n > 1 and params.is_greedy:
        raise InvalidRequest(
            "n",
            f"n={params.n} with temperature={params.temperature} asks for the same text {params.n} times",
            "n=1, or temperature > 0",
        )
    _check_stop(params)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)
    _check_tokens(params, vocab_size)
    for name, neutral in _NOT_BUILT.items():
        if (value := getattr(params, name)) != neutral:
            raise NotServed(name, shown(value), shown(neutral))
    return _with_length(params, max_model_len=max_model_len, num_prompt_tokens=num_prompt_tokens)


def validate_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Refuse a prompt that is empty, leaves no room for one output token, or holds an id the model has no row for."""
    if not token_ids:
        raise InvalidRequest("prompt", "prompt is empty", f"1..{max_model_len - 1} tokens")
    if len(token_ids) >= max_model_len:
        raise _too_long(len(token_ids), max_model_len)
    _check_each_id("token_ids", token_ids, vocab_size)


def _too_long(num_prompt_tokens: int, max_model_len: int) -> InvalidRequest:
    limit = max_model_len - 1
    return InvalidRequest(
        "prompt",
        f"prompt has {num_prompt_tokens} tokens, limit {limit}: "
        f"prompt {num_prompt_tokens} + max_tokens 1 > context {max_model_len}",
        f"1..{limit} tokens",
    )


def _check_float(limits: _Range, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(limits.field, f"{shown(value)} is not a number", limits.allowed)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(limits.field, f"{value} must be finite", limits.allowed)
    if not limits.low <= value <= limits.high or (limits.open_low and value == limits.low):
        raise InvalidRequest(limits.field, f"{shown(value)} is out of range", limits.allowed)


def _check_int(limits: _Range, value: Any) -> None:
    if value is None and limits.optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(limits.field, f"{shown(value)} is not an integer", limits.allowed)
    if not limits.low <= value <= limits.high:
        raise InvalidRequest(limits.field, f"{shown(value)} is out of range", limits.allowed)


def _check_stop(params: SamplingParams) -> None:
    stop: Any = params.stop
    allowed = f"at most {MAX_STOP_STRINGS} strings of 1..{MAX_STOP_STRING_BYTES} bytes"
    if not isinstance(stop, tuple):
        raise InvalidRequest("stop", f"{shown(stop)} is not a string or a list of strings", allowed)
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"{len(stop)} strings", allowed)
    for i, string in enumerate(stop):
        _check_stop_string(f"stop[{i}]", string, allowed)
    if stop and not params.detokenize:
        raise InvalidRequest("stop", "stop strings need text, and detokenize is false", "no stop, or detokenize=true")


def _check_stop_string(name: str, string: Any, allowed: str) -> None:
    if not isinstance(string, str):
        raise InvalidRequest("stop", f"{name}={shown(string)} is not a string", allowed)
    if not string:
        raise InvalidRequest("stop", f"{name} is empty", allowed)
    # Characters first: encoding a megabyte to learn that it is too long would be the caller's to pay.
    if len(string) > MAX_STOP_STRING_BYTES:
        raise InvalidRequest("stop", f"{name} has {len(string)} characters", allowed)
    try:
        num_bytes = len(string.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(
            "stop", f"{name}={shown(string)} is not valid Unicode", "text without lone surrogates"
        ) from None
    if num_bytes > MAX_STOP_STRING_BYTES:
        raise InvalidRequest("stop", f"{name} has {num_bytes} bytes", allowed)


def _check_ids(field: str, ids: Any, vocab_size: int, max_ids: int) -> None:
    if not isinstance(ids, tuple):
        raise InvalidRequest(field, f"{shown(ids)} is not a list of token ids", f"at most {max_ids} ids")
    if len(ids) > max_ids:
        raise InvalidRequest(field, f"{len(ids)} ids", f"at most {max_ids} ids")
    _check_each_id(field, ids, vocab_size)


def _check_each_id(field: str, ids: Sequence[Any], vocab_size: int) -> None:
    if not ids:
        return
    # The good case in three passes that run in C: a prompt may have 10^5 ids.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for i, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise InvalidRequest(field, f"{field}[{i}]={shown(token_id)} is not an integer", f"0..{vocab_size - 1}")
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                field, f"{field}[{i}]={shown(token_id)} out of range 0..{vocab_size - 1} of the model vocabulary"
            )


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """What is said about single tokens of the vocabulary."""
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "the list is empty: no token can be sampled", "at least one id")
        _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size, vocab_size)
    if params.logit_bias is not None:
        _check_logit_bias(params.logit_bias, vocab_size)


def _check_logit_bias(logit_bias: Any, vocab_size: int) -> None:
    if not isinstance(logit_bias, dict):
        raise InvalidRequest("logit_bias", f"{shown(logit_bias)} is not a map of token ids to numbers")
    if len(logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest("logit_bias", f"{len(logit_bias)} entries", f"at most {MAX_LOGIT_BIASES} entries")
    _check_each_id("logit_bias", tuple(logit_bias), vocab_size)
    for bias in logit_bias.values():
        _check_float(_Range("logit_bias", -100, 100, "[-100,100]"), bias)


def _with_length(params: SamplingParams, *, max_model_len: int, num_prompt_tokens: int) -> SamplingParams:
    limit = max_model_len - num_prompt_tokens
    if limit < 1:
        raise _too_long(num_prompt_tokens, max_model_len)
    if params.max_tokens is None:
        params = msgspec.structs.replace(params, max_tokens=limit)
    max_tokens: Any = params.max_tokens
    _check_int(_Range("max_tokens", 1, math.inf, f"max_tokens >= 1, here at most {limit}"), max_tokens)
    if max_tokens > limit:
        problem = f"prompt {num_prompt_tokens} + max_tokens {shown(max_tokens)} > context {max_model_len}"
        raise InvalidRequest("max_tokens", problem, f"1..{limit}")
    _check_int(_Range("min_tokens", 0, math.inf, f"0..{max_tokens}"), params.min_tokens)
    if params.min_tokens > max_tokens:
        problem = f"min_tokens {shown(params.min_tokens)} > max_tokens {max_tokens}"
        raise InvalidRequest("min_tokens", problem, f"0..{max_tokens}")
    return params
