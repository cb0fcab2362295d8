"""The live page's data as events: a snapshot, then each second what has changed.

    idle ──the first watcher──▶ sampling: read ─▶ LiveState ─▶ snapshot and patch ─▶ every watcher, then sleep
     ▲                             └──────────────────── interval_s ◀────────────────────┘
     └──the last watcher has gone, or `close`

While there is no watcher there is no task, no timer and no state. All watchers share one sampling; one that was too
slow for a patch gets a snapshot instead, so that a slow client delays only itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from router.api.live.merge_patch import Json, patch_of
from router.api.live.state import LiveState, Reading
from serving.broadcast import Broadcast

_log = logging.getLogger(__name__)


class LiveFeed:
    """Belongs to one event loop."""

    def __init__(self, read: Callable[[], Awaitable[Reading]], interval_s: float = 1.0) -> None:
        self._read = read
        self._interval_s = interval_s
        self._published = Broadcast()
        self._num_watchers = 0
        self._sampling: asyncio.Task[None] | None = None
        self._is_closed = False
        self._reset()

    @property
    def is_sampling(self) -> bool:
        return self._sampling is not None

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events as JSON: {"snapshot": state}, then {"patch": RFC 7396} or another snapshot, until `close`."""
        self._num_watchers += 1
        if self._sampling is None and not self._is_closed:
            self._sampling = asyncio.create_task(self._sample(), name="live")
        seen = 0
        try:
            while self._sampling is not None:
                if self._version == seen:
                    await self._published.wait()
                    continue
                event = self._patch if self._version == seen + 1 and seen else self._snapshot()
                seen = self._version
                yield event
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._stop()

    def close(self) -> None:
        """Ends all watches; the router is about to stop. Idempotent."""
        self._is_closed = True
        self._stop()

    def _stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            self._sampling = None
            self._reset()
            self._published.notify()

    def _reset(self) -> None:
        self._version = 0
        self._state: Json = {}
        self._patch = b""
        self._encoded: bytes | None = None

    async def _sample(self) -> None:
        states = LiveState()
        try:
            while True:
                state = states.next(await self._read())
                self._patch = msgspec.json.encode({"patch": patch_of(self._state, state)})
                self._state, self._encoded = state, None
                self._version += 1
                self._published.notify()
                await asyncio.sleep(self._interval_s)
        except Exception:
            _log.exception("the live page's data cannot be read")
            self._stop()

    def _snapshot(self) -> bytes:
        if self._encoded is None:
            self._encoded = msgspec.json.encode({"snapshot": self._state})
        return self._encoded
