"""The two legs of an attempt: one call to a prefill and one to a decode instance, and how each can fail.

opened ──first answer──▶ acknowledged ──▶ ended | failed | lost (its instance is gone) | cancelled (nobody wants it)
                                └─ fading: its instance has ended, what had arrived is read ──▶ ended | failed | lost

A leg is an async context manager; leaving it cancels a call that has not ended, which frees everything at the
instance. Token chunks stay protobuf on their way through, since the router forwards what it has checked; nothing else
leaves this module as such.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Self

import grpc
import grpc.aio

from protos.tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
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


class _Leg:
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
        """The next message, None at a good end. Raises LegFailed."""
        last_words = self._last_words
        last_words.num_reads += 1
        last_words.is_reading = True
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        except asyncio.CancelledError:
            if self._lost is None or _is_cancelling():
                raise
            raise self._broken(self._lost) from None
        finally:
            last_words.is_reading = False
        if message is grpc.aio.EOF:
            return None
        if not self._acknowledged:
            self._reached = self._acknowledged = True
            self._member.acknowledged(self)
        return message

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


class PrefillLeg(_Leg):
    """Computes the prompt and the first token; holds the KV under `transfer_id`."""

    @property
    def channel(self) -> grpc.aio.Channel:
        """The way to its instance, for a release after the leg."""
        return self._member.channel

    def start(self, request: common_pb2.InstanceRequest, transfer_id: str, lease_s: float) -> None:
        """Opens the call."""
        self._begin()
        hand_over = prefill_pb2.HandOver(transfer_id=transfer_id, lease_s=lease_s)
        stub = prefill_pb2_grpc.PrefillServiceStub(self._member.channel)
        self._call = stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_over=hand_over), **self._options())

    async def next_tokens(self) -> common_pb2.TokenChunk:
        """The next chunk, checked and counted as emitted."""
        while (message := await self._read()) is not None:
            if message.WhichOneof("event") == "accepted":
                if message.accepted.instance_epoch not in ("", self._key.epoch):
                    raise self._broken(f"another process answers: epoch {message.accepted.instance_epoch}")
                self._mark(RequestEvent.PREFILL_STARTED)
            elif self._accepted(message.tokens):
                chunk: common_pb2.TokenChunk = message.tokens
                return chunk
        raise self._broken("ended without a finish")

    def handed_over(self) -> None:
        """The instance has done its part: it counts as load no more, and how its call ends is of no interest."""
        self._member.relieve(self)


class DecodeLeg(_Leg):
    """Generates; with a transfer it first reserves, then loads KV, then goes on from the seed.

    What is said goes through an iterator: grpcio's own `write` waits for ever on a call that failed before its metadata
    was out. However the call ends, reading says so.
    """

    def __init__(
        self,
        member: Member,
        key: InstanceKey,
        choice: Choice,
        mark: Mark,
        can_move: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(member, key, choice, mark, can_move)
        self._to_say: asyncio.Queue[decode_pb2.DecodeRequest | None] = asyncio.Queue()

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self._say(None)  # ends the iterator, which grpcio leaves waiting when the call has ended by itself

    def start(self, request: common_pb2.InstanceRequest, transfer: decode_pb2.TransferSource | None = None) -> None:
        """Opens the call. Without a transfer the instance prefills by itself, and nothing more is said to it."""
        self._begin()
        self._say(decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(request=request, transfer=transfer)))
        if transfer is None:
            self._say(None)
        self._call = decode_pb2_grpc.DecodeServiceStub(self._member.channel).Decode(self._said(), **self._options())

    async def reserved(self, timeout_s: float) -> None:
        """Waits for the reservation. Raises LegFailed when it is refused or does not come in time."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._read()
        except TimeoutError:
            raise self._broken(f"no reservation within {timeout_s:g} s") from None
        if message is None or message.WhichOneof("event") != "reserved":
            raise self._broken("did not answer start with a reservation")
        if message.reserved.instance_epoch not in ("", self._key.epoch):
            raise self._broken(f"another process answers: epoch {message.reserved.instance_epoch}")
        self._mark(RequestEvent.KV_RESERVED)

    def seed(self, token_ids: list[int]) -> None:
        """Tells the ids that prefill emitted; the last that is said. Raises LegFailed when the instance is lost."""
        self._check_not_lost()
        self._say(decode_pb2.DecodeRequest(seed=decode_pb2.DecodeSeed(token_ids=token_ids)))
        self._say(None)

    async def next_tokens(self) -> common_pb2.TokenChunk:
        """The next chunk, checked and counted as emitted."""
        while (message := await self._read()) is not None:
            event = message.WhichOneof("event")
            if event == "tokens":
                chunk: common_pb2.TokenChunk = message.tokens
                if self._accepted(chunk):
                    return chunk
            elif event == "loaded":
                self._mark(RequestEvent.KV_LOADED)
                if message.loaded.num_recomputed_blocks:
                    _log.warning(
                        "%d blocks recomputed: %s", message.loaded.num_recomputed_blocks, message.loaded.reason
                    )
        raise self._broken("ended without a finish")

    def _say(self, message: decode_pb2.DecodeRequest | None) -> None:
        self._to_say.put_nowait(message)

    async def _said(self) -> AsyncIterator[decode_pb2.DecodeRequest]:
        """What is said, and then the half-close."""
        while (message := await self._to_say.get()) is not None:
            yield message


def _is_cancelling() -> bool:
    """Whether this task itself is being cancelled (or timed out), rather than the call it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
