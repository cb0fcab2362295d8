"""Events come out whole, however the bytes are cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.serve import openai_endpoint
from tandem.bench.serve.openai_endpoint import EventTooLong, event_data


def read(chunks: list[bytes]) -> list[bytes]:
    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def collect() -> list[bytes]:
        return [data async for data in event_data(stream())]

    return asyncio.run(collect())


DATA = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1).map(str.encode)


@given(st.lists(DATA, max_size=5), st.sampled_from([b"\n", b"\r\n"]), st.integers(1, 7))
def test_data_survives_any_cut_and_either_end_of_line(events: list[bytes], end: bytes, step: int) -> None:
    whole = b"".join(b": comment" + end + b"data: " + data + end + b"id: 7" + end + end for data in events)
    assert read([whole[at : at + step] for at in range(0, len(whole), step)]) == events


def test_lines_of_one_event_are_joined_and_half_an_event_is_none() -> None:
    assert read([b"data:one\ndata: two\n\n\n", b"event: x\n\n", b"data: half\n"]) == [b"one\ntwo"]


@pytest.mark.parametrize("chunk", [b"data: 12345678", b"data: 1234567\n"])
def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch, chunk: bytes) -> None:
    monkeypatch.setattr(openai_endpoint, "MAX_EVENT_BYTES", 20)
    with pytest.raises(EventTooLong):
        read([chunk] * 4)
