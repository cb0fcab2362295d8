"""Sampling parameters of a request, with vLLM's names and defaults, and their validation.

`SamplingParams` is a plain value that travels between processes. Its constructor checks nothing, so that a wrong value
is rejected by field name instead of with a decoder's error. `validate` is called once, at the edge; before it, where
there is a tokenizer, `with_bad_word_ids`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from engine.errors import ContextExceeded, InvalidRequest, shown
from engine.sampling.constraints import CONSTRAINTS, Constraint, check_constraint
from engine.sampling.json_schema import json_text
from engine.vllm_names import SAMPLING_ARGUMENTS, supported

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would only overflow."""
MIN_REPETITION_PENALTY = 1e-9
"""Logits are divided by it in float32, where much smaller numbers are 0 or make them infinite."""
MAX_CHOICES = 8
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_PROMPT_CANDIDATES = 2**17
"""(prompt_logprobs + 1) * prompt tokens: they are sent in one message, at about 20 bytes each."""
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORD_SEQUENCES = 256
MAX_BAD_WORD_LEN = 300
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_SEED = 2**64 - 1


class _WithVllmNames(msgspec.StructMeta):
    """The constructor of `SamplingParams`: arguments of vLLM's that it does not have are checked by name."""

    if not TYPE_CHECKING:  # it would hide the fields' types

        def __call__(cls, **arguments):  # noqa: N805 - of a metaclass
            if not arguments.keys() <= set(cls.__struct_fields__):
                arguments = supported(cls.__name__, arguments, cls.__struct_fields__, SAMPLING_ARGUMENTS)
            return super().__call__(**arguments)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=_WithVllmNames):
    """How one request samples its tokens and when it stops. Lists, and a single `stop` string, become tuples.

    Fields can be assigned, as users of vLLM do with the model's defaults; `LLM` computes with copies, and nothing in
    the engine assigns."""

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
    """None: the router or `LLM` draws one."""
    stop: tuple[str, ...] = ()
    """Strings that end the output when they appear in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, besides the model's EOS."""
    ignore_eos: bool = False
    """Continue past the model's EOS."""
    max_tokens: int | None = 16
    """Maximum number of output tokens; None fills the context."""
    min_tokens: int = 0
    """EOS, stop tokens and stop strings are ignored before this many output tokens."""
    include_stop_str_in_output: bool = False
    """Include the stop string (or the stop token's text) that ended the output."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text, but for the marks of reasoning and of Hermes' tool calls."""
    detokenize: bool = True
    """False: token ids only, without text and stop strings."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, once per occurrence."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in the prompt or output."""
    logprobs: int | None = None
    """Return the log-probability, from the raw logits, of each output token and of this many best tokens."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first. Such a request computes its whole prompt without cached KV."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens, before penalties and temperature."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that can be sampled; None: all."""
    bad_words: tuple[str, ...] = ()
    """Words that must not appear in the output; `with_bad_word_ids` converts them to `bad_word_ids`."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output: the last token of each is not sampled after the others."""
    json_object: bool = False
    """The output is a JSON object. At most one of this and the next five may be set."""
    json_schema: str | dict[str, Any] | None = None
    """The output is JSON that satisfies this schema; a dict becomes its text. See json_schema.py for its keywords."""
    regex: str | None = None
    """The whole output matches this regular expression."""
    choice: tuple[str, ...] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """The output is in the language of this grammar, in the EBNF of xgrammar (GBNF), from the rule `root`."""
    structural_tag: str | dict[str, Any] | None = None
    """Parts of the output are fixed and others have constraints of their own; a dict becomes its text. See
    structural_tag.py for its formats."""

    def __post_init__(self) -> None:
        given: object = self.stop
        if given is None or isinstance(given, str):
            msgspec.structs.force_setattr(self, "stop", () if given is None else (given,))
        for name in ("stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, ())
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "bad_word_ids", "choice"):
            if isinstance(value := getattr(self, name), list):
                msgspec.structs.force_setattr(self, name, tuple(value))
        words: Any = self.bad_word_ids
        if isinstance(words, tuple) and any(isinstance(ids, list) for ids in words):
            sequences = tuple(tuple(ids) if isinstance(ids, list) else ids for ids in words)
            msgspec.structs.force_setattr(self, "bad_word_ids", sequences)
        for name in ("json_schema", "structural_tag"):
            if isinstance(value := getattr(self, name), dict):
                with contextlib.suppress(TypeError, ValueError, RecursionError):  # what is no JSON, `validate` rejects
                    msgspec.structs.force_setattr(self, name, json_text(value))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_penalised(self) -> bool:
        """Whether tokens of the prompt or output change the logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def constraint_name(self) -> str | None:
        """The field of CONSTRAINTS that is set."""
        if self.json_object:
            return "json_object"
        return next((name for name in CONSTRAINTS[1:] if getattr(self, name) is not None), None)

    @property
    def is_constrained(self) -> bool:
        return self.constraint_name is not None

    @property
    def constraint(self) -> Constraint | None:
        """What the whole output must satisfy. Raises InvalidRequest."""
        return check_constraint({name: getattr(self, name) for name in CONSTRAINTS})

    @property
    def changes_logits(self) -> bool:
        """Whether the request modifies the model's logits in any way."""
        is_narrowed = self.allowed_token_ids is not None or bool(self.bad_word_ids) or self.is_constrained
        return is_narrowed or bool(self.logit_bias) or self.is_penalised


