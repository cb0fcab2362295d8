"""What an instance counts about its requests, whichever its role. Plain numbers, for the log and for exporters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from protos.tandem.v1 import common_pb2
from serving.events import RequestEvent, Timeline
from serving.logging import log_event

_log = logging.getLogger(__name__)


class Observation:
    """One request while it is being served."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.timeline.mark(RequestEvent.RECEIVED)
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def saw(self, chunk: common_pb2.TokenChunk) -> bool:
        """Takes note of a chunk; returns whether it was the request's first here."""
        first = self.num_tokens == 0
        if first:
            self.timeline.mark(RequestEvent.FIRST_TOKEN)
        self.num_tokens += len(chunk.token_ids)
        if chunk.HasField("finish"):
            self.finish_reason = (
                common_pb2.FinishReason.Name(chunk.finish.reason).removeprefix("FINISH_REASON_").lower()
            )
        return first


@dataclass(slots=True)
class RequestMetrics:
    """Totals since the start. Written on the event loop alone."""

    num_received: int = 0
    num_cancelled: int = 0
    """Ended by the caller, or by its going away, before the last chunk."""
    num_failed: int = 0
    num_tokens: int = 0
    """Output tokens sent."""
    first_token_s: float = 0.0
    """Sum over requests of the time from the call to its first token."""
    num_first_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests that ended by themselves, by finish reason."""

    @contextmanager
    def observed(self) -> Iterator[Observation]:
        """Counts the request that the block serves, and logs its end."""
        observation = Observation()
        self.num_received += 1
        try:
            yield observation
        except (GeneratorExit, asyncio.CancelledError):
            if observation.finish_reason is None:
                self.num_cancelled += 1
                self._ended(observation, RequestEvent.ABORTED)
            else:
                self._finished(observation)
            raise
        except BaseException as error:
            self.num_failed += 1
            self._ended(observation, RequestEvent.FAILED, error=type(error).__name__)
            raise
        else:
            self._finished(observation)

    def totals(self) -> dict[str, object]:
        """Every number by name, for one log line."""
        return asdict(self)

    def _finished(self, observation: Observation) -> None:
        reason = observation.finish_reason or "unknown"
        self.finished[reason] += 1
        self._ended(observation, RequestEvent.FINISHED, reason=reason)

    def _ended(self, observation: Observation, event: RequestEvent, **fields: object) -> None:
        timeline = observation.timeline
        timeline.mark(event, time.monotonic())
        self.num_tokens += observation.num_tokens
        if (first_token_s := timeline.between(RequestEvent.RECEIVED, RequestEvent.FIRST_TOKEN)) is not None:
            self.num_first_tokens += 1
            self.first_token_s += first_token_s
        log_event(_log, event, "", num_tokens=observation.num_tokens, **{**fields, **timeline.milliseconds()})
