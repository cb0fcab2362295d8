"""How a request wants its tokens chosen and when it wants to end: vLLM's names and defaults, every limit in one place.

`SamplingParams` is a plain value that travels between processes; building one checks nothing, so that a wrong value
can be answered with the field's name instead of a decoder's error. `validate` is the one gate, called at the edge
before anything is computed; what it returns has every default filled in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from engine.errors import InvalidRequest, shown
from engine.field_checks import Range, check_each_id, check_float, check_ids, check_int, check_text

GREEDY_BELOW = 1e-5
"""Temperatures below this choose the best token: the division would only overflow (vLLM's bound as well)."""
MAX_CHOICES = 8
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_PROMPT_CANDIDATES = 2**17
"""(prompt_logprobs + 1) * prompt tokens: they go in one message, at about 20 bytes each."""
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORD_SEQUENCES = 256
MAX_BAD_WORD_LEN = 300
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
    """The same for each prompt token but the first. Such a request uses no cached KV: all of it is computed."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens, before penalties and temperature."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens can be drawn; None: all."""
    bad_words: tuple[str, ...] = ()
    """Words that must not appear in the output; `bad_words.with_bad_word_ids` says which tokens that are."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output: the last token of one is not drawn after the others."""

    def __post_init__(self) -> None:
        given: object = self.stop
        if given is None or isinstance(given, str):
            msgspec.structs.force_setattr(self, "stop", () if given is None else (given,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "bad_word_ids"):
            if isinstance(value := getattr(self, name), list):
                msgspec.structs.force_setattr(self, name, tuple(value))
        words: Any = self.bad_word_ids
        if words and any(isinstance(ids, list) for ids in words):
            sequences = tuple(tuple(ids) if isinstance(ids, list) else ids for ids in words)
            msgspec.structs.force_setattr(self, "bad_word_ids", sequences)

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
        is_narrowed = self.allowed_token_ids is not None or bool(self.bad_word_ids)
        return is_narrowed or bool(self.logit_bias) or self.is_penalised


_FLOATS = (
    Range("temperature", 0, 2, "0..2"),
    Range("top_p", 0, 1, "(0,1]", open_low=True),
    Range("min_p", 0, 1, "[0,1]"),
    Range("presence_penalty", -2, 2, "[-2,2]"),
    Range("frequency_penalty", -2, 2, "[-2,2]"),
    Range("repetition_penalty", 0, 2, "(0,2]", open_low=True),
)
_INTS = (
    Range("n", 1, MAX_CHOICES, f"1..{MAX_CHOICES}"),
    Range("seed", 0, MAX_SEED, "0..2^64-1", optional=True),
    Range("logprobs", 0, MAX_LOGPROBS, f"0..{MAX_LOGPROBS}", optional=True),
    Range("prompt_logprobs", 0, MAX_LOGPROBS, f"0..{MAX_LOGPROBS}", optional=True),
)
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")


def validate(
    params: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    num_prompt_tokens: int,
    eos_token_ids: Collection[int] = (),
) -> SamplingParams:
    """Check every field; return `params` with `max_tokens` filled in.

    `vocab_size` is the model's (rows of its output matrix), `max_model_len` the longest prompt + output in tokens: the
    sum may equal it. Raises `InvalidRequest` with the field's name, the value and what is allowed.
    """
    for limits in _FLOATS:
        check_float(limits, getattr(params, limits.field))
    for limits in _INTS:
        check_int(limits, getattr(params, limits.field))
    for name in _FLAGS:
        if not isinstance(value := getattr(params, name), bool):
            raise InvalidRequest(name, f"{shown(value)} is not a boolean", "true, false")
    if params.top_k not in (0, -1):
        check_int(Range("top_k", 1, vocab_size, f"0 or -1 (off), or 1..{vocab_size}"), params.top_k)
    if params.n > 1 and params.is_greedy:
        raise InvalidRequest(
            "n",
            f"n={params.n} with temperature={params.temperature} asks for the same text {params.n} times",
            "n=1, or temperature > 0",
        )
    _check_stop(params)
    check_ids("stop_token_ids", params.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)
    _check_tokens(params, vocab_size, eos_token_ids)
    if params.prompt_logprobs is not None:
        _check_prompt_logprobs(params.prompt_logprobs, num_prompt_tokens)
    return _with_length(params, max_model_len=max_model_len, num_prompt_tokens=num_prompt_tokens)


def validate_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Refuse a prompt that is empty, leaves no room for one output token, or holds an id the model has no row for."""
    if not token_ids:
        raise InvalidRequest("prompt", "prompt is empty", f"1..{max_model_len - 1} tokens")
    if len(token_ids) >= max_model_len:
        raise _too_long(len(token_ids), max_model_len)
    check_each_id("token_ids", token_ids, vocab_size)


def _too_long(num_prompt_tokens: int, max_model_len: int) -> InvalidRequest:
    limit = max_model_len - 1
    return InvalidRequest(
        "prompt",
        f"prompt has {num_prompt_tokens} tokens, limit {limit}: "
        f"prompt {num_prompt_tokens} + max_tokens 1 > context {max_model_len}",
        f"1..{limit} tokens",
    )


def _check_stop(params: SamplingParams) -> None:
    stop: Any = params.stop
    allowed = f"at most {MAX_STOP_STRINGS} strings of 1..{MAX_STOP_STRING_BYTES} bytes"
    if not isinstance(stop, tuple):
        raise InvalidRequest("stop", f"{shown(stop)} is not a string or a list of strings", allowed)
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"{len(stop)} strings", allowed)
    for i, string in enumerate(stop):
        check_text("stop", i, string, allowed, MAX_STOP_STRING_BYTES)
    if stop and not params.detokenize:
        raise InvalidRequest("stop", "stop strings need text, and detokenize is false", "no stop, or detokenize=true")


def _check_tokens(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """What is said about single tokens of the vocabulary."""
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "the list is empty: no token can be sampled", "at least one id")
        check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size, vocab_size)
    if params.bad_words and not params.bad_word_ids:
        raise InvalidRequest("bad_words", "need a tokenizer, and here is none", "bad_word_ids")
    _check_bad_word_ids(params.bad_word_ids, vocab_size)
    if params.allowed_token_ids is not None:
        left = set(params.allowed_token_ids) - {ids[0] for ids in params.bad_word_ids if len(ids) == 1}
        ending = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        if not left - (ending if params.min_tokens else set()):
            ends = f" or end the output, and min_tokens={params.min_tokens}" if params.min_tokens else ""
            what = f"bad words{ends}"
            raise InvalidRequest("allowed_token_ids", f"all of them are {what}: no token can be sampled")
    if params.logit_bias is not None:
        _check_logit_bias(params.logit_bias, vocab_size)


def _check_prompt_logprobs(num: int, num_prompt_tokens: int) -> None:
    limit = MAX_PROMPT_CANDIDATES // (num + 1)
    if num_prompt_tokens > limit:
        problem = f"{num} of each of {num_prompt_tokens} prompt tokens are too many for one answer"
        raise InvalidRequest("prompt_logprobs", problem, f"with {num} at most {limit} prompt tokens")


def _check_bad_word_ids(sequences: Any, vocab_size: int) -> None:
    allowed = f"at most {MAX_BAD_WORD_SEQUENCES} lists of 1..{MAX_BAD_WORD_LEN} token ids"
    if not isinstance(sequences, tuple) or not all(isinstance(ids, tuple) for ids in sequences):
        raise InvalidRequest("bad_word_ids", f"{shown(sequences)} is not a list of lists", allowed)
    if len(sequences) > MAX_BAD_WORD_SEQUENCES:
        raise InvalidRequest("bad_word_ids", f"{len(sequences)} lists", allowed)
    for index, ids in enumerate(sequences):
        if not 0 < len(ids) <= MAX_BAD_WORD_LEN:
            raise InvalidRequest("bad_word_ids", f"bad_word_ids[{index}] has {len(ids)} ids", allowed)
        check_each_id("bad_word_ids", ids, vocab_size)


def _check_logit_bias(logit_bias: Any, vocab_size: int) -> None:
    if not isinstance(logit_bias, dict):
        raise InvalidRequest("logit_bias", f"{shown(logit_bias)} is not a map of token ids to numbers")
    if len(logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest("logit_bias", f"{len(logit_bias)} entries", f"at most {MAX_LOGIT_BIASES} entries")
    check_each_id("logit_bias", tuple(logit_bias), vocab_size)
    for bias in logit_bias.values():
        check_float(Range("logit_bias", -100, 100, "[-100,100]"), bias)


def _with_length(params: SamplingParams, *, max_model_len: int, num_prompt_tokens: int) -> SamplingParams:
    limit = max_model_len - num_prompt_tokens
    if limit < 1:
        raise _too_long(num_prompt_tokens, max_model_len)
    if params.max_tokens is None:
        params = msgspec.structs.replace(params, max_tokens=limit)
    max_tokens: Any = params.max_tokens
    check_int(Range("max_tokens", 1, math.inf, f"max_tokens >= 1, here at most {limit}"), max_tokens)
    if max_tokens > limit:
        problem = f"prompt {num_prompt_tokens} + max_tokens {shown(max_tokens)} > context {max_model_len}"
        raise InvalidRequest("max_tokens", problem, f"1..{limit}")
    check_int(Range("min_tokens", 0, math.inf, f"0..{max_tokens}"), params.min_tokens)
    if params.min_tokens > max_tokens:
        problem = f"min_tokens {shown(params.min_tokens)} > max_tokens {max_tokens}"
        raise InvalidRequest("min_tokens", problem, f"0..{max_tokens}")
    return params
