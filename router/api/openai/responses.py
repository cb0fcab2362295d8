"""Responses: token messages of one or several calls become OpenAI's choices, as events or as one body.

GenerateResponse ──▶ Choice p·n + c ──┬─ StreamedResponse ─▶ one event each
  (prompt p, choice c)                └─ WholeResponse ─▶ merged, and sent when all calls have ended

The bodies are msgspec structs and not pydantic models, since each token is an event: 0.5 µs against 5 µs to serialise.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from engine.text.chat_output import Brackets
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer
from protos.tandem.v1 import common_pb2, generation_pb2
from router.api.openai.exchange import Exchange
from router.api.openai.requests import ChatBody, CompletionBody, RequestBody
from router.dispatch.handler import RequestHandler
from router.request.choice_state import finish_reason
from serving.limits import start_in_thread

Candidates = Sequence[common_pb2.Logprob]  # of one position: the chosen token, then the best ones
Logprobs = dict[str, list[Any]]  # columns with one entry for each token

_LOWEST = -9999.0  # vLLM's value for minus infinity, which JSON does not have


class Usage(msgspec.Struct):
    """Tokens of all choices of all prompts, or of one choice so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class FunctionCall(msgspec.Struct):
    name: str | UnsetType
    arguments: str


class ToolCall(msgspec.Struct):
    """A call, or in an event the next part of one."""

    index: int | UnsetType
    id: str | UnsetType
    type: str | UnsetType
    function: FunctionCall

    @classmethod
    def of(cls, delta: generation_pb2.ToolCallDelta) -> ToolCall:
        is_first, function = bool(delta.name), FunctionCall(delta.name or UNSET, delta.arguments)
        return cls(delta.index, delta.id if is_first else UNSET, "function" if is_first else UNSET, function)

    @staticmethod
    def merged(parts: Iterable[ToolCall]) -> list[ToolCall]:
        """Whole calls; the first part of each has its id and name."""
        calls: list[ToolCall] = []
        for part in parts:
            if part.id is UNSET:
                calls[-1].function.arguments += part.function.arguments
            else:
                calls.append(ToolCall(UNSET, part.id, part.type, part.function))
        return calls


class ChatMessage(msgspec.Struct):
    role: str | UnsetType
    content: str | UnsetType | None
    refusal: UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET

    @classmethod
    def whole(cls, text: str, calls: list[ToolCall], reasoning: str) -> ChatMessage:
        return cls("assistant", None if calls and not text else text, None, calls or UNSET, reasoning or UNSET)

    @classmethod
    def part(cls, text: str, calls: list[ToolCall], reasoning: str, *, is_first: bool) -> ChatMessage:
        content = UNSET if (calls or reasoning) and not text and not is_first else text
        role = "assistant" if is_first else UNSET
        return cls(role, content, tool_calls=calls or UNSET, reasoning_content=reasoning or UNSET)


class Choice(msgspec.Struct):
    """An entry of `choices`, or what one message adds to it."""

    index: int
    text: str | UnsetType
    tool_calls: list[ToolCall] | UnsetType = UNSET  # a chat's, until its message or delta has them
    reasoning: str | UnsetType = UNSET  # likewise
    message: ChatMessage | UnsetType = UNSET  # in place of the text of a whole chat
    delta: ChatMessage | UnsetType = UNSET  # in place of the text of a chat's event
    logprobs: Logprobs | None = None
    finish_reason: str | None = None  # on the choice's last message
    stop_reason: str | int | None = None  # the stop string or token id that ended the choice, as in vLLM's API
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET  # on the choice's first message

    @classmethod
    def merged(cls, parts: Sequence[Choice]) -> Choice:
        last = parts[-1]
        return cls(
            index=last.index,
            text="".join(part.text for part in parts if part.text),
            tool_calls=ToolCall.merged(call for part in parts for call in part.tool_calls or ()),
            reasoning="".join(part.reasoning for part in parts if part.reasoning),
            logprobs=joined(part.logprobs for part in parts),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            token_ids=UNSET if last.token_ids is UNSET else [i for part in parts for i in part.token_ids or ()],
            prompt_token_ids=parts[0].prompt_token_ids,
        )


