"""Clients that send one request after another and check every answer, while a test injects faults into the Redis; and a
search of logs for secrets."""

from __future__ import annotations

import base64
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tandem import Client
from tests.system.checker import assert_same_answer, assert_usage
from tests.system.reference import Answer

REST_S = 0.05
"""Of a client between two requests: faults last for seconds, and more requests would prove no more."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One right answer, and where its prompt's KV came from. Times are monotonic seconds."""

    started_s: float
    ended_s: float
    external_tokens: int
    recomputed_tokens: int


class Clients:
    """`num_clients` threads with a connection each send the prompts of `answers` in turn until the block ends, with a
    new salt every time, so that no cache has the KV. A failed request fails the test."""

    def __init__(
        self,
        address: str,
        answers: Sequence[tuple[Sequence[int], Answer]],
        sampling: Mapping[str, Any],
        num_clients: int,
    ) -> None:
        self._address, self._answers, self._sampling = address, answers, sampling
        self._lock = threading.Lock()
        self._next = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send_requests) for _ in range(num_clients)]
        self.answered: list[Answered] = []
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if error is None:
            assert not self.failures, f"{len(self.failures)} requests failed:\n{self.failures[0]}"

    def since(self, since_s: float) -> list[Answered]:
        """Answers to requests that began after `since_s`."""
        return [answered for answered in list(self.answered) if answered.started_s >= since_s]

    def wait(self, condition: Callable[[list[Answered]], object], timeout_s: float, missing: str) -> float:
        """Seconds until the condition holds for the requests that begin from now on."""
        since_s = time.monotonic()
        while not condition(self.since(since_s)):
            assert not self.failures, f"a request failed:\n{self.failures[0]}"
            assert time.monotonic() < since_s + timeout_s, f"{missing} within {timeout_s:g} s"
            time.sleep(0.01)
        return time.monotonic() - since_s

    def wait_for_hit(self, timeout_s: float) -> float:
        """Seconds until the KV of a request comes from elsewhere."""
        return self.wait(lambda some: any(one.external_tokens for one in some), timeout_s, "no hit")

    def wait_for_recompute(self, timeout_s: float) -> float:
        """Seconds until a prompt has to be computed again: the fault has an effect."""
        return self.wait(lambda some: any(one.recomputed_tokens for one in some), timeout_s, "nothing was recomputed")

    def wait_for_answers(self, count: int, timeout_s: float) -> float:
        """Seconds until `count` requests that begin now have been answered."""
        return self.wait(lambda some: len(some) >= count, timeout_s, f"fewer than {count} answers")

    def _take(self) -> tuple[str, Sequence[int], Answer]:
        with self._lock:
            self._next += 1
            return f"{id(self)}-{self._next}", *self._answers[self._next % len(self._answers)]

    def _send_requests(self) -> None:
        with Client(self._address, timeout_s=30.0) as client:
            while not self._stop.is_set():
                salt, prompt, answer = self._take()
                started_s = time.monotonic()
                try:
                    completion = client.generate(prompt, cache_salt=salt, **self._sampling)
                    assert_same_answer(completion, answer)
                    assert_usage(completion)
                except BaseException as error:
                    self.failures.append("".join(traceback.format_exception(error)))
                    return
                usage = completion.usage
                self.answered.append(
                    Answered(started_s, time.monotonic(), usage.external_tokens, usage.recomputed_tokens)
                )
                self._stop.wait(REST_S)


# The search of logs


def windows(page: bytes, source: random.Random, count: int = 64, length: int = 12) -> Iterator[bytes]:
    """Pieces of a page that are in no log by accident; without quotes, which have several notations."""
    while count:
        start = source.randrange(len(page) - length)
        piece = page[start : start + length]
        if len(set(piece)) >= length // 2 and not set(piece) & set(b"'\"\\"):
            yield piece
            count -= 1


def found_in(content: bytes, secrets: Iterable[bytes]) -> list[bytes]:
    """Those of the secrets that are in `content`, raw or in another notation."""
    return [secret for secret in secrets if any(form in content for form in _forms(secret))]


def _forms(secret: bytes) -> Iterator[bytes]:
    """Raw, latin-1, hex, base64 at any offset, as Python's bytes, as a list of numbers."""
    yield secret
    yield secret.decode("latin-1").encode()
    for separator in ("", " ", ":"):
        text = secret.hex(separator) if separator else secret.hex()
        yield text.encode()
        yield text.upper().encode()
    for shift in range(3):
        encoded = base64.b64encode(bytes(shift) + secret)
        first, last = -(-8 * shift // 6), 8 * (shift + len(secret)) // 6
        yield encoded[first:last]
        yield encoded[first:last].translate(bytes.maketrans(b"+/", b"-_"))
    yield repr(secret)[2:-1].encode()
    yield ", ".join(map(str, secret)).encode()
