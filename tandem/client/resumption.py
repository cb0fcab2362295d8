"""When a request whose router dies goes on at another router, or at the same one after its restart.

    under way ──the connection is lost, or its router ends──▶ broken ──a router goes on──▶ under way
                                                                └─after `RESUME_WAIT_S`──▶ the error, for the caller

The next call is the same request with what has arrived (GenerateRequest.resume), so it needs nothing that the router
before knew. What comes is checked to continue exactly there. An error that a router itself has sent is final: it has
tried other instances as often as is good for them. So is that of a router which was never reached.

Before the first token the loss of a connection must be certain, since retrying rejected requests is a setting of its
own (`retries`); after it anything goes that is not a router's answer, such as what a proxy in between says.
"""

from __future__ import annotations

import time

from protos.tandem.v1 import generation_pb2
from tandem.client.completion import CompletionAssembler
from tandem.client.errors import NOT_REACHED, ConnectionLost, TandemError

DEFAULT_MAX_RESUMPTIONS = 3
RESUME_WAIT_S = 30.0
"""Enough for a router that a supervisor restarts: 3 s, and several times as long on a busy machine."""
_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 1.0
_TEMPORARY = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
_RESET = "Received RST_STREAM"
"""Begins gRPC's own text of an INTERNAL or CANCELLED: a proxy has ended the stream, since its router has died."""


class Resumption:
    """The calls of one request. `request` and `remaining_s` are the arguments of the next one, after `begin`."""

    def __init__(
        self,
        request: generation_pb2.GenerateRequest,
        assembler: CompletionAssembler,
        timeout_s: float,
        max_resumptions: int,
    ) -> None:
        self.request = request
        self._assembler = assembler
        self._timeout_s = timeout_s
        self._ends_s = 0.0
        self._num_left = max_resumptions
        self._num_pieces = -1
        """At the last break; -1: there was none."""
        self._until_s = 0.0
        """Of that break."""
        self._delay_s = _FIRST_DELAY_S

    def begin(self) -> None:
        """The time limit runs from now on."""
        self._ends_s = time.monotonic() + self._timeout_s

    @property
    def remaining_s(self) -> float:
        return max(self._ends_s - time.monotonic(), 0.0)

    def lacks_nothing(self, error: TandemError) -> bool:
        """Whether the connection broke only behind the whole answer."""
        return _is_lost(error) and self._assembler.is_finished

    def delay_s(self, error: TandemError) -> float | None:
        """Seconds until the next call, after one that failed; None: the error is the caller's."""
        now_s = time.monotonic()
        is_new = self._assembler.num_pieces > self._num_pieces
        if not (self._resumes(error, now_s) if is_new else self._asks_again(error, now_s)):
            return None
        delay_s = max(self._delay_s, min(error.retry_after_s or 0.0, _MAX_DELAY_S))
        return delay_s if now_s + delay_s < min(self._until_s, self._ends_s) else None

    def _resumes(self, error: TandemError, now_s: float) -> bool:
        """Whether a break that follows upon progress, or is the first, is resumed; then it is counted."""
        num_pieces = self._assembler.num_pieces
        is_broken = _is_lost(error) if num_pieces else isinstance(error, ConnectionLost)
        if not (self._num_left and is_broken):
            return False
        if num_pieces:
            self.request = self._assembler.resumed(self.request)
        self._num_left -= 1
        self._num_pieces, self._until_s, self._delay_s = num_pieces, now_s + RESUME_WAIT_S, _FIRST_DELAY_S
        return True

    def _asks_again(self, error: TandemError, now_s: float) -> bool:
        """Whether a router may go on with it a little later. One that has died meanwhile, maybe of it, is counted: it
        had the request, maybe for long, so this is a break of its own."""
        has_died = isinstance(error, ConnectionLost)
        if not (error.status in _TEMPORARY or _is_lost(error)) or (has_died and not self._num_left):
            return False
        if has_died:
            self._num_left -= 1
            self._until_s, self._delay_s = now_s + RESUME_WAIT_S, _FIRST_DELAY_S
        else:
            self._delay_s = min(2 * self._delay_s, _MAX_DELAY_S)
        return True


def _is_lost(error: TandemError) -> bool:
    """Whether a connection that had been made broke, as it seems. A router's own UNAVAILABLE says when to retry."""
    if error.status in ("INTERNAL", "CANCELLED"):
        return error.message.startswith(_RESET)
    if error.status == "UNKNOWN":  # no router sends it: a proxy has ended the stream without a status
        return True
    is_answer = error.status != "UNAVAILABLE" or error.retry_after_s is not None
    return isinstance(error, ConnectionLost) or not (is_answer or error.message.startswith(NOT_REACHED))
