"""Buffered answers are read once and in order, at any speed of writer and reader, within the limit."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.tandem.v1 import common_pb2, decode_pb2
from router.pools.token_stream import ReceiveBuffer


def answer(index: int, text: str = "") -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=common_pb2.TokenChunk(token_index=index, text=text))


async def read_all(buffer: ReceiveBuffer) -> list[int]:
    indices = []
    while True:
        try:
            indices.append((await buffer.read()).tokens.token_index)
        except EOFError:
            return indices


@given(st.lists(st.sampled_from(["put", "turn"]), max_size=30))
def test_everything_comes_once_and_in_order(steps: list[str]) -> None:
    async def run() -> None:
        buffer = ReceiveBuffer()
        reading = asyncio.create_task(read_all(buffer))
        num_put = 0
        for step in steps:
            if step == "put":
                assert buffer.append(answer(num_put))
                num_put += 1
            else:
                await asyncio.sleep(0)
        buffer.close(EOFError())
        assert await reading == list(range(num_put))

    asyncio.run(run())


async def test_an_end_comes_after_what_was_there_even_if_that_came_later() -> None:
    buffer = ReceiveBuffer()
    buffer.append(answer(0))
    buffer.close(EOFError())
    buffer.close(ValueError("the first end counts"))
    buffer.append(answer(1))
    assert await read_all(buffer) == [0, 1]


async def test_a_reader_that_was_cancelled_loses_nothing() -> None:
    buffer = ReceiveBuffer()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await buffer.read()
    reading = asyncio.create_task(buffer.read())
    await asyncio.sleep(0)
    buffer.append(answer(0))
    buffer.append(answer(1))
    buffer.close(EOFError())
    assert (await reading).tokens.token_index == 0
    assert await read_all(buffer) == [1]


async def test_what_waits_behind_another_does_not_keep_the_message_that_it_came_with() -> None:
    buffer = ReceiveBuffer()
    message = decode_pb2.StreamTokensResponse(responses=[{"response": answer(i)} for i in range(2)])
    for numbered in message.responses:
        buffer.append(numbered.response)
    assert await buffer.read() is message.responses[0].response
    second = await buffer.read()
    assert second == message.responses[1].response
    assert second is not message.responses[1].response


async def test_what_waits_is_bounded_and_there_is_room_again_once_it_is_read() -> None:
    buffer = ReceiveBuffer(max_bytes=10 * answer(100, "x" * 80).ByteSize())
    taken = [buffer.append(answer(100 + i, "x" * 80)) for i in range(12)]
    assert taken == [True] * 11 + [False]  # the first one is not a copy
    for _ in range(2):
        await buffer.read()
    assert buffer.append(answer(111, "x" * 80))
    assert not buffer.append(answer(112, "x" * 80))
    buffer.clear()
    buffer.close(EOFError())
    assert await read_all(buffer) == []
