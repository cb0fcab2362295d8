"""What tests need that run the command line in their own process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol, TypeVar

import pytest

Server = TypeVar("Server", bound=AbstractAsyncContextManager[object])


class Serve(Protocol):
    def __call__(self, server: Server) -> Server: ...


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server on a thread of its own and returns it; ends all of them after the test."""
    loop, servers = asyncio.new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def start(server: Server) -> Server:
        asyncio.run_coroutine_threadsafe(servers.enter_async_context(server), loop).result(20)
        return server

    yield start
    asyncio.run_coroutine_threadsafe(servers.aclose(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
