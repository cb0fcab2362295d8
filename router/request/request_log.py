"""The requests of this router: those under way, and the last ones that have ended. The live page reads it.

    RequestTrace ─received─▶ running ─ended─▶ ended ─▶ dropped, when MAX_ENDED others have ended since

Kept only where the page is on. A request costs an entry and, at its end, a summary; its tokens cost nothing.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.logging import RequestEvent

MAX_ENDED = 6000
"""Five minutes of 1 200 requests each; about 7 MB."""


class TokenGaps(NamedTuple):
    """The gaps between consecutive tokens of the same choice."""

    total_s: float = 0.0
    number: int = 0

    @property
    def mean_s(self) -> float | None:
        """None without gaps."""
        return self.total_s / self.number if self.number else None

    def since(self, earlier: TokenGaps) -> TokenGaps:
        return TokenGaps(self.total_s - earlier.total_s, self.number - earlier.number)


def sum_of(gaps: Iterable[TokenGaps]) -> TokenGaps:
    every = [*gaps]
    return TokenGaps(sum(one.total_s for one in every), sum(one.number for one in every))


NO_GAPS = TokenGaps()


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One request at one moment, without its content."""

    number: int
    """Counts the router's requests."""
    request_id: str
    """The client's label; empty until the request is valid."""
    marks: tuple[tuple[RequestEvent, float], ...]
    """Its timeline, on the monotonic clock."""
    lora: str = ""
    """Its adapter; empty for none."""
    num_choices: int = 0
    """That this router generates: some may have finished at another one, as may the first of their tokens."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    """Of the prompt, at the instance that prefilled the first choice; None: not known yet."""
    num_tokens: int = 0
    gaps: TokenGaps = NO_GAPS
    """Of all its choices."""
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    """The instances in the order in which they were picked."""
    prefilled_by: str = ""
    """The instance that computed the prompt first; empty until one has."""
    reason: str = ""
    """Why it was split or not."""
    outcome: str = ""
    """finished, aborted, or the status of the error in lower case; empty while it runs."""
    error: str = ""

    @property
    def received_s(self) -> float:
        return self.marks[0][1]

    @property
    def last_s(self) -> float:
        """When its last event was recorded: its end, if it has ended."""
        return self.marks[-1][1]

    @property
    def first_token_s(self) -> float | None:
        return next((at_s for event, at_s in self.marks if event is RequestEvent.FIRST_TOKEN), None)


@dataclass(eq=False)
class RequestLog:
    """Written on the event loop alone."""

    running: dict[int, Callable[[], RequestSummary]] = field(default_factory=dict)
    """By number, the oldest first: makes the summary of now."""
    ended: deque[RequestSummary] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))
    """In the order of their ends."""
    epoch: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Of the numbering: a request of another epoch may have the same number."""

    def end(self, summary: RequestSummary) -> None:
        del self.running[summary.number]
        self.ended.append(summary)
