"""A leg of an attempt: one call to one instance, and how it can fail.

opened ──first answer──▶ acknowledged ──▶ ended | failed | lost (its instance is gone) | cancelled (nobody wants it)
                                └─ fading: its instance has ended, what had arrived is read ──▶ ended | failed | lost

A leg is an async context manager; leaving it cancels a call that has not ended, which frees everything at the
instance. The legs to the two roles are in legs.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Literal, Self

import grpc
import grpc.aio

from protos.tandem.v1 import common_pb2
from router.choice import Choice, StreamViolation
from router.last_words import LastWords
from router.pools.instances import InstanceKey
from router.pools.member import Member
from serving import tracing
from serving.calls import REQUEST_ID_KEY
from serving.errors import Crashed, DeadlineExceeded, InternalError, ServiceError, Unavailable, received
from serving.events import RequestEvent

_log = logging.getLogger(__name__)

FailureKind = Literal["refused", "broken", "internal", "final", "moved"]
"""refused: no room, another may have some. broken: the instance or the way to it. internal: it says that the fault is
its own, which a bad request can cause as well. final: no instance would answer otherwise. moved: no failure at all, the
instance is about to end and another one goes on."""

Death = Literal["crashed", "vanished"]
"""How an instance may have ended under a call. crashed: its front has told that the engine did. vanished: no word came,
and there was a connection when the call began, so that it can have heard of it; whether it has really ended, its pool
knows."""

_KINDS: dict[grpc.StatusCode, FailureKind] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "refused",
    grpc.StatusCode.UNAVAILABLE: "broken",
    grpc.StatusCode.CANCELLED: "broken",
    grpc.StatusCode.ABORTED: "broken",
    grpc.StatusCode.FAILED_PRECONDITION: "broken",
    grpc.StatusCode.UNKNOWN: "internal",
    grpc.StatusCode.INTERNAL: "internal",
    grpc.StatusCode.DATA_LOSS: "internal",
}
_GRPCIO_INTERNAL = "Internal error from Core"
"""What grpcio says when one of our writes races with the end of the call, whatever that end was."""
_DEADLINE_MARGIN_S = 0.02
"""Legs end this much before the request does, so that its end is told by us and not by a timer at the client."""


class LegFailed(Exception):
    """A leg did not do its part. `key` is the instance to blame, `error` what the client is told if nobody can help."""

    def __init__(
        self, key: InstanceKey, kind: FailureKind, error: ServiceError, detail: str, *, death: Death | None = None
    ) -> None:
        self.key = key
        self.kind = kind
        self.error = error
        self.detail = detail
        self.death = death
        super().__init__(f"{key.address}: {detail}")


Mark = Callable[[RequestEvent], object]


class Leg:
    """What both legs share: reading, being lost, and the end."""

    def __init__(
        self,
        member: Member,
        key: InstanceKey,
        choice: Choice,
        mark: Mark,
        can_move: Callable[[], bool] = lambda: False,
    ) -> None:
        self._member = member
        self._key = key
        self._choice = choice
        self._mark = mark
        self._can_move = can_move
        self._has_moved = False
        self._lost: str | None = None
        self._last_words = LastWords(self.lose)
        self._reached = False
        self._acknowledged = False
        self._call: Any = None  # the two kinds of call share no typed base with read()

    async def __aenter__(self) -> Self:
        self._member.begin(self, self._choice.num_tokens)
        if self._member.key != self._key:
            self._lost = "another process has taken its place"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._member.end(self)
        self._last_words.stop()
        if self._call is not None:
            self._call.cancel()  # nothing happens to a call that has ended

    def lose(self, reason: str) -> None:
        """The pool has given the instance up."""
        self._lost = reason
        if self._call is not None:
            self._call.cancel()

    def fade(self, reason: str) -> None:
        """The instance has ended: what has arrived of it is read, and then it counts as lost."""
        if self._lost is None:
            self._last_words.begin(reason)

    def move_on(self) -> None:
        """The instance is about to end: leaves it if somebody else can take over, and else stays to the end."""
        if self._lost is None and self._can_move():
            self._has_moved = True
            self.lose("it is about to end")

    def _check_not_lost(self) -> None:
        if self._lost is not None:
            raise self._broken(self._lost)

    def _begin(self) -> None:
        """Before the call is opened."""
        self._check_not_lost()
        self._reached = self._member.channel.get_state() is grpc.ChannelConnectivity.READY

    def _options(self) -> dict[str, Any]:
        deadline_s = self._choice.request.deadline_s
        timeout = None if deadline_s is None else max(deadline_s - time.monotonic() - _DEADLINE_MARGIN_S, 0.001)
        return {"timeout": timeout, "metadata": ((REQUEST_ID_KEY, self._choice.request.label), *tracing.outgoing())}

    async def _read(self) -> Any:
        """The next answer, None at a good end. Raises LegFailed."""
        last_words = self._last_words
        last_words.num_reads += 1
        last_words.is_reading = True
        try:
            message = await self._answer()
        finally:
            last_words.is_reading = False
        if message is not None and not self._acknowledged:
            self._reached = self._acknowledged = True
            self._member.acknowledged(self)
        return message

    async def _answer(self) -> Any:
        """The next message of the call, None at a good end. Raises LegFailed."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        except asyncio.CancelledError:
            if self._lost is None or _is_cancelling():
                raise
            raise self._broken(self._lost) from None
        return None if message is grpc.aio.EOF else message

    def _accepted(self, chunk: common_pb2.TokenChunk) -> bool:
        try:
            accepted = self._choice.accept(chunk)
        except StreamViolation as violation:
            raise self._broken(f"violates the stream: {violation}") from violation
        if not accepted:
            _log.warning("dropped a stale chunk of %s", self._key.address)
        return accepted

    @property
    def _vanished(self) -> Death | None:
        return "vanished" if self._reached else None

    def _broken(self, detail: str) -> LegFailed:
        kind: FailureKind = "moved" if self._has_moved else "broken"
        death = self._vanished if self._lost is not None else None
        return LegFailed(self._key, kind, Unavailable("the instance is unavailable"), detail, death=death)

    def _failed(self, error: grpc.aio.AioRpcError) -> LegFailed:
        code = error.code()
        if code is grpc.StatusCode.INTERNAL and error.details() == _GRPCIO_INTERNAL:
            late = self._choice.request.deadline_s is not None and time.monotonic() >= self._choice.request.deadline_s
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.UNAVAILABLE
        answer = received(error)
        death: Death | None = None
        if isinstance(answer, Crashed):
            death = "crashed"
        elif not error.trailing_metadata():  # no words of the instance's own
            death = self._vanished
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            answer = DeadlineExceeded("the request's deadline has passed")
        elif _KINDS.get(code) == "broken":
            answer = Unavailable("the instance is unavailable")
        elif code not in _KINDS and isinstance(answer, InternalError):
            answer = InternalError(f"unexpected answer {code.name}")
        kind, detail = _KINDS.get(code, "final"), f"{code.name}: {error.details()}"
        return LegFailed(self._key, kind, answer, detail, death=death)


def _is_cancelling() -> bool:
    """Whether this task itself is being cancelled (or timed out), rather than the call it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
