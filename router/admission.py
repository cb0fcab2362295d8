"""What the router takes on: a full house refuses at once, with a hint when to come back, and nothing waits.

Counts requests and the tokens they may come to hold (prompt and max_tokens of every choice). The seam for budgets per
tenant and for queues is `admit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from router.config import AdmissionSettings
from router.request import GenerationRequest
from serving.errors import Overloaded


class Admission:
    """The router's one budget. Belongs to one event loop."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._num_requests = 0
        self._num_tokens = 0

    @property
    def num_requests(self) -> int:
        return self._num_requests

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @contextmanager
    def admit(self, request: GenerationRequest) -> Iterator[None]:
        """Holds a place for `request`; raises Overloaded instead of waiting. A request alone is never too big."""
        settings, num_tokens = self._settings, request.num_reserved_tokens
        if self._num_requests >= settings.max_requests:
            raise Overloaded(f"{self._num_requests} requests are in flight, the most allowed", settings.retry_after_s)
        if self._num_requests and self._num_tokens + num_tokens > settings.max_tokens:
            problem = (
                f"{num_tokens} tokens more than the {self._num_tokens} in flight would exceed {settings.max_tokens}"
            )
            raise Overloaded(problem, settings.retry_after_s)
        self._num_requests += 1
        self._num_tokens += num_tokens
        try:
            yield
        finally:
            self._num_requests -= 1
            self._num_tokens -= num_tokens
