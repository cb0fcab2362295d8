"""What a load is put on, as the load sees it: one request in, the moments of its tokens out.

An endpoint owns its connections, keeps no clock and no counts: `load.py` stamps what `on_tokens` announces.
`grpc_endpoint.py` and `openai_endpoint.py` are the two that there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.serve_bench.records import PlannedRequest

OnTokens = Callable[[int], None]
"""Called at once when a message with so many output tokens (at least 1) has arrived."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended that was answered to its end."""

    finish_reason: str
    """length or stop; in the endpoint's own words if it has others."""
    num_told_tokens: int | None = None
    """Set where the messages did not say how many tokens each carried; see RequestRecord."""
    num_prompt_tokens: int | None = None
    """As the endpoint counted them; None: it did not say, or it was sent ids."""


@dataclass(frozen=True, slots=True)
class Served:
    """What an endpoint says about its model; None for what it does not say."""

    model: str
    max_model_len: int | None = None
    """Longest prompt + output, tokens."""
    vocab_size: int | None = None
    """Ids are 0..vocab_size-1."""
    end_ids: frozenset[int] = frozenset()
    """Ids that end an answer."""


class AskFailed(Exception):
    """A request that was not answered to its end. `status` is short and has no changing part: failures are counted by
    it."""

    def __init__(self, status: str, message: str, *, refused: bool = False) -> None:
        self.status = status
        self.message = message
        self.refused = refused
        """The endpoint was full and said so."""
        super().__init__(f"{status}: {message}")


class Endpoint(Protocol):
    """Something that answers requests. Used on one event loop, by any number of tasks at a time."""

    @property
    def name(self) -> str:
        """What and where it is, for people: `Tandem at 127.0.0.1:50051 (gRPC)`."""

    @property
    def counting(self) -> str:
        """How output tokens have been counted so far: `by the token ids of each message`."""

    async def served(self) -> Served:
        """What is served there; raises AskFailed, whose message says what to type."""

    async def ask(self, request: PlannedRequest, on_tokens: OnTokens) -> Answer:
        """Sends `request` with greedy sampling, past the end-of-sequence token, and follows its answer to the end.

        Raises AskFailed. To be cancelled is to hang up: nothing goes on running at the endpoint.
        """

    async def close(self) -> None:
        """Ends every connection."""
