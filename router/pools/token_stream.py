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
from typing import Any, Protocol

import grpc
import grpc.aio

from protos.tandem.v1 import decode_pb2, decode_pb2_grpc
from router.pools.instance_info import Role
from router.pools.settings import PoolSettings

_log = logging.getLogger(__name__)

MAX_BYTES = 4 << 20
"""Some 70,000 tokens without log-probabilities."""


class ReceiveBuffer:
    """The answers of a decode instance that its call has not read yet. One reader; belongs to one event loop.

        append ──▶ buffered ──read──▶ read          closed ──all buffered answers are read──▶ `read` raises
          └── the buffer is full ──▶ False

    The first answer is buffered as it is. It is part of a message that answers many calls, all of which lives as long
    as any part does; therefore the answers behind it are kept as bytes of their own.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._first: decode_pb2.DecodeResponse | None = None
        self._others: deque[bytes] = deque()
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
        self._others.append(data)
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
        """The next answer. Raises what the buffer was closed with, after the last one."""
        while True:
            if (response := self._first) is not None:
                self._first = None
                return response
            if self._others:
                data = self._others.popleft()
                self._num_bytes -= len(data)
                return decode_pb2.DecodeResponse.FromString(data)
            if self._end is not None:
                raise self._end
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

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
