"""A router that dies behind a proxy: HTTP/2 as HAProxy speaks it, and what gRPC makes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tandem import AsyncClient, Client, Piece, TandemError
from tests.ending_proxy import ENDS, ending_proxy
from tests.tandem.client.test_resumption import LOST, NUM, TEXTS, ScriptedRouter


@pytest.fixture(scope="module")
def router() -> Iterator[ScriptedRouter]:
    router = ScriptedRouter()
    router.start()
    yield router
    router.close()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["blocking", "async"])
async def test_a_stream_that_a_proxy_ends_goes_on(router: ScriptedRouter, kind: str, end: str) -> None:
    router.requests.clear()
    router.calls = [(2, LOST), (NUM, None)]
    loop, has_read, texts = asyncio.get_running_loop(), asyncio.Event(), list[str]()

    def read(piece: Piece) -> None:
        texts.append(piece.text)
        loop.call_soon_threadsafe(has_read.set)

    def blocking(address: str) -> None:
        with Client(address) as client:
            for piece in client.stream("go"):
                read(piece)

    async with ending_proxy(router.address, end, has_read) as proxy:
        if kind == "blocking":
            await asyncio.to_thread(blocking, proxy.address)
        else:
            async with AsyncClient(proxy.address) as client:
                async for piece in client.stream("go"):
                    read(piece)
    assert texts == TEXTS
    assert len(router.requests) == 2
    assert router.requests[1].HasField("resume"), "it began again"


def test_a_client_that_is_closed_resumes_nothing(router: ScriptedRouter) -> None:
    router.requests.clear()
    router.calls = [(NUM, None)]
    router.may_end.clear()
    try:
        with Client(router.address) as client:
            stream = client.stream("go")
            next(stream)
            threading.Thread(target=client.close).start()
            with pytest.raises(TandemError, match="CANCELLED"):
                list(stream)
    finally:
        router.may_end.set()
    assert len(router.requests) == 1