class ResponseBody(msgspec.Struct):
    """A whole body, or an event."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    object: str = ""
    choices: list[Choice] = []
    usage: Usage | UnsetType | None = UNSET


B = TypeVar("B", bound=RequestBody, covariant=True)


class Format(ABC, Generic[B]):
    """How one endpoint writes its choices."""

    id_prefix: str
    whole_object: str
    event_object: str

    def __init__(self, body: B, texts: TokenTexts) -> None:
        self.body = body
        self._texts = texts

    def offset(self, num_chars: int, call: RequestHandler) -> TextOffset:
        """That of a choice's first token, behind `num_chars` characters."""
        return TextOffset(num_chars)

    @abstractmethod
    def logprobs(self, chunk: common_pb2.TokenChunk, offset: TextOffset) -> Logprobs | None:
        """The chunk's log-probabilities, if requested; `offset` is that of its first token, and is moved behind it."""

    def echo(
        self, prompt_index: int, prompt: tuple[int, ...], chunk: common_pb2.TokenChunk
    ) -> tuple[str, Logprobs | None]:
        """What precedes a choice's own text: the prompt, if requested. `chunk` is the first choice's first one."""
        return "", None

    @property
    def num_prompts(self) -> int:
        return 1

    def whole(self, choice: Choice) -> Choice:
        choice.tool_calls = choice.reasoning = UNSET
        return choice

    def openings(self, prompt: tuple[int, ...]) -> Sequence[Choice]:
        """What a stream has before the events of its choices."""
        return ()

    def event(self, choice: Choice, *, is_first: bool) -> Choice:
        return choice


class CompletionFormat(Format[CompletionBody]):
    id_prefix = "cmpl"
    whole_object = event_object = "text_completion"

    @property
    def num_prompts(self) -> int:
        return len(self.body.prompt)

    def offset(self, num_chars: int, call: RequestHandler) -> TextOffset:
        if self.body.logprobs is None:
            return TextOffset(num_chars)
        params = call.request.params
        options = {"skip_special_tokens": params.skip_special_tokens, "is_constrained": params.is_constrained}
        return TextOffset(num_chars, self._texts.tokenizer, prompt=call.prompt, **options)

    def logprobs(self, chunk: common_pb2.TokenChunk, offset: TextOffset) -> Logprobs | None:
        if self.body.logprobs is None:
            return None
        return completion_logprobs(self._texts, candidates_of(chunk.logprobs), offset, self.body.logprobs)

    def echo(
        self, prompt_index: int, prompt: tuple[int, ...], chunk: common_pb2.TokenChunk
    ) -> tuple[str, Logprobs | None]:
        if not self.body.echo:
            return "", None
        given, top = self.body.prompt[prompt_index], self.body.logprobs
        text = given if isinstance(given, str) else self._texts.of_all(prompt)
        if top is None:
            return text, None
        return text, prompt_logprobs(self._texts, prompt, candidates_of(chunk.prompt_logprobs), top, len(text))


