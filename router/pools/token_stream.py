"""The stream in which an instance answers all Decode calls of this router, and the delivery of each answer to its call.

    opening ──first message──▶ open: calls can join ──breaks──▶ ended, with all calls that joined ──▶ opening …
       │                          └──retired: the instance has ended──▶ open to joined calls ──the last leaves──▶ ended
       └── the instance does not implement it: each call answers by itself

A message holds the answers of one engine step. Each answer goes to its call's receiver at once and never waits for it:
a receiver buffers what it cannot process yet, within its own bounds.

When most calls still write their last answer to the client as the next one comes, this process cannot write as many
messages as there are steps. Then answers are gathered, for as long as it takes the calls to keep up: each call writes
fewer and larger messages, which cost a fraction (docs/decisions/0020-gathered-answers.md).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import time
from collections import deque
from typing import Any, NamedTuple, Protocol

import grpc
import grpc.aio

from protos.tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from router.pools.settings import PoolSettings

_log = logging.getLogger(__name__)

MAX_BYTES = 4 << 20
"""Some 70,000 tokens without log-probabilities."""
MAX_JOINED_BYTES = 1 << 15
_MIN_CALLS = 8
"""With fewer calls nothing is gathered: each joins what arrived during its last write, and there are few messages."""


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
    is_late: bool
    """It has arrived while the reader did something else, or was not to be woken: its client is behind."""


class ReceiveBuffer:
    """The answers of an instance that its call has not read yet. One reader; belongs to one event loop.

        append ──▶ buffered ──read──▶ read          closed ──all buffered answers are read──▶ `read` raises
          │           └── arrived late, while the reader wrote to its client ──▶ joined to the one before, read with it
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
        self._is_held = False
        """Nothing is read until `wake`."""

    @property
    def is_awaited(self) -> bool:
        """Whether the reader waits for the next answer, or is about to read it."""
        return self._reader is not None

    def append(self, response: decode_pb2.DecodeResponse, *, hold: bool = False) -> bool:
        """Buffers the next answer; False if there is no room for it. `hold`: nothing is read until `wake`."""
        self._is_held = self._is_held or hold
        if self._first is None and not self._others:
            self._first = response
            if not self._is_held:
                self._wake()
            return True
        data = response.SerializeToString()
        if self._num_bytes + len(data) > self._max_bytes:
            return False
        self._others.append(_Buffered(data, is_late=self._reader is None or self._is_held))
        self._num_bytes += len(data)
        return True

    def wake(self) -> bool:
        """What is held can be read. Returns whether the reader waited for it."""
        is_awaited, self._is_held = self.is_awaited, False
        if self._first is not None or self._others:
            self._wake()
        return is_awaited

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
            if not self._is_held or self._end is not None:
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
        """`response` with those behind it that continue its tokens and came late."""
        if not (self._has_late() and response.HasField("tokens")):
            return response
        joined, num_before = _Joined(response.tokens), len(self._others)
        while self._has_late() and joined.add(self._others[0].data):
            self._take()
        return response if len(self._others) == num_before else joined.response()

    def _has_late(self) -> bool:
        """Whether the next one behind came late."""
        return bool(self._others) and self._others[0].is_late

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Receiver(Protocol):
    """A call that is answered in the stream."""

    def receive(self, response: decode_pb2.DecodeResponse, *, hold: bool = False) -> bool:
        """Takes the next answer, which keeps the larger message alive that it is in. `hold`: processes it at the next
        `wake`. Returns whether the call waited for it; False: it is still busy with the one before."""

    def wake(self) -> bool:
        """Processes what is held. Returns whether the call waited for it."""

    def cut_off(self, error: grpc.aio.AioRpcError) -> None:
        """The stream has ended with `error`; no answer follows."""


