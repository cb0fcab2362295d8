"""What a decode instance has answered and its leg has not read yet.

    put ──▶ waiting ──get──▶ read          closed ──all that waits is read──▶ `get` raises
              └── more than there is room for ──▶ `put` says no

The first answer waits as it is. It is part of a message in which the instance answers many calls, and all of that lives
as long as any part does; so behind a reader who is slow the others wait as bytes of their own.
"""

from __future__ import annotations

import asyncio
from collections import deque

from protos.tandem.v1 import decode_pb2

MAX_BYTES = 4 << 20
"""Some 70,000 tokens without log-probabilities."""


class Inbox:
    """One reader; belongs to one event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._first: decode_pb2.DecodeResponse | None = None
        self._others: deque[bytes] = deque()
        self._num_bytes = 0
        self._end: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, response: decode_pb2.DecodeResponse) -> bool:
        """Takes the next answer; False if there is no room for it."""
        if self._first is None and not self._others:
            self._first = response
            self._wake()
            return True
        data = response.SerializeToString()
        if self._num_bytes + len(data) > self._max_bytes:
            return False
        self._others.append(data)
        self._num_bytes += len(data)
        return True

    def close(self, end: Exception) -> None:
        """After what waits nothing comes but `end`, which `get` raises; the first end counts."""
        if self._end is None:
            self._end = end
            self._wake()

    def clear(self) -> None:
        """What waits is not wanted any more."""
        self._first = None
        self._others.clear()
        self._num_bytes = 0

    async def get(self) -> decode_pb2.DecodeResponse:
        """The next answer. Raises what the inbox was closed with, after the last one."""
        while True:
            if (response := self._first) is not None:
                self._first = None
                return response
            if self._others:
                data = self._others.popleft()
                self._num_bytes -= len(data)
                return decode_pb2.DecodeResponse.FromString(data)
            if self._end is not None:
                raise self._end
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
