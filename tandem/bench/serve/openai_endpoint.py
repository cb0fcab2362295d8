"""Any server that speaks OpenAI's `/v1/completions` with streaming.

Such a server need not say how many tokens an event carries, so there are three ways of counting; the best that the
answer allows is used:

usage in each event    (`continuous_usage_stats`, vLLM and others): every token has its own time
usage at the end       the number of tokens is the server's, times are those of events
no usage               every event counts as one token

An event without usage counts if it has text or does not end the choice: a token that is half a character has no text.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import httpx
import msgspec

from serving.waits import end_tasks
from tandem.bench.serve.endpoint import Answer, OnTokens, PlannedRequest, RequestFailed, ServedModel, check_finished
from tandem.connectors import without_logins

MAX_EVENT_BYTES = 16 << 20


class EventTooLong(ValueError):
    """An event exceeds MAX_EVENT_BYTES."""


async def event_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The `data` of each complete server-sent event (HTML standard, section 9.2), its lines joined
    by newlines.

    Lines end with LF or CRLF. (No inference server sends the lone CR of the standard.) They are split as bytes: a
    token may contain characters at which Python's `splitlines` splits. Raises EventTooLong.
    """
    pending = b""
    lines: list[bytes] = []
    async for chunk in chunks:
        *complete, pending = (pending + chunk).split(b"\n")
        for line in complete:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                yield b"\n".join(lines)
                lines = []
        if len(pending) + sum(map(len, lines)) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event is longer than {MAX_EVENT_BYTES} bytes")


_CONNECT_TIMEOUT_S = 30.0
_REST_TIMEOUT_S = 1.0
_IDLE_S = 3.0
"""An idle connection is kept for so long: usual servers close it after 5 s, and a request that is sent then fails."""
_SERVED_TIMEOUT_S = 10.0
_REFUSALS = (429, 503)
_MISUNDERSTOOD = (400, 422)
_EACH = "continuous_usage_stats"
_USAGE_AT_END = {"include_usage": True}
_USAGE_IN_EACH = {"include_usage": True, _EACH: True}
_SHOWN_CHARS = 200
_ONE_BY_ONE, _BY_END, _BY_EVENTS = (
    "one by one, and the endpoint's usage agrees",
    "by the usage at the end; times are those of events, and ITL is between events if one carries several tokens",
    "by events, since the endpoint sends no usage: if one carries several tokens, too few are counted",
)
_NULL = msgspec.Raw(b"null")
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
"""Tokens of one request: a false number would take all memory, as each token has its time."""
_T = TypeVar("_T")


class _UsageOptionRejected(Exception):
    """The server rejects the option for usage in each event."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = _NULL


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: Any = None
    """Of a LoRA adapter the model's id, as in vLLM's list."""


class _Models(msgspec.Struct):
    data: list[_Model]


class OpenAIEndpoint:
    """Endpoint for `/v1/completions` below `url`, with `model`; empty: the first one that the server lists.

    Prompts go as token ids, or as text if `to_text` is given. `extra_body` is merged into every request; None removes
    a key. A connection carries one request at a time, and is kept for the next ones once the server has ended the
    message behind the answer. Proxies of the environment are not used. `tls` absent: the CAs that this machine trusts.
    Raises ValueError for an invalid URL.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        to_text: Callable[[Sequence[int]], str] | None = None,
        headers: Mapping[str, str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        url = url.rstrip("/").removesuffix("/v1")
        self._shown_url = without_logins(url)
        self.name = f"{self._shown_url} (OpenAI)"
        self.counting = _ONE_BY_ONE
        self._model = model
        self._to_text = to_text
        self._extra_body = dict(extra_body or {})
        self._stream_options = _USAGE_IN_EACH
        self._rests = set[asyncio.Task[None]]()
        self._client = httpx.AsyncClient(
            base_url=_checked(url),
            headers=dict(headers or {}),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S),
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            trust_env=False,
            verify=tls or True,
        )

    async def served_model(self) -> ServedModel:
        """A named model need not be listed by the server."""
        try:
            response = await self._client.get("/v1/models", timeout=_SERVED_TIMEOUT_S)
            response.raise_for_status()
            models = _decoded(response.content, _Models).data
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            if self._model and not isinstance(error, httpx.TransportError):
                return ServedModel(self._model)
            hint = "check the address, and that it serves /v1/models; if it has no such page, give --model"
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                hint = "--ca-file FILE: the CA that issued its certificate; the certificate must have the URL's host"
            raise RequestFailed("UNAVAILABLE", f"{self._shown_url}: {_shown(error)} ({hint})") from None
        if not self._model and not models:
            raise RequestFailed("UNAVAILABLE", f"{self._shown_url} lists no model; give --model NAME")
        found = next((one for one in models if one.id == self._model), None if self._model else models[0])
        self._model = found.id if found else self._model
        if found is None:
            return ServedModel(self._model)
        return ServedModel(self._model, found.max_model_len, base=found.parent if isinstance(found.parent, str) else "")

    async def generate(self, request: PlannedRequest, on_tokens: OnTokens) -> Answer:
        """A request is repeated if the server rejects the option for usage in each event."""
        try:
            try:
                stream = await self._streamed(request, on_tokens, self._stream_options)
            except _UsageOptionRejected:
                self._stream_options = _USAGE_AT_END
                stream = await self._streamed(request, on_tokens, _USAGE_AT_END)
        except httpx.ConnectError as error:
            raise RequestFailed("CONNECTION REFUSED", f"{self._shown_url}: {_shown(error)}") from None
        except httpx.HTTPError as error:
            raise RequestFailed("CONNECTION LOST", f"{self._shown_url}: {_shown(error)}") from None
        except (msgspec.MsgspecError, EventTooLong) as error:
            raise RequestFailed("BAD EVENT", _shown(error)) from None
        answer = stream.finished()
        self.counting = max(self.counting, stream.counting, key=(_ONE_BY_ONE, _BY_END, _BY_EVENTS).index)
        return answer

    async def close(self) -> None:
        await end_tasks(*self._rests)
        await self._client.aclose()

    async def _streamed(
        self, request: PlannedRequest, on_tokens: OnTokens, stream_options: Mapping[str, bool]
    ) -> _Stream:
        """The stream after its end. Raises _UsageOptionRejected if the server rejects that one of `stream_options`."""
        stream = _Stream(on_tokens)
        body = {
            "model": self._model,
            "prompt": self._to_text(request.prompt_token_ids) if self._to_text else request.prompt_token_ids,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": stream_options,
            **self._extra_body,
        }
        body = {key: value for key, value in body.items() if value is not None}
        async with contextlib.AsyncExitStack() as closing:
            response = await closing.enter_async_context(self._client.stream("POST", "/v1/completions", json=body))
            status = response.status_code
            if status != httpx.codes.OK:
                text = await response.aread()
                if _EACH in stream_options and status in _MISUNDERSTOOD and _EACH.encode() in text:
                    raise _UsageOptionRejected
                problem = _cut(text.decode(errors="replace")) or "no text"
                raise RequestFailed(f"HTTP {status}", problem, refused=status in _REFUSALS)
            chunks = response.aiter_bytes()
            async for data in event_data(chunks):
                if data == b"[DONE]":
                    rest = asyncio.create_task(_read_rest(chunks, closing.pop_all()))
                    self._rests.add(rest)
                    rest.add_done_callback(self._rests.discard)
                    break
                stream.add(data)
        return stream


