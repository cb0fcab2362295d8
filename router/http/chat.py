"""`/v1/chat/completions`: messages, rendered with the model's own template (engine/chat_template.py)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from engine.errors import shown
from protos.tandem.v1 import common_pb2, generation_pb2
from router.http.answer import Delta
from router.http.body import Int64, RequestBody, StrictModel
from router.http.logprobs import Columns, TokenTexts, chat_columns
from serving.errors import invalid_argument

_ROLES = {"developer": "system"}
"""OpenAI's newer word for what templates call the system."""
_PASSED_OVER = frozenset({"name", "annotations", "refusal", "reasoning_content", "tool_call_id"})
"""Members of a message that templates of plain chats do not read."""


def _joined_parts(content: Any) -> Any:
    """The text of a content that comes in parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise invalid_argument(
                "messages", f"content[{index}] is of type {shown(kind)}", "text, or parts of type text"
            )
        texts.append(part["text"])
    return "\n".join(texts)


class Message(StrictModel):
    """One message of the chat."""

    role: str
    content: Annotated[str, BeforeValidator(_joined_parts, json_schema_input_type=str | list[dict[str, str]])]

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        wanted = {name: value for name, value in given.items() if value is not None and name not in _PASSED_OVER}
        for name in ("tool_calls", "function_call", "audio"):
            if wanted.pop(name, None):
                raise invalid_argument("messages", f"{name} is not served here", "role and content")
        return wanted


class ChatBody(RequestBody):
    """The body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Int64 | None = None
    """Goes before max_tokens, its older name."""
    logprobs: bool = False
    top_logprobs: Int64 | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """vLLM's: the template's own switches, such as enable_thinking."""

    renamed: ClassVar[dict[str, str]] = {
        "prompt": "messages",
        "chat.messages": "messages",
        "template_variables": "chat_template_kwargs",
        "session": "prompt_cache_key",
        "logprobs": "top_logprobs",
    }

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid_argument("top_logprobs", f"{self.top_logprobs} without logprobs", "with logprobs=true")
        return self

    def sampling(self) -> common_pb2.SamplingParams:
        params = super().sampling()
        if self.max_completion_tokens is not None:
            params.max_tokens = self.max_completion_tokens
        if self.logprobs:
            params.logprobs = self.top_logprobs or 0
        return params

    def requests(self, label: str) -> list[generation_pb2.GenerateRequest]:
        """The one request."""
        messages = [
            generation_pb2.ChatMessage(role=_ROLES.get(message.role, message.role), content=message.content)
            for message in self.messages
        ]
        variables = msgspec.json.encode(self.chat_template_kwargs).decode() if self.chat_template_kwargs else ""
        return [
            generation_pb2.GenerateRequest(
                request_id=label,
                model=self.model,
                chat=generation_pb2.Chat(messages=messages, template_variables=variables),
                sampling=self.sampling(),
                priority=-self.priority,
                cache_salt=self.cache_salt,
                session=self.prompt_cache_key,
            )
        ]


class ChatDialect:
    """How /v1/chat/completions words its answers."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, body: ChatBody, texts: TokenTexts) -> None:
        self._body = body
        self._texts = texts

    def columns(self, chunk: common_pb2.TokenChunk, num_chars: int) -> Columns | None:
        if not self._body.logprobs:
            return None
        return chat_columns(
            self._texts, [position.candidates for position in chunk.logprobs], self._body.top_logprobs or 0
        )

    def echoed(self, prompt: tuple[int, ...], chunk: common_pb2.TokenChunk) -> tuple[str, Columns | None]:
        return "", None

    def event(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        told = {"role": "assistant", "content": delta.text} if is_first else {"content": delta.text}
        return self._entry(delta, "delta", told)

    def choice(self, whole: Delta) -> dict[str, Any]:
        return self._entry(whole, "message", {"role": "assistant", "content": whole.text, "refusal": None})

    def _entry(self, delta: Delta, name: str, told: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            name: told,
            "logprobs": delta.logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.prompt_token_ids is not None:
                choice["prompt_token_ids"] = delta.prompt_token_ids
        return choice
