"""What tests need that run the command line in their own process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.tandem.bench.serve.fake_servers import FakeTandem


@pytest.fixture
def fake_tandem() -> Iterator[Callable[[], str]]:
    """Starts a FakeTandem on a thread of its own; returns its address."""
    loop, server = asyncio.new_event_loop(), FakeTandem()
    thread = threading.Thread(target=loop.run_forever)

    def start() -> str:
        thread.start()
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(20)
        return server.address

    yield start
    if thread.is_alive():
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    loop.close()
