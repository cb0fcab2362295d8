"""Server-sent events out of a stream of bytes (HTML standard, section 9.2). Of their fields only `data` matters."""

from __future__ import annotations

from collections.abc import AsyncIterator

MAX_EVENT_BYTES = 16 << 20


class EventTooLong(ValueError):
    """An event has more bytes than any answer needs."""


async def event_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event that is complete, its lines joined by newlines. Raises EventTooLong.

    Lines end with LF or CRLF. (A lone CR, which the standard allows too, no server of this field sends.) They are split
    as bytes: the text of a token may hold characters that Python's own `splitlines` takes for the end of a line.
    """
    pending = b""
    lines: list[bytes] = []
    async for chunk in chunks:
        *complete, pending = (pending + chunk).split(b"\n")
        for line in complete:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                yield b"\n".join(lines)
                lines = []
        if len(pending) + sum(map(len, lines)) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event is longer than {MAX_EVENT_BYTES} bytes")
