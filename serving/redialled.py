"""A TLS channel whose connections follow the files: calls go on where they are, new ones go by the new certificate.

    connected ──the files change──▶ connected, a successor connects ──it is ready, or the old one is not──▶ succeeded
                                                                    the old one ──its last call ends──▶ closed

gRPC's own channel credentials are fixed for the life of a channel (docs/security.md tells what was tried), so a channel
for each state of the files is made here. Until the successor stands the old connection serves: no call pays for a
handshake, and files that the peer does not accept break nothing that works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from serving.tls import Pair, TlsFiles

Dial = Callable[[Pair], grpc.aio.Channel]


class _Connection:
    """A channel made by one state of the files, and how many calls are open on it."""

    def __init__(self, pair: Pair, channel: grpc.aio.Channel) -> None:
        self._loop = asyncio.get_running_loop()
        self.pair = pair
        self.channel = channel
        self.num_calls = 0
        self.is_retired = False
        self._closing: asyncio.Task[None] | None = None

    def begin(self, call: Any) -> None:
        self.num_calls += 1
        call.add_done_callback(self._ended)

    def retire(self) -> None:
        self.is_retired = True
        self._close_if_idle()

    def _ended(self, call: Any) -> None:
        """A call that is forgotten ends when it is collected: on any thread, maybe after the loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.num_calls -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self.is_retired and self.num_calls == 0 and self._closing is None:
            self._closing = self._loop.create_task(self.channel.close())


class RedialledChannel(grpc.aio.Channel):
    """Used like any channel, by stubs too. Belongs to the event loop that it was made on."""

    def __init__(self, files: TlsFiles, dial: Dial) -> None:
        self._files = files
        self._dial = dial
        pair = files.current()
        self._current = _Connection(pair, dial(pair))
        self._successor: _Connection | None = None
        self._old: set[_Connection] = set()
        self._promoting: asyncio.Task[None] | None = None
        self._is_closed = False

    def connection(self) -> _Connection:
        """The one that a call which begins now goes by."""
        pair = self._files.current()
        newest = self._successor or self._current
        if pair is not newest.pair and not self._is_closed:
            self._prepare(pair)
        if self._successor is not None and not _is_ready(self._current):
            self._succeed(self._successor)
        return self._current

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.connection().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.connection().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.connection().channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Ends every call, those on older connections too."""
        self._is_closed = True
        if self._promoting is not None:
            self._promoting.cancel()
        connections = [self._current, *self._old, *([self._successor] if self._successor else [])]
        await asyncio.gather(*(one.channel.close(grace) for one in connections))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("stream_stream", args, kwargs)

    def _method(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            connection = self.connection()
            begun = getattr(connection.channel, kind)(*args, **kwargs)(*call_args, **call_kwargs)
            connection.begin(begun)
            return begun

        return call

    def _prepare(self, pair: Pair) -> None:
        if self._successor is not None:
            self._successor.retire()
        if self._promoting is not None:
            self._promoting.cancel()
        self._successor = _Connection(pair, self._dial(pair))
        self._promoting = asyncio.get_running_loop().create_task(self._promote(self._successor))

    async def _promote(self, successor: _Connection) -> None:
        await successor.channel.channel_ready()
        if self._successor is successor:
            self._succeed(successor)

    def _succeed(self, successor: _Connection) -> None:
        self._old = {one for one in (*self._old, self._current) if one.num_calls}
        self._current.retire()
        self._current, self._successor = successor, None


def _is_ready(connection: _Connection) -> bool:
    return connection.channel.get_state() is grpc.ChannelConnectivity.READY
