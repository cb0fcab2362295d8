"""Buffered answers are read once and in order, at any speed of writer and reader, within the limit."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.tandem.v1 import common_pb2, decode_pb2
from router.pools.token_stream import MAX_JOINED_BYTES, ReceiveBuffer


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


@given(st.lists(st.sampled_from(["put", "hold", "wake", "turn"]), max_size=40))
def test_what_is_held_is_not_read_before_it_may_be(steps: list[str]) -> None:
    async def run() -> None:
        buffer, found, sent = ReceiveBuffer(), [], stream(41)
        num_put, num_readable, is_held = 0, 0, False

        async def read() -> None:
            while len(found) <= 40:
                found.extend((await buffer.read()).tokens.token_ids)

        reading = asyncio.create_task(read())
        for step in [*steps, "hold"]:
            if step in ("put", "hold"):
                is_held = is_held or step == "hold"
                assert buffer.append(sent[num_put], hold=step == "hold")
                num_put += 1
            elif step == "wake":
                is_held = False
                buffer.wake()
            else:
                await asyncio.sleep(0)
            num_readable = num_readable if is_held else num_put
            assert len(found) <= num_readable
        for one in sent[num_put:]:
            buffer.append(one)
        buffer.wake()
        await reading
        assert found == [7 + index for index in range(41)]

    asyncio.run(run())


async def test_what_was_held_is_one_answer() -> None:
    buffer, sent = ReceiveBuffer(), stream(6)
    reading = asyncio.create_task(buffer.read())
    await asyncio.sleep(0)
    for one in sent:
        assert buffer.is_awaited
        buffer.append(one, hold=True)
    buffer.wake()
    assert rejoined([await reading]) == rejoined(sent)


async def test_an_end_releases_what_is_held() -> None:
    buffer = ReceiveBuffer()
    buffer.append(answer(0), hold=True)
    buffer.close(EOFError())
    assert await read_all(buffer) == [0]


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
    message = decode_pb2.StreamTokensResponse(
        responses=[decode_pb2.NumberedResponse(response=answer(i)) for i in range(2)]
    )
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


def stream(num_tokens: int, *, has_logprobs: bool = False) -> list[decode_pb2.DecodeResponse]:
    """A choice token by token, of texts with several bytes a character, or none, with the finish on the last."""
    chunks, num_chars = [], 0
    for index in range(num_tokens):
        text = "é€ "[: index % 4]
        chunk = common_pb2.TokenChunk(
            stream_epoch=2, choice=1, token_index=index, token_ids=[7 + index], text_offset=num_chars, text=text
        )
        if has_logprobs:
            chunk.logprobs.add().candidates.add(token_id=7 + index, logprob=-0.5 * index, rank=1)
        chunks.append(chunk)
        num_chars += len(text)
    chunks[-1].finish.reason = common_pb2.FINISH_REASON_LENGTH
    chunks[-1].finish.usage.completion_tokens = num_tokens
    return [decode_pb2.DecodeResponse(tokens=chunk) for chunk in chunks]


def rejoined(answers: list[decode_pb2.DecodeResponse]) -> common_pb2.TokenChunk:
    """The whole choice, of answers that follow one another."""
    whole, text = common_pb2.TokenChunk(), ""
    for answer in answers:
        assert answer.tokens.token_index == len(whole.token_ids)
        assert answer.tokens.text_offset == len(text)
        text += answer.tokens.text
        whole.MergeFrom(answer.tokens)
    whole.token_index = whole.text_offset = 0
    whole.text = text
    return whole


async def read_behind(answers: list[decode_pb2.DecodeResponse]) -> list[decode_pb2.DecodeResponse]:
    """What a reader gets that comes when all have arrived."""
    buffer, found = ReceiveBuffer(), []
    for one in answers:
        buffer.append(one)
    buffer.close(EOFError())
    while True:
        try:
            found.append(await buffer.read())
        except EOFError:
            return found


@given(st.integers(1, 12), st.booleans(), st.lists(st.sampled_from(["arrive", "read"]), max_size=40))
def test_tokens_that_arrive_while_the_reader_is_away_are_one_answer(
    num_tokens: int, has_logprobs: bool, steps: list[str]
) -> None:
    async def run() -> None:
        sent = stream(num_tokens, has_logprobs=has_logprobs)
        buffer, found, num_waiting, rest = ReceiveBuffer(), [], 0, iter(sent)
        for step in [*steps, *["arrive"] * num_tokens, "read"]:
            if step == "arrive" and (one := next(rest, None)) is not None:
                buffer.append(one)
                num_waiting += 1
            elif step == "read" and num_waiting:
                found.append(await buffer.read())
                assert len(found[-1].tokens.token_ids) == num_waiting
                num_waiting = 0
        assert rejoined(found) == rejoined(sent)

    asyncio.run(run())


async def test_tokens_that_a_waiting_reader_gets_at_once_stay_alone() -> None:
    buffer, sent = ReceiveBuffer(), stream(4)
    reading = asyncio.create_task(buffer.read())
    await asyncio.sleep(0)
    for one in sent:
        buffer.append(one)
    assert [await reading, *[await buffer.read() for _ in range(3)]] == sent


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("choice", 0),
        ("stream_epoch", 1),
        ("token_index", 5),
        ("token_index", 3),
        ("text_offset", 2),
        ("logprobs", [{}]),
    ],
)
async def test_what_does_not_continue_the_tokens_stays_alone(field: str, value: object) -> None:
    sent = stream(6)
    sent[4] = decode_pb2.DecodeResponse(
        tokens=common_pb2.TokenChunk(
            **{name.name: found for name, found in sent[4].tokens.ListFields()} | {field: value}
        )
    )
    found = await read_behind(sent)
    assert [len(one.tokens.token_ids) for one in found] == [4, 1, 1]
    assert found[1:] == sent[4:]


async def test_nothing_is_joined_to_a_finish_or_to_another_event() -> None:
    after = stream(3)[2]
    loaded = decode_pb2.DecodeResponse(loaded=decode_pb2.DecodeLoaded(num_recomputed_blocks=1))
    assert (await read_behind([*stream(2), after]))[1:] == [after]
    assert await read_behind([loaded, *stream(1)]) == [loaded, *stream(1)]


async def test_a_joined_answer_is_bounded() -> None:
    sent = stream(4000, has_logprobs=True)
    found = await read_behind(sent)
    assert rejoined(found) == rejoined(sent)
    assert MAX_JOINED_BYTES / 4 < max(one.ByteSize() for one in found) <= MAX_JOINED_BYTES