class _Range(NamedTuple):
    """The numbers a field may have, and the text that an error message gives for them."""

    field: str
    low: float
    high: float
    allowed: str
    open_low: bool = False
    optional: bool = False
    kind: type[int] | type[float] = int


_RANGES = (
    _Range("temperature", 0, 2, "0..2", kind=float),
    _Range("top_p", 0, 1, "(0,1]", open_low=True, kind=float),
    _Range("min_p", 0, 1, "[0,1]", kind=float),
    _Range("presence_penalty", -2, 2, "[-2,2]", kind=float),
    _Range("frequency_penalty", -2, 2, "[-2,2]", kind=float),
    _Range("repetition_penalty", MIN_REPETITION_PENALTY, 2, f"[{MIN_REPETITION_PENALTY:g},2]", kind=float),
    _Range("n", 1, MAX_CHOICES, f"1..{MAX_CHOICES}"),
    _Range("seed", 0, MAX_SEED, "0..2^64-1", optional=True),
    _Range("logprobs", 0, MAX_LOGPROBS, f"0..{MAX_LOGPROBS}", optional=True),
    _Range("prompt_logprobs", 0, MAX_LOGPROBS, f"0..{MAX_LOGPROBS}", optional=True),
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

    `vocab_size` is the number of rows of the model's output matrix, `max_model_len` the maximum of prompt + output
    tokens. Raises `InvalidRequest` with the field's name, its value and the allowed values.
    """
    for limits in _RANGES:
        _check_number(limits, getattr(params, limits.field))
    for name in _FLAGS:
        if not isinstance(value := getattr(params, name), bool):
            raise InvalidRequest(name, f"{shown(value)} is not a boolean", "true, false")
    if params.top_k not in (0, -1):
        _check_number(_Range("top_k", 1, vocab_size, f"0 or -1 (off), or 1..{vocab_size}"), params.top_k)
    if params.n > 1 and params.is_greedy:
        raise InvalidRequest(
            "n",
            f"n={params.n} with temperature={params.temperature} asks for the same text {params.n} times",
            "n=1, or temperature > 0",
        )
    _check_stop(params)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size, MAX_STOP_TOKEN_IDS)
    _check_tokens(params, vocab_size, eos_token_ids)
    if params.constraint is not None:
        _check_end(params, eos_token_ids)
    if params.prompt_logprobs is not None:
        _check_prompt_logprobs(params.prompt_logprobs, num_prompt_tokens)
    return _with_length(params, max_model_len=max_model_len, num_prompt_tokens=num_prompt_tokens)


def validate_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Reject a prompt that is empty, leaves no room for one output token, or holds an id outside the vocabulary."""
    if not token_ids:
        raise InvalidRequest("prompt", "prompt is empty", f"1..{max_model_len - 1} tokens")
    if len(token_ids) >= max_model_len:
        raise _too_long(len(token_ids), max_model_len)
    check_each_id("token_ids", token_ids, vocab_size)


def with_bad_word_ids(params: SamplingParams, encode: Callable[[str], Sequence[int]]) -> SamplingParams:
    """`params` with the token sequences of its `bad_words` added to `bad_word_ids`. Raises InvalidRequest.

    `encode` adds no special tokens. As in vLLM a word has up to two sequences: its tokens at the beginning of a text,
    and those after a space if they are as many and begin differently. Other spellings are other words.
    """
    if not params.bad_words:
        return params
    _check_bad_words(params.bad_words)
    ids = [*params.bad_word_ids]
    for word in params.bad_words:
        ids += _bad_word_sequences(word.lstrip(), encode)
    return msgspec.structs.replace(params, bad_word_ids=tuple(dict.fromkeys(ids)))


def _too_long(num_prompt_tokens: int, max_model_len: int) -> ContextExceeded:
    """Clients' libraries search for `prompt is too long`."""
    limit = max_model_len - 1
    return ContextExceeded(
        "prompt",
        f"prompt is too long: {num_prompt_tokens} tokens, limit {limit}: "
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
        _check_text("stop", i, string, allowed, MAX_STOP_STRING_BYTES)
    if stop and not params.detokenize:
        raise InvalidRequest("stop", "stop strings need text, and detokenize is false", "no stop, or detokenize=true")


def _check_tokens(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "the list is empty: no token can be sampled", "at least one id")
        _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size, vocab_size)
    if params.bad_words and not params.bad_word_ids:
        raise InvalidRequest("bad_words", "requires a tokenizer, which this model does not have", "bad_word_ids")
    _check_bad_word_ids(params.bad_word_ids, vocab_size)
    if params.allowed_token_ids is not None:
        left = set(params.allowed_token_ids) - {ids[0] for ids in params.bad_word_ids if len(ids) == 1}
        ending = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        if not left - (ending if params.min_tokens else set()):
            ends = f" or end the output, and min_tokens={params.min_tokens}" if params.min_tokens else ""
            raise InvalidRequest("allowed_token_ids", f"all of them are bad words{ends}: no token can be sampled")
    if params.logit_bias is not None:
        _check_logit_bias(params.logit_bias, vocab_size)


def _bad_word_sequences(word: str, encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    first, spaced = tuple(encode(word)), tuple(encode(f" {word}"))
    if not first:
        raise InvalidRequest("bad_words", f"{shown(word)} has no tokens", "words that the tokenizer can encode")
    is_another = len(spaced) == len(first) and spaced[0] != first[0]
    return [first, spaced] if is_another else [first]


def _check_bad_words(words: Any) -> None:
    allowed = f"at most {MAX_BAD_WORDS} words of 1..{MAX_BAD_WORD_BYTES} bytes"
    if not isinstance(words, tuple):
        raise InvalidRequest("bad_words", f"{shown(words)} is not a list of strings", allowed)
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest("bad_words", f"{len(words)} words", allowed)
    for index, word in enumerate(words):
        _check_text("bad_words", index, word, allowed, MAX_BAD_WORD_BYTES)
        if not word.strip():
            raise InvalidRequest("bad_words", f"bad_words[{index}] is blank", allowed)


def _check_end(params: SamplingParams, eos_token_ids: Collection[int]) -> None:
    """A constraint ends the output where its grammar does, by the model's own end."""
    if params.ignore_eos:
        raise InvalidRequest("ignore_eos", "contradicts a constraint, after whose end only EOS may follow", "false")
    if not eos_token_ids and not params.stop_token_ids:
        raise InvalidRequest("stop_token_ids", "this model has no EOS, with which a constraint ends", "at least one id")


def _check_prompt_logprobs(num: int, num_prompt_tokens: int) -> None:
    limit = MAX_PROMPT_CANDIDATES // (num + 1)
    if num_prompt_tokens > limit:
        problem = f"{num} candidates for each of {num_prompt_tokens} prompt tokens exceed the size of one response"
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
        _check_number(_Range("logit_bias", -100, 100, "[-100,100]", kind=float), bias)


def _with_length(params: SamplingParams, *, max_model_len: int, num_prompt_tokens: int) -> SamplingParams:
    limit = max_model_len - num_prompt_tokens
    if limit < 1:
        raise _too_long(num_prompt_tokens, max_model_len)
    if params.max_tokens is None:
        params = msgspec.structs.replace(params, max_tokens=limit)
    max_tokens: Any = params.max_tokens
    _check_number(_Range("max_tokens", 1, math.inf, f"max_tokens >= 1, here at most {limit}"), max_tokens)
    if max_tokens > limit:
        problem = f"prompt {num_prompt_tokens} + max_tokens {shown(max_tokens)} > context {max_model_len}"
        raise ContextExceeded("max_tokens", problem, f"1..{limit}")
    _check_number(_Range("min_tokens", 0, math.inf, f"0..{max_tokens}"), params.min_tokens)
    if params.min_tokens > max_tokens:
        problem = f"min_tokens {shown(params.min_tokens)} > max_tokens {max_tokens}"
        raise InvalidRequest("min_tokens", problem, f"0..{max_tokens}")
    return params


# Checks of one value, which may be of any type. All raise InvalidRequest.


def _check_number(limits: _Range, value: Any) -> None:
    if value is None and limits.optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | limits.kind):
        wanted = "a number" if limits.kind is float else "an integer"
        raise InvalidRequest(limits.field, f"{shown(value)} is not {wanted}", limits.allowed)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(limits.field, f"{value} must be finite", limits.allowed)
    if not limits.low <= value <= limits.high or (limits.open_low and value == limits.low):
        raise InvalidRequest(limits.field, f"{shown(value)} is out of range", limits.allowed)


def _check_text(field: str, index: int, string: Any, allowed: str, max_bytes: int) -> None:
    """Check string `index` of the list in `field`: not empty, not too long, valid Unicode."""
    name = f"{field}[{index}]"
    if not isinstance(string, str):
        raise InvalidRequest(field, f"{name}={shown(string)} is not a string", allowed)
    if not string:
        raise InvalidRequest(field, f"{name} is empty", allowed)
    # Characters first: a megabyte is not encoded only to find that it is too long.
    if len(string) > max_bytes:
        raise InvalidRequest(field, f"{name} has {len(string)} characters", allowed)
    try:
        num_bytes = len(string.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(
            field, f"{name}={shown(string)} is not valid Unicode", "text without lone surrogates"
        ) from None
    if num_bytes > max_bytes:
        raise InvalidRequest(field, f"{name} has {num_bytes} bytes", allowed)


def _check_ids(field: str, ids: Any, vocab_size: int, max_ids: int) -> None:
    if not isinstance(ids, tuple):
        raise InvalidRequest(field, f"{shown(ids)} is not a list of token ids", f"at most {max_ids} ids")
    if len(ids) > max_ids:
        raise InvalidRequest(field, f"{len(ids)} ids", f"at most {max_ids} ids")
    check_each_id(field, ids, vocab_size)


def check_each_id(field: str, ids: Sequence[Any], vocab_size: int) -> None:
    """Raises InvalidRequest for the first that is not an id of the vocabulary."""
    if not ids:
        return
    # Valid ids take three passes in C: a prompt may have 10^5 of them.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for i, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise InvalidRequest(field, f"{field}[{i}]={shown(token_id)} is not an integer", f"0..{vocab_size - 1}")
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                field, f"{field}[{i}]={shown(token_id)} out of range 0..{vocab_size - 1} of the model vocabulary"
            )
