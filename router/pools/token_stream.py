"""The stream in which a decode instance answers all calls of this router, and the delivery of each answer to its call.

    opening ──first message──▶ open: calls can join ──breaks──▶ ended, with all calls that joined ──▶ opening …
       │                          └──retired: the instance has ended──▶ open to joined calls ──the last leaves──▶ ended
       └── the instance does not implement it: each call answers by itself

A message holds the answers of one engine step. Each answer goes to its call's receiver at once and never waits for it:
a receiver buffers what it cannot process yet, within its own bounds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
from collections import deque
from typing import Any, NamedTuple, Protocol

import grpc
import grpc.aio

from protos.tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from router.pools.instance_info import Role
from router.pools.settings import PoolSettings

_log = logging.getLogger(__name__)

MAX_BYTES = 4 << 20
"""Some 70,000 tokens without log-probabilities."""
MAX_JOINED_BYTES = 1 << 15


class _Joined:
    """Chunks of one choice, one behind the other, as one answer."""

    def __init__(self, first: common_pb2.TokenChunk) -> None:
        # A copy, since `first` may be part of a larger message.
        self._response = decode_pb2.DecodeResponse(tokens=first)
        self._texts = [first.text]
        self._num_chars = len(first.text)
        self._num_added_bytes = 0

    def add(self, data: bytes) -> bool:
        """Adds a serialised answer; False for one that does not continue the chunk, or makes it too long."""
        if self._num_added_bytes + len(data) > MAX_JOINED_BYTES:
            return False
        chunk, whole = decode_pb2.DecodeResponse.FromString(data).tokens, self._response.tokens
        if not self._continues(chunk):
            return False
        self._num_added_bytes += len(data)
        whole.token_ids.extend(chunk.token_ids)
        whole.logprobs.extend(chunk.logprobs)
        self._texts.append(chunk.text)
        self._num_chars += len(chunk.text)
        if chunk.HasField("finish"):
            whole.finish.CopyFrom(chunk.finish)
        return True

    def response(self) -> decode_pb2.DecodeResponse:
        self._response.tokens.text = "".join(self._texts)
        return self._response

    def _continues(self, chunk: common_pb2.TokenChunk) -> bool:
        """Whether it does without a doubt. The call rejects what is wrong in a chunk, therefore that stays alone."""
        whole = self._response.tokens
        return (
            not whole.HasField("finish")
            and chunk.stream_epoch == whole.stream_epoch
            and chunk.choice == whole.choice
            and chunk.token_index == whole.token_index + len(whole.token_ids)
            and chunk.text_offset == whole.text_offset + self._num_chars
            and len(chunk.logprobs) == (len(chunk.token_ids) if whole.logprobs else 0)
            and not chunk.prompt_logprobs
        )


class _Buffered(NamedTuple):
    data: bytes
    while_away: bool
    """It has arrived while the reader did something else: its client is behind."""


class ReceiveBuffer:
    """The answers of a decode instance that its call has not read yet. One reader; belongs to one event loop.

        append ──▶ buffered ──read──▶ read          closed ──all buffered answers are read──▶ `read` raises
          │           └── arrived while the reader wrote to its client ──▶ joined to the one before, read with it
          └── the buffer is full ──▶ False

    The first answer is buffered as it is. It is part of a message that answers many calls, all of which lives as long
    as any part does; therefore the answers behind it are kept as bytes of their own.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._first: decode_pb2.DecodeResponse | None = None
        self._others: deque[_Buffered] = deque()
        self._num_bytes = 0
        self._end: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def append(self, response: decode_pb2.DecodeResponse) -> bool:
        """Buffers the next answer; False if there is no room for it."""
        if self._first is None and not self._others:
            self._first = response
            self._wake()
            return True
        data = response.SerializeToString()
        if self._num_bytes + len(data) > self._max_bytes:
            return False
        self._others.append(_Buffered(data, while_away=self._reader is None))
        self._num_bytes += len(data)
        return True

    def close(self, end: Exception) -> None:
        """No answer follows; `read` raises `end` after the buffered ones. The first call counts."""
        if self._end is None:
            self._end = end
            self._wake()

    def clear(self) -> None:
        self._first = None
        self._others.clear()
        self._num_bytes = 0

    async def read(self) -> decode_pb2.DecodeResponse:
        """The next answer, or several tokens as one. Raises what the buffer was closed with, after the last one."""
        while True:
            if (response := self._first) is not None:
                self._first = None
                return self._with_next(response) if self._others else response
            if self._others:
                return self._with_next(decode_pb2.DecodeResponse.FromString(self._take()))
            if self._end is not None:
                raise self._end
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def _take(self) -> bytes:
        data = self._others.popleft().data
        self._num_bytes -= len(data)
        return data

    def _with_next(self, response: decode_pb2.DecodeResponse) -> decode_pb2.DecodeResponse:
        """`response` with those behind it that continue its tokens and have waited for the reader."""
        if not (self._has_late() and response.HasField("tokens")):
            return response
        joined, num_before = _Joined(response.tokens), len(self._others)
        while self._has_late() and joined.add(self._others[0].data):
            self._take()
        return response if len(self._others) == num_before else joined.response()

    def _has_late(self) -> bool:
        """Whether the next one behind has arrived while the reader was away."""
        return bool(self._others) and self._others[0].while_away

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Receiver(Protocol):
    """A call that is answered in the stream."""

    def receive(self, response: decode_pb2.DecodeResponse) -> None:
        """Takes the next answer. It keeps the larger message alive that it is part of."""

    def cut_off(self, error: grpc.aio.AioRpcError) -> None:
        """The stream has ended with `error`; no answer follows."""


