"""What both endpoints' bodies share: OpenAI's parameters, those that vLLM's users know, and how others are refused.

JSON is parsed by pydantic's own parser, strictly: no number in a string, no nesting without end, no lone surrogate. An
explicit null means "not given", as everywhere at OpenAI. What is in range is for the router's one gate to say
(router/validation.py); here only what the wire's types cannot hold is refused. A parameter that would change the answer
and is not served is refused by name, as is one that nobody knows: a misspelt one must not be passed over.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from engine.errors import shown
from protos.tandem.v1 import common_pb2
from router.http.errors import invalid_body
from serving.errors import invalid_argument

MAX_PRIORITY = 100

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]

_NOT_SERVED: dict[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Parameters that are known and not served, each with the values that ask for nothing and are passed over."""

_IGNORED = frozenset({"include_reasoning", "metadata", "safety_identifier", "service_tier", "user"})
"""Parameters that change nothing of an answer."""


_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _biases(value: object) -> object:
    """JSON has no integer keys; the ids come as strings."""
    if not isinstance(value, dict):
        return value
    if (wrong := next((key for key in value if not _TOKEN_ID.fullmatch(key)), None)) is not None:
        raise invalid_argument("logit_bias", f"{shown(wrong)} is not a token id", "ids as strings of digits")
    return {int(key): bias for key, bias in value.items()}


class StrictModel(BaseModel):
    """A JSON object with exactly these members."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(StrictModel):
    """`stream_options`."""

    include_usage: bool = False
    """One more event at the end, without choices, tells the usage of the whole request."""
    continuous_usage_stats: bool = False
    """vLLM's: each event before it tells the usage of its choice so far."""
    include_obfuscation: Literal[False] = False


class RequestBody(StrictModel):
    """One request. Lists and objects are bounded by the body's size; their contents by the router's gate."""

    default_max_tokens: ClassVar[int | None] = None

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Int64 | None = None
    n: Int64 = 1
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None
    stop: Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])] = []
    logit_bias: Annotated[dict[Int64, float], BeforeValidator(_biases, json_schema_input_type=dict[str, float])] = {}
    prompt_cache_key: str = ""
    """OpenAI's hint for caches: requests that share it prefer the instances that hold their KV."""

    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Int64] = []
    bad_words: list[str] = []
    allowed_token_ids: list[Int64] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str = ""
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """vLLM's sense: lower goes first. The router's is the other way round."""
    return_token_ids: bool = False

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """The body of a request; raises InvalidArgument that names the first wrong parameter."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise invalid_body(error) from None

    @model_validator(mode="before")
    @classmethod
    def _known_and_given(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        wanted = {}
        for name, value in given.items():
            if value is None or name in _IGNORED:
                continue
            if name in cls.model_fields:
                wanted[name] = value
            elif name not in _NOT_SERVED:
                raise _unknown(name, [*cls.model_fields, *_NOT_SERVED])
            elif value not in _NOT_SERVED[name]:
                allowed = " or ".join(["none at all", *map(shown, _NOT_SERVED[name])])
                raise invalid_argument(name, "is not served here", allowed)
        return wanted

    @model_validator(mode="after")
    def _streams_with_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid_argument("stream_options", "is for streams alone", "with stream=true")
        if self.continues_usage and not self.tells_usage:
            name = "stream_options.continuous_usage_stats"
            raise invalid_argument(name, "without include_usage tells nothing", "with include_usage=true")
        return self

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continues_usage(self) -> bool:
        """Whether each event of a stream tells it so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self) -> common_pb2.SamplingParams:
        """The wire's parameters, without log-probabilities."""
        params = common_pb2.SamplingParams(
            max_tokens=self.default_max_tokens if self.max_tokens is None else self.max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            bad_words=self.bad_words,
            logit_bias=self.logit_bias,
        )
        for name in _SCALARS:
            if (value := getattr(self, name)) is not None:
                setattr(params, name, value)
        if self.allowed_token_ids is not None:
            params.allowed_token_ids.ids.extend(self.allowed_token_ids)
            params.allowed_token_ids.SetInParent()
        return params


_SCALARS = (
    "n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip


def _unknown(name: str, known: list[str]) -> Exception:
    similar = difflib.get_close_matches(name[:64], known, n=1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    return invalid_argument(
        name if name.isidentifier() and len(name) <= 64 else "body", f"{shown(name)} is not known here{hint}"
    )
