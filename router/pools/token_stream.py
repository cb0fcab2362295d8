"""The stream in which a decode instance answers all calls of this router, and where each answer goes from here.

    opening ──first message──▶ open: can be named ──breaks──▶ ended, with all that runs on it ──▶ opening …
       │                          └──retired: the instance has ended──▶ open to those on it ──the last leaves──▶ ended
       └── the instance is of an older kind: its calls answer by themselves

An engine's step is one message here. Each answer goes to its call's receiver at once, and nobody is waited for: what a
receiver cannot deal with yet it keeps, within its own bounds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
from typing import Any, Protocol

import grpc
import grpc.aio

from protos.tandem.v1 import decode_pb2, decode_pb2_grpc
from router.config import PoolSettings
from router.pools.instances import Role

_log = logging.getLogger(__name__)


class Receiver(Protocol):
    """A call whose answers come in the stream."""

    def receive(self, response: decode_pb2.DecodeResponse) -> None:
        """The next answer. It is part of a larger message, all of which lives as long as it does."""

    def cut_off(self, error: grpc.aio.AioRpcError) -> None:
        """The stream has ended, and why; nothing more comes."""


class TokenStream:
    """One open stream. Joined by legs, fed by the task that reads it."""

    def __init__(self, stream_id: str, call: Any) -> None:
        self.stream_id = stream_id
        self._call = call
        self._receivers: dict[int, Receiver] = {}
        self._numbers = itertools.count(1)
        self._is_retired = False

    def join(self, receiver: Receiver) -> decode_pb2.TokenStream:
        """From now on `receiver` gets what is answered under the number in the result."""
        number = next(self._numbers)
        self._receivers[number] = receiver
        return decode_pb2.TokenStream(stream_id=self.stream_id, call_number=number)

    def leave(self, joined: decode_pb2.TokenStream) -> None:
        """What still comes for it is dropped."""
        self._receivers.pop(joined.call_number, None)
        self._end_if_unused()

    def retire(self) -> None:
        """Nobody joins any more: ends with its last receiver."""
        self._is_retired = True
        self._end_if_unused()

    def deliver(self, message: decode_pb2.StreamTokensResponse) -> None:
        """Hands every answer to its receiver."""
        receivers = self._receivers
        for numbered in message.responses:
            receiver = receivers.get(numbered.call_number)
            if receiver is not None:
                receiver.receive(numbered.response)

    def break_off(self, error: grpc.aio.AioRpcError) -> None:
        """It has ended: so has all that runs on it."""
        for receiver in list(self._receivers.values()):
            receiver.cut_off(error)

    def _end_if_unused(self) -> None:
        if self._is_retired and not self._receivers:
            self._call.cancel()


class TokenStreams:
    """The stream from one process of an instance, kept open. Owned by the pool member that follows that process."""

    def __init__(self, role: Role, channel: grpc.aio.Channel, settings: PoolSettings) -> None:
        """An instance of another role than decode has none."""
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._settings = settings
        self._is_retired = role != "decode"
        self._current: TokenStream | None = None
        self._task = asyncio.create_task(self._keep_open(), name="token stream")

    @property
    def current(self) -> TokenStream | None:
        """The stream to name; None when none is open."""
        return self._current

    def retire(self) -> None:
        """The instance is not followed any more. What has arrived is still read by those whom it is for."""
        self._is_retired = True
        if self._current is None:
            self._task.cancel()
        else:
            self._current.retire()
            self._current = None

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
        """One stream, from its opening to its end; returns what ended it, None if that was its retirement."""
        stream_id = secrets.token_hex(16)
        call: Any = self._stub.StreamTokens(decode_pb2.StreamTokensRequest(stream_id=stream_id))
        stream = TokenStream(stream_id, call)
        error = _ended()
        try:
            async for message in call:
                if not self._is_retired:
                    self._current = stream
                stream.deliver(message)
        except grpc.aio.AioRpcError as broken:
            error = broken
        except asyncio.CancelledError:
            if not self._is_retired:
                raise
            return None
        finally:
            self._current = None
            stream.break_off(error)
        return error


def _ended() -> grpc.aio.AioRpcError:
    """A stream has no good end: what one is to its legs."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the token stream has ended")