class TokenStream:
    """One open stream: calls join it, and the task that reads it delivers to them."""

    def __init__(self, stream_id: str, call: Any) -> None:
        self.stream_id = stream_id
        self._call = call
        self._receivers: dict[int, Receiver] = {}
        self._numbers = itertools.count(1)
        self._is_retired = False

    def join(self, receiver: Receiver) -> decode_pb2.TokenStream:
        """Delivers the answers with the call number in the result to `receiver` from now on."""
        number = next(self._numbers)
        self._receivers[number] = receiver
        return decode_pb2.TokenStream(stream_id=self.stream_id, call_number=number)

    def leave(self, joined: decode_pb2.TokenStream) -> None:
        """Drops later answers to this call."""
        self._receivers.pop(joined.call_number, None)
        self._end_if_unused()

    def retire(self) -> None:
        """No call joins any more; the stream ends with its last receiver."""
        self._is_retired = True
        self._end_if_unused()

    def deliver(self, message: decode_pb2.StreamTokensResponse) -> None:
        receivers = self._receivers
        for numbered in message.responses:
            receiver = receivers.get(numbered.call_number)
            if receiver is not None:
                receiver.receive(numbered.response)

    def break_off(self, error: grpc.aio.AioRpcError) -> None:
        """The stream has ended, and with it every call that joined."""
        for receiver in list(self._receivers.values()):
            receiver.cut_off(error)

    def _end_if_unused(self) -> None:
        if self._is_retired and not self._receivers:
            self._call.cancel()


class TokenStreams:
    """Keeps the stream from one process open. Owned by the upstream instance that watches that process."""

    def __init__(self, role: Role, channel: grpc.aio.Channel, settings: PoolSettings) -> None:
        """Only decode instances have such a stream."""
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._settings = settings
        self._is_retired = role != "decode"
        self.current: TokenStream | None = None
        """The stream that calls can join; None when none is open."""
        self._task = asyncio.create_task(self._keep_open(), name="token stream")

    def retire(self) -> None:
        """The instance is no longer watched. Answers that have arrived are still delivered."""
        self._is_retired = True
        if self.current is None:
            self._task.cancel()
        else:
            self.current.retire()
            self.current = None

    async def _keep_open(self) -> None:
        delay_s = self._settings.min_backoff_s
        while not self._is_retired:
            error = await self._read()
            if error is None or error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return
            _log.info("the token stream has ended: %s: %s", error.code().name, error.details())
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, self._settings.max_backoff_s)

    async def _read(self) -> grpc.aio.AioRpcError | None:
        """Reads one stream from its opening to its end; returns its error, None if it was retired."""
        stream_id = secrets.token_hex(16)
        call: Any = self._stub.StreamTokens(decode_pb2.StreamTokensRequest(stream_id=stream_id))
        stream = TokenStream(stream_id, call)
        nothing = grpc.aio.Metadata()
        # For calls that joined, the end of a stream is an error in any case.
        error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the token stream has ended")
        try:
            async for message in call:
                if not self._is_retired:
                    self.current = stream
                stream.deliver(message)
        except grpc.aio.AioRpcError as broken:
            error = broken
        except asyncio.CancelledError:
            if not self._is_retired:
                raise
            return None
        finally:
            self.current = None
            stream.break_off(error)
        return error
