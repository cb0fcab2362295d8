"""Bodies of vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from protos.tandem.v1 import generation_pb2
from router.api.openai.chat_messages import Message, Tool
from router.api.openai.requests import Int64, template_variables_on_wire
from router.api.openai.strict_model import StrictModel
from serving.errors import invalid_argument


class TokenizeBody(StrictModel):
    """The body of /tokenize: a text, or the messages of a chat."""

    renamed: ClassVar = {
        "text": "prompt", "chat.messages": "messages", "chat.tools": "tools",
        "template_variables": "chat_template_kwargs",
    }  # fmt: skip

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = Field([])
    """Of the chat."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Of the chat: the template's own switches."""
    add_special_tokens: bool = True
    """Of a text: what the tokenizer puts around it. A chat has what its template writes."""
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid_argument("prompt", "exactly one of prompt and messages is required")
        for name in ("tools", "chat_template_kwargs"):
            if getattr(self, name) and self.messages is None:
                raise invalid_argument(name, "requires messages")
        return self

    def request(self) -> generation_pb2.GenerateRequest:
        """The prompt alone."""
        if self.messages is None:
            return generation_pb2.GenerateRequest(text=self.prompt)
        chat = {
            "messages": [message.on_wire() for message in self.messages],
            "tools": [tool.function.on_wire() for tool in self.tools],
            "template_variables": template_variables_on_wire(self.chat_template_kwargs),
        }
        return generation_pb2.GenerateRequest(chat=chat)  # type: ignore[arg-type]


class DetokenizeBody(StrictModel):
    """The body of /detokenize."""

    renamed: ClassVar = {"prompt": "tokens", "token_ids": "tokens"}

    model: str = ""
    tokens: list[Int64]
