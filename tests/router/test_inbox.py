"""What waits in an inbox comes out once and in order, whoever is faster, within its bound."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.tandem.v1 import common_pb2, decode_pb2
from router.inbox import Inbox


def answer(index: int, text: str = "") -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=common_pb2.TokenChunk(token_index=index, text=text))


async def read_all(inbox: Inbox) -> list[int]:
    indices = []
    while True:
        try:
            indices.append((await inbox.get()).tokens.token_index)
        except EOFError:
            return indices


@given(st.lists(st.sampled_from(["put", "turn"]), max_size=30))
def test_everything_comes_once_and_in_order(steps: list[str]) -> None:
    async def run() -> None:
        inbox = Inbox()
        reading = asyncio.create_task(read_all(inbox))
        num_put = 0
        for step in steps:
            if step == "put":
                assert inbox.put(answer(num_put))
                num_put += 1
            else:
                await asyncio.sleep(0)
        inbox.close(EOFError())
        assert await reading == list(range(num_put))

    asyncio.run(run())


async def test_an_end_comes_after_what_was_there_even_if_that_came_later() -> None:
    inbox = Inbox()
    inbox.put(answer(0))
    inbox.close(EOFError())
    inbox.close(ValueError("the first end counts"))
    inbox.put(answer(1))
    assert await read_all(inbox) == [0, 1]


async def test_a_reader_that_was_cancelled_loses_nothing() -> None:
    inbox = Inbox()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await inbox.get()
    reading = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.put(answer(0))
    inbox.put(answer(1))
    inbox.close(EOFError())
    assert (await reading).tokens.token_index == 0
    assert await read_all(inbox) == [1]


async def test_what_waits_behind_another_does_not_keep_the_message_that_it_came_with() -> None:
    inbox = Inbox()
    message = decode_pb2.StreamTokensResponse(responses=[{"response": answer(i)} for i in range(2)])
    for numbered in message.responses:
        inbox.put(numbered.response)
    assert await inbox.get() is message.responses[0].response
    second = await inbox.get()
    assert second == message.responses[1].response
    assert second is not message.responses[1].response


async def test_what_waits_is_bounded_and_there_is_room_again_once_it_is_read() -> None:
    inbox = Inbox(max_bytes=10 * answer(100, "x" * 80).ByteSize())
    taken = [inbox.put(answer(100 + i, "x" * 80)) for i in range(12)]
    assert taken == [True] * 11 + [False]  # the first one is not a copy
    for _ in range(2):
        await inbox.get()
    assert inbox.put(answer(111, "x" * 80))
    assert not inbox.put(answer(112, "x" * 80))
    inbox.clear()
    inbox.close(EOFError())
    assert await read_all(inbox) == []
