"""Requests handed over through Redis one after another, for tests in which something happens to it meanwhile."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from engine.core.messages import KVProgress
from kv_transfer.stores.base import BlockStore
from kv_transfer.stores.redis.connector import RedisStore
from tests.kv_transfer.harness import BLOCK_SIZE, Core, make_request
from tests.kv_transfer.stores.redis.redis_server import IMPATIENT, RedisServer, options_of
from tests.waiting import Stopwatch

PROMPT = list(range(100, 100 + 5 * BLOCK_SIZE + 3))
MISS_PAUSE_S = 0.01
"""Before the next hand-over: while the breaker is open, misses take no time."""


class Load:
    """Hand-overs one after another in a thread of their own. A failure of Redis must not fail them."""

    def __init__(self, server: RedisServer, **options: object) -> None:
        settings = options_of(server, **{**IMPATIENT, **options})
        retry_s = settings.breaker_retry_s
        self.stores: Sequence[BlockStore] = [RedisStore(settings), RedisStore(settings)]
        self.prefill, self.decode = (
            Core(store, num_io_threads=settings.num_io_threads, breaker_retry_s=retry_s) for store in self.stores
        )
        self._prepare()

    def _prepare(self) -> None:
        """What a load needs beside its stores."""
        self.hits: list[float] = []
        self.misses: list[float] = []
        self.longest_s = 0.0
        self._watch = Stopwatch()
        self.failure: BaseException | None = None
        self.open_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        self.wait_for_hit(60.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for core in (self.prefill, self.decode):
            core.connector.shutdown()
        assert self.failure is None, traceback.format_exception(self.failure)

    def wait_for_hit(self, timeout_s: float) -> float:
        """Seconds from now until a request is a hit in full."""
        return self._wait(lambda since: self.hits and self.hits[-1] > since, timeout_s)

    def wait_for_miss(self, timeout_s: float) -> float:
        return self._wait(lambda since: self.misses and self.misses[-1] > since, timeout_s)

    def wait_for_breaker(self, timeout_s: float) -> float:
        """Seconds from now until the prefill side does not save or the decode side does not load."""
        saves, loads = self.prefill.connector._io.save_breaker, self.decode.connector._io.load_breaker
        return self._wait(lambda _: saves.is_open or loads.is_open, timeout_s)

    def _wait(self, condition: Callable[[float], object], timeout_s: float) -> float:
        since, watch = time.monotonic(), Stopwatch()
        while not condition(since):
            assert self.failure is None, traceback.format_exception(self.failure)
            assert watch.s < timeout_s, "it did not happen in time"
            time.sleep(0.005)
        return watch.s

    def _run(self) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                if not self._hand_over(number):
                    self._stop.wait(MISS_PAUSE_S)
                number += 1
        except BaseException as error:
            self.failure = error

    def _hand_over(self, number: int) -> bool:
        """Whether it was a hit in full."""
        started = self._watch.s
        prompt = [number, *PROMPT]  # a new one each time, or its pages would be there already
        names: dict[str, Any] = {"request_id": f"r{number}", "transfer_id": f"t{number}"}
        request, reader = make_request(prompt, hold=True, **names), make_request(prompt, remote=True, **names)
        self.prefill.events.clear()
        self.decode.loaded.clear()
        for core in (self.prefill, self.decode):
            core.wait(lambda core=core: not core.connector._held)  # type: ignore[misc]
            core.next_block = 0
            core.kv.zero_()
        self.prefill.prefill(request)
        self.decode.reserve(reader)
        if self.prefill.ended is None:
            result = self.decode.complete(reader)
        else:
            self.decode.connector.handle(KVProgress(names["request_id"], 0, failed="save_failed"))
            result = self.decode.result(reader)
        assert self.decode.has(reader, result.num_verified_tokens), "wrong KV"
        is_hit = result.num_verified_tokens == len(prompt)
        (self.hits if is_hit else self.misses).append(time.monotonic())
        self.prefill.release(names["transfer_id"])
        self.decode.finish(reader, "length")
        self.longest_s = max(self.longest_s, self._watch.s - started)
        return is_hit