class GatherTime:
    """How long the answers of a stream are gathered before its calls get them, by how many of these are still busy.

    0 ──more than half──▶ 2 ms ──more than half──▶ twice as long, up to 32 ms
    ▲────below 1 ms────── a fifth shorter ◀──otherwise
    """

    _MIN_S, _FIRST_S, _MAX_S = 0.001, 0.002, 0.032
    _NUM_CALLS = 16
    """So many calls at once replace the average of all before them."""

    def __init__(self) -> None:
        self.length_s = 0.0
        self._busy_share = 0.0

    def observe(self, num_busy: int, num_calls: int) -> None:
        """So many calls got answers now; `num_busy` of them are still busy with the answer before."""
        if num_calls:
            self._busy_share += min(1.0, num_calls / self._NUM_CALLS) * (num_busy / num_calls - self._busy_share)
        if self._busy_share > 0.5:
            self.length_s = min(max(2 * self.length_s, self._FIRST_S), self._MAX_S)
        else:
            shorter_s = 0.8 * self.length_s
            self.length_s = shorter_s if shorter_s >= self._MIN_S else 0.0

    def reset(self) -> None:
        self.length_s = self._busy_share = 0.0


class TokenStream:
    """One open stream: calls join it, and the task that reads it delivers to them."""

    def __init__(self, stream_id: str, call: Any) -> None:
        self.stream_id = stream_id
        self._call = call
        self._receivers: dict[int, Receiver] = {}
        self._numbers = itertools.count(1)
        self._is_retired = False
        self._gather_time = GatherTime()
        self._held: set[Receiver] = set()
        """The calls that have got answers since the last wake-up."""
        self._wake_timer: asyncio.TimerHandle | None = None

    def join(self, receiver: Receiver) -> decode_pb2.TokenStream:
        """Delivers the answers with the call number in the result to `receiver` from now on."""
        number = next(self._numbers)
        self._receivers[number] = receiver
        return decode_pb2.TokenStream(stream_id=self.stream_id, call_number=number)

    def leave(self, joined: decode_pb2.TokenStream) -> None:
        """Drops later answers to this call."""
        self._receivers.pop(joined.call_number, None)
        if len(self._receivers) < _MIN_CALLS:
            self._gather_time.reset()
        self._end_if_unused()

    def retire(self) -> None:
        """No call joins any more; the stream ends with its last receiver."""
        self._is_retired = True
        self._end_if_unused()

    def deliver(self, message: decode_pb2.StreamTokensResponse) -> None:
        receivers, is_gathering = self._receivers, self._gather_time.length_s > 0
        num_calls = num_busy = 0
        for numbered in message.responses:
            receiver = receivers.get(numbered.call_number)
            if receiver is None:
                continue
            # What comes before the second token, which a client waits for, is not held.
            hold = is_gathering and numbered.response.tokens.token_index > 0
            num_calls += 1
            num_busy += not receiver.receive(numbered.response, hold=hold)
            if hold:
                self._held.add(receiver)
        if self._held and self._wake_timer is None:
            self._wake_timer = asyncio.get_running_loop().call_later(self._gather_time.length_s, self._wake_held)
        elif not is_gathering:
            self._observe(num_busy, num_calls)

    def _wake_held(self) -> None:
        held, self._held, self._wake_timer = self._held, set(), None
        num_busy = sum(not receiver.wake() for receiver in held)
        self._observe(num_busy, len(held))

    def _observe(self, num_busy: int, num_calls: int) -> None:
        if len(self._receivers) >= _MIN_CALLS:
            self._gather_time.observe(num_busy, num_calls)

    def break_off(self, error: grpc.aio.AioRpcError) -> None:
        """The stream has ended, and with it every call that joined."""
        for receiver in list(self._receivers.values()):
            receiver.cut_off(error)

    def _end_if_unused(self) -> None:
        if self._is_retired and not self._receivers:
            self._call.cancel()


class TokenStreams:
    """Keeps the stream from one process open. Owned by the upstream instance that watches that process."""

    def __init__(self, channel: grpc.aio.Channel, settings: PoolSettings) -> None:
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._settings = settings
        self._is_retired = False
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
            began_s = time.monotonic()
            error = await self._read()
            if time.monotonic() - began_s > self._settings.max_backoff_s:
                delay_s = self._settings.min_backoff_s
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