class ChatFormat(Format[ChatBody]):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def logprobs(self, chunk: common_pb2.TokenChunk, offset: TextOffset) -> Logprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self._texts, candidates_of(chunk.logprobs), self.body.top_logprobs or 0)

    def whole(self, choice: Choice) -> Choice:
        choice.message = ChatMessage.whole(choice.text or "", choice.tool_calls or [], choice.reasoning or "")
        choice.text = choice.tool_calls = choice.reasoning = UNSET
        return choice

    def openings(self, prompt: tuple[int, ...]) -> Sequence[Choice]:
        """Of several choices each, in their order: OpenAI's Python client takes no later one before an earlier one."""
        indices = range(self.body.n if self.body.n > 1 else 0)
        ids: dict[str, Any] = {"token_ids": [], "prompt_token_ids": prompt} if self.body.return_token_ids else {}
        return [Choice(index, UNSET, delta=ChatMessage("assistant", ""), **ids) for index in indices]

    def event(self, choice: Choice, *, is_first: bool) -> Choice:
        if self.body.n > 1:  # its opening has the role and the prompt
            is_first, choice.prompt_token_ids = False, UNSET
        added = (choice.text or "", choice.tool_calls or [], choice.reasoning or "")
        choice.delta = ChatMessage.part(*added, is_first=is_first)
        choice.text = choice.tool_calls = choice.reasoning = UNSET
        return choice


@dataclass(eq=False)
class ResponseBuilder(ABC):
    """The response to one HTTP request. Its calls may run concurrently, each in its own task."""

    exchange: Exchange
    form: Format[RequestBody]
    response: ResponseBody
    """Without choices yet."""

    def __post_init__(self) -> None:
        self._num_prompt = self._num_completion = self._num_cached = 0
        self._offsets: dict[int, TextOffset] = {}
        self._calls: dict[int, Brackets] = {}
        """Of each choice's last call: `depth` is above 0 until its arguments are complete."""
        self._echoes: dict[int, tuple[str, Logprobs | None]] = {}

    @abstractmethod
    async def add(self, prompt_index: int, call: RequestHandler, message: generation_pb2.GenerateResponse) -> None:
        """Adds the next message of `call`, which answers the prompt with that index."""

    @abstractmethod
    async def finish(self, headers: Mapping[str, str]) -> None:
        """Ends the response once every call has ended."""

    async def _choice(
        self, prompt_index: int, call: RequestHandler, message: generation_pb2.GenerateResponse
    ) -> tuple[Choice, bool]:
        """What the message adds, and whether it is its choice's first."""
        chunk, prompt = message.tokens, call.prompt
        if message.HasField("prompt_tokens"):
            self._num_prompt += message.prompt_tokens
            made = partial(self.form.echo, prompt_index, prompt, chunk)  # log-probabilities take up to a second
            self._echoes[prompt_index] = await start_in_thread(made, "echo") if chunk.prompt_logprobs else made()
        self._num_completion += len(chunk.token_ids)
        index = prompt_index * self.form.body.n + chunk.choice
        is_first = index not in self._offsets
        echo, echo_logprobs = self._echoes[prompt_index] if is_first else ("", None)
        if is_first:
            self._offsets[index] = self.form.offset(len(echo), call)
        choice = Choice(index, echo + (message.delta.content if message.HasField("delta") else chunk.text))
        choice.reasoning = message.delta.reasoning or UNSET
        if message.delta.tool_calls:
            self._follow_calls(index, message.delta.tool_calls)
            choice.tool_calls = list(map(ToolCall.of, message.delta.tool_calls))
        choice.logprobs = joined((echo_logprobs, self.form.logprobs(chunk, self._offsets[index])))
        if self.form.body.return_token_ids:
            choice.token_ids = list(chunk.token_ids)
            choice.prompt_token_ids = prompt if is_first else UNSET
        if chunk.HasField("finish"):
            choice.finish_reason = finish_reason(chunk.finish)
            choice.stop_reason = _stop_reason(chunk.finish)
            is_cut = choice.stop_reason is not None and index in self._calls and self._calls[index].depth > 0
            if choice.finish_reason == "stop" and index in self._calls and not is_cut:
                choice.finish_reason = "tool_calls"
            self._num_cached += chunk.finish.usage.cached_tokens if chunk.choice == 0 else 0
        return choice, is_first

    def _follow_calls(self, index: int, parts: Iterable[generation_pb2.ToolCallDelta]) -> None:
        for part in parts:
            if part.name:
                self._calls[index] = Brackets()
            self._calls[index].find_end(part.arguments, 0, "")

    def _usage(self) -> Usage:
        total = self._num_prompt + self._num_completion
        return Usage(self._num_prompt, self._num_completion, total, {"cached_tokens": self._num_cached})


