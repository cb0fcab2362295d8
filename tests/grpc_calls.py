"""What tests ask of gRPC that its types do not allow for: a message that surely comes, raw bytes, calls that block."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import grpc
import grpc.aio

_Message = TypeVar("_Message")


async def next_message(
    call: grpc.aio.UnaryStreamCall[Any, _Message] | grpc.aio.StreamStreamCall[Any, _Message],
) -> _Message:
    """The next answer of `call`, which has not ended."""
    message = await call.read()
    assert message is not grpc.aio.EOF, "the stream has ended"
    return cast("_Message", message)


def of_bytes(channel: grpc.aio.Channel, method: str) -> grpc.aio.UnaryStreamMultiCallable[bytes, bytes]:
    """Calls `method` with bytes that need not be a message."""
    return channel.unary_stream(method)


def blocking_stub(kind: type[Any], channel: grpc.Channel) -> Any:
    """Its calls block. The generated stubs are typed for asyncio alone."""
    return kind(channel)
