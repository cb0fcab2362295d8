"""`/v1/completions`: a text to go on with, or its token ids, or several of either."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator

from engine.errors import shown
from protos.tandem.v1 import common_pb2, generation_pb2
from router.http.answer import Delta
from router.http.body import Int64, RequestBody
from router.http.logprobs import Columns, TokenTexts, completion_columns, prompt_columns
from serving.errors import invalid_argument

MAX_PROMPTS = 32
_ALLOWED = f"text, a list of token ids, or a list of 1..{MAX_PROMPTS} of either"
_BOUND = 2**63

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """The prompts one by one, whatever form they came in."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        return [_prompt("prompt", value)]
    if not isinstance(value, list):
        raise invalid_argument("prompt", f"{shown(value)} is no prompt", _ALLOWED)
    if not 0 < len(value) <= MAX_PROMPTS:
        raise invalid_argument("prompt", f"{len(value)} prompts", _ALLOWED)
    return [_prompt(f"prompt[{index}]", prompt) for index, prompt in enumerate(value)]


def _prompt(name: str, value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_argument(name, f"{shown(value)} is no prompt", _ALLOWED)
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not -_BOUND <= token_id < _BOUND:
            raise invalid_argument(name, f"{name}[{index}]={shown(token_id)} is not a token id", _ALLOWED)
    return value


class CompletionBody(RequestBody):
    """The body of /v1/completions."""

    default_max_tokens: ClassVar[int | None] = 16

    prompt: Annotated[
        list[Prompt], PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[Int64] | list[list[Int64]])
    ]
    logprobs: Int64 | None = None
    echo: bool = False
    best_of: Int64 | None = None

    renamed: ClassVar[dict[str, str]] = {
        "token_ids": "prompt",
        "session": "prompt_cache_key",
        "prompt_logprobs": "logprobs",
    }

    def sampling(self) -> common_pb2.SamplingParams:
        params = super().sampling()
        if self.best_of is not None:
            params.best_of = self.best_of
        if self.logprobs is not None:
            params.logprobs = self.logprobs
            if self.echo:
                params.prompt_logprobs = self.logprobs
        return params

    def requests(self, label: str) -> list[generation_pb2.GenerateRequest]:
        """One request for each prompt."""
        requests = []
        for prompt in self.prompt:
            request = generation_pb2.GenerateRequest(
                request_id=label,
                model=self.model,
                sampling=self.sampling(),
                priority=-self.priority,
                cache_salt=self.cache_salt,
                session=self.prompt_cache_key,
            )
            if isinstance(prompt, str):
                request.text = prompt
            else:
                request.token_ids.ids.extend(prompt)
                request.token_ids.SetInParent()
            requests.append(request)
        return requests


class CompletionDialect:
    """How /v1/completions words its answers."""

    whole_object = "text_completion"
    event_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, body: CompletionBody, texts: TokenTexts) -> None:
        self._body = body
        self._texts = texts

    def columns(self, chunk: common_pb2.TokenChunk, num_chars: int) -> Columns | None:
        if self._body.logprobs is None:
            return None
        positions = [position.candidates for position in chunk.logprobs]
        return completion_columns(self._texts, positions, num_chars, self._body.logprobs)

    def echoed(self, prompt: tuple[int, ...], chunk: common_pb2.TokenChunk) -> tuple[str, Columns | None]:
        if not self._body.echo:
            return "", None
        text = self._texts.of_all(prompt)
        if self._body.logprobs is None:
            return text, None
        positions = [position.candidates for position in chunk.prompt_logprobs]
        return text, prompt_columns(self._texts, prompt, positions, self._body.logprobs)

    def event(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": delta.logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = delta.prompt_token_ids
        return choice

    def choice(self, whole: Delta) -> dict[str, Any]:
        return self.event(whole, is_first=True)