class WholeResponse(ResponseBuilder):
    """Sent when it is complete."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parts: defaultdict[int, list[Choice]] = defaultdict(list)

    async def add(self, prompt_index: int, call: RequestHandler, message: generation_pb2.GenerateResponse) -> None:
        choice, _ = await self._choice(prompt_index, call, message)
        self._parts[choice.index].append(choice)

    async def finish(self, headers: Mapping[str, str]) -> None:
        self.response.object = self.form.whole_object
        self.response.choices = [self.form.whole(Choice.merged(parts)) for _, parts in sorted(self._parts.items())]
        self.response.usage = self._usage()
        await self.exchange.send_json(self.response, headers)


class StreamedResponse(ResponseBuilder):
    """Sends each message at once as an event; the headers precede the first one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.response.object = self.form.event_object
        if self.form.body.stream_options.include_usage:
            self.response.usage = None
        self._writing = asyncio.Lock()
        self._has_begun = False

    async def add(self, prompt_index: int, call: RequestHandler, message: generation_pb2.GenerateResponse) -> None:
        choice, is_first = await self._choice(prompt_index, call, message)
        has_role = is_first and not self.form.openings(call.prompt)
        is_held_back = message.HasField("delta") and not (has_role or self._is_news(choice))
        num_so_far = message.tokens.token_index + len(message.tokens.token_ids)
        event = b"" if is_held_back else self._event(self.form.event(choice, is_first=is_first), call, num_so_far)
        async with self._writing:
            if not self._has_begun:
                self._has_begun = True
                await self.exchange.begin_events(dict(call.trace.trailers()) if self.form.num_prompts == 1 else {})
                for opening in self.form.openings(call.prompt):
                    await self.exchange.send_event(self._event(opening, call, 0))
            if not is_held_back:
                await self.exchange.send_event(event)

    def _event(self, choice: Choice, call: RequestHandler, num_so_far: int) -> bytes:
        """`num_so_far`: the choice's tokens up to this event."""
        self.response.choices = [choice]
        if self.form.body.stream_options.continuous_usage_stats:
            num_prompt = len(call.prompt)
            self.response.usage = Usage(num_prompt, num_so_far, num_prompt + num_so_far)
        return msgspec.json.encode(self.response)

    def _is_news(self, choice: Choice) -> bool:
        """Whether its event says anything: text that may become a tool call is held back."""
        has_text = bool(choice.text or choice.reasoning or choice.tool_calls or choice.finish_reason)
        has_more = choice.logprobs is not None or choice.token_ids is not UNSET
        return has_text or has_more or self.form.body.stream_options.continuous_usage_stats

    async def finish(self, headers: Mapping[str, str]) -> None:
        if self.form.body.stream_options.include_usage:
            self.response.choices = []
            self.response.usage = self._usage()
            await self.exchange.send_event(msgspec.json.encode(self.response))
        await self.exchange.end_events()


def candidates_of(positions: Iterable[common_pb2.TokenLogprobs]) -> list[Candidates]:
    return [position.candidates for position in positions]


def _stop_reason(finish: common_pb2.Finish) -> str | int | None:
    if finish.HasField("stop_string"):
        return finish.stop_string
    return finish.stop_token_id if finish.HasField("stop_token_id") else None