async def _read_rest(chunks: AsyncIterator[bytes], closing: contextlib.AsyncExitStack) -> None:
    """Reads to the end of the message: before that its connection cannot be kept. The request has ended with its
    answer, so a server that does not end the message, or fails, costs the connection alone."""
    with contextlib.suppress(TimeoutError, httpx.HTTPError):
        async with closing, asyncio.timeout(_REST_TIMEOUT_S):
            async for _ in chunks:
                pass


class _Stream:
    """One answer; counts its tokens in the best way that the events so far allow."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._num_counted = 0
        self._usage: _Usage | None = None
        self._has_usage_in_each = False
        self._reason = ""

    @property
    def counting(self) -> str:
        if self._usage is None:
            return _BY_EVENTS
        return _ONE_BY_ONE if self._usage.completion_tokens == self._num_counted else _BY_END

    def add(self, data: bytes) -> None:
        """Raises RequestFailed for an event that reports an error, msgspec's errors for an invalid one."""
        event = _decoded(data, _Event)
        if event.error != _NULL:
            raise RequestFailed("ERROR IN STREAM", _cut(bytes(event.error).decode(errors="replace")))
        self._usage = event.usage or self._usage
        if event.choices:
            self._add_choice(event.choices[0], event.usage)
        if self._reason and self._usage is not None and not self._num_counted:
            self._count(self._usage.completion_tokens)  # they had no text

    def _add_choice(self, choice: _Choice, usage: _Usage | None) -> None:
        self._reason = choice.finish_reason or self._reason
        self._has_usage_in_each |= usage is not None and choice.finish_reason is None
        if usage is not None and (self._has_usage_in_each or not self._num_counted):  # or the whole answer in one event
            self._count(usage.completion_tokens - self._num_counted)
        elif choice.text or choice.finish_reason is None:
            self._count(1)

    def _count(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self._num_counted += num_tokens
            self._on_tokens(num_tokens)

    def finished(self) -> Answer:
        if not self._reason:
            text = f"the stream ended after {self._num_counted} tokens without a finish_reason"
            raise RequestFailed("CONNECTION LOST", text)
        check_finished(self._reason, self._num_counted)
        if self._usage is None:
            return Answer(self._reason)
        num_reported, details = self._usage.completion_tokens, self._usage.prompt_tokens_details
        return Answer(
            self._reason,
            None if num_reported == self._num_counted else num_reported,
            self._usage.prompt_tokens,
            None if details is None else details.cached_tokens,
        )


def _checked(url: str) -> httpx.URL:
    shown = without_logins(url)
    try:
        checked = httpx.URL(url)
    except httpx.InvalidURL as error:
        problem = f"{shown!r} is not the URL of a server: {without_logins(str(error))}"
        raise ValueError(f"{problem}; write one like http://127.0.0.1:8000") from None
    if checked.scheme not in ("http", "https") or not checked.host:
        raise ValueError(f"{shown!r} is not the URL of a server; write one like http://127.0.0.1:8000")
    return checked


def _decoded(data: bytes, kind: type[_T]) -> _T:
    """Raises msgspec.DecodeError for whatever is invalid in `data`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"not UTF-8: {error.reason}") from None
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None


def _shown(error: Exception) -> str:
    return _cut(without_logins(str(error))) or type(error).__name__


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