# Log-probabilities in the two endpoints' formats


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Texts of tokens. Without a tokenizer a single token is shown as its id."""

    tokenizer: Tokenizer | None

    def data(self, token_id: int) -> bytes | None:
        """The token's bytes, maybe a part of a character; None where the vocabulary has none."""
        if self.tokenizer is None or self.tokenizer.token_bytes is None:
            return None
        return self.tokenizer.token_bytes.of(token_id)

    def of(self, token_id: int) -> str:
        """The token's own text; U+FFFD for a part of a character."""
        if (data := self.data(token_id)) is not None:
            return data.decode(errors="replace")
        return f"token_id:{token_id}" if self.tokenizer is None else self.of_all([token_id])

    def data_or_text(self, token_id: int) -> bytes:
        """The token's bytes, or those of its text where the vocabulary has none."""
        return self.of(token_id).encode() if (data := self.data(token_id)) is None else data

    def of_all(self, token_ids: Sequence[int]) -> str:
        """The text of a whole prompt with its special tokens; "" without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=False)


class TextOffset:
    """Where the text of a choice's next token begins, in characters. Known by the tokens alone, since a part of their
    text may not have been delivered yet; a character of several tokens counts where it is complete."""

    def __init__(self, num_chars: int = 0, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        """`options` are those of the choice's detokenizer. Without a tokenizer tokens have no text."""
        self.num_chars = num_chars
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, **options)

    def add(self, token_id: int | None) -> None:
        """None: no token follows, so that the beginning of a character counts."""
        if self._detokenizer is not None:
            text = self._detokenizer.finish() if token_id is None else self._detokenizer.push((token_id,))
            self.num_chars += len(text)


def completion_logprobs(texts: TokenTexts, positions: Sequence[Candidates], offset: TextOffset, top: int) -> Logprobs:
    """The four columns of /v1/completions; `offset` is that of the first token, and is moved behind the last."""
    columns: Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for candidates in positions:
        chosen = candidates[0]
        best = [chosen, *(item for item in candidates[1:] if item.rank <= top)]
        values: dict[str, float] = {}
        for item in best:  # parts of characters have the same text: the chosen one's value counts, or the best one's
            values.setdefault(texts.of(item.token_id), _finite(item.logprob))
        columns["tokens"].append(texts.of(chosen.token_id))
        columns["token_logprobs"].append(_finite(chosen.logprob))
        columns["top_logprobs"].append(values)
        columns["text_offset"].append(offset.num_chars)
        offset.add(chosen.token_id)
    return columns


def prompt_logprobs(
    texts: TokenTexts, prompt: Sequence[int], positions: Sequence[Candidates], top: int, num_chars: int
) -> Logprobs:
    """The same of a prompt that is echoed as `num_chars` characters. Its first token has no prediction. Its last one
    ends where the text does: what a tokenizer adds to the client's text, such as a BOS, is before it."""
    first, offset = prompt[0], TextOffset(0, texts.tokenizer, skip_special_tokens=False)
    columns: Logprobs = {
        "tokens": [texts.of(first)],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    offset.add(first)
    for name, column in completion_logprobs(texts, positions[1:], offset, top).items():
        columns[name] += column
    offset.add(None)
    num_added = offset.num_chars - num_chars
    columns["text_offset"] = [max(at - num_added, 0) for at in columns["text_offset"]]
    return columns


def chat_logprobs(texts: TokenTexts, positions: Sequence[Candidates], top: int) -> Logprobs:
    """The one column of /v1/chat/completions, an object for each token."""
    content = []
    for candidates in positions:
        best = sorted((item for item in candidates if item.rank <= top), key=lambda item: item.rank)
        top_logprobs = [_chat_entry(texts, item) for item in best]
        content.append({**_chat_entry(texts, candidates[0]), "top_logprobs": top_logprobs})
    return {"content": content}


def joined(parts: Iterable[Logprobs | None]) -> Logprobs | None:
    """The columns concatenated; None where there are none."""
    present = [part for part in parts if part is not None]
    if len(present) <= 1:
        return present[0] if present else None
    return {name: [entry for part in present for entry in part[name]] for name in present[0]}


def _chat_entry(texts: TokenTexts, item: common_pb2.Logprob) -> dict[str, Any]:
    data = texts.data(item.token_id)
    return {
        "token": texts.of(item.token_id),
        "logprob": _finite(item.logprob),
        "bytes": None if data is None else list(data),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
