"""The two legs of an attempt: one call to a prefill and one to a decode instance.

Token chunks stay protobuf on their way through, since the router forwards what it has checked; nothing else leaves this
module as such. A decode leg's answers come in the stream that its instance shares between its calls, if that is open:

    the instance ──token stream──▶ receive ─┐
         └────────its own call──▶ _listen ──┴▶ Inbox ──▶ reserved, next_tokens
                                     └── the call's end, once all that came before is read

Without such a stream the call is read directly, and no inbox stands between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from protos.tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from router.choice import Choice
from router.inbox import Inbox
from router.leg import FailureKind, Leg, LegFailed, Mark
from router.pools.instances import InstanceKey
from router.pools.member import Member
from router.pools.token_stream import TokenStream
from serving.errors import Overloaded
from serving.events import RequestEvent

__all__ = ["DecodeLeg", "FailureKind", "LegFailed", "Mark", "PrefillLeg"]

_log = logging.getLogger(__name__)
_LAST_TOKENS_S = 1.0
"""A call's good end was sent after its last answer, but that came in another stream, which may be read a little later.
When nothing has come for so long, nothing will."""


class PrefillLeg(Leg):
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


class DecodeLeg(Leg):
    """Generates; with a transfer it first reserves, then loads KV, then goes on from the seed.

    What is said goes through an iterator: grpcio's own `write` waits for ever on a call that failed before its metadata
    was out. However the call ends, reading says so. A client that reads too slowly is given up with what its inbox
    holds: neither the stream nor the other legs wait for it.
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
        self._inbox = Inbox()
        self._joined: tuple[TokenStream, decode_pb2.TokenStream] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def __aexit__(self, *error: object) -> None:
        self._leave_token_stream()
        if self._listener is not None:
            self._listener.cancel()
        await super().__aexit__(*error)
        self._say(None)  # ends the iterator, which grpcio leaves waiting when the call has ended by itself

    def start(self, request: common_pb2.InstanceRequest, transfer: decode_pb2.TransferSource | None = None) -> None:
        """Opens the call. Without a transfer the instance prefills by itself, and nothing more is said to it."""
        self._begin()
        start = decode_pb2.DecodeStart(request=request, transfer=transfer)
        if not request.sampling.HasField("prompt_logprobs"):  # those fill a message of their own
            self._join_token_stream(start)
        self._say(decode_pb2.DecodeRequest(start=start))
        if transfer is None:
            self._say(None)
        self._call = decode_pb2_grpc.DecodeServiceStub(self._member.channel).Decode(self._said(), **self._options())
        if self._joined is not None:
            self._listener = asyncio.create_task(self._listen())

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

    def receive(self, response: decode_pb2.DecodeResponse) -> None:
        """An answer has come. Without room for it the leg has failed, for its client's slowness."""
        if not self._inbox.put(response):
            error = Overloaded("client too slow: too many tokens wait for it", None)
            self._inbox.clear()
            self._inbox.close(LegFailed(self._key, "final", error, error.message))
            self._leave_token_stream()
            self._call.cancel()

    def cut_off(self, error: grpc.aio.AioRpcError) -> None:
        """The token stream has ended: what came is read, and then the leg has failed."""
        self._inbox.close(self._failed(error))

    def _join_token_stream(self, start: decode_pb2.DecodeStart) -> None:
        streams = self._member.token_streams
        stream = streams.current if streams is not None else None
        if stream is not None:
            number = stream.join(self)
            start.token_stream.CopyFrom(number)
            self._joined = stream, number

    def _leave_token_stream(self) -> None:
        if self._joined is not None:
            stream, number = self._joined
            stream.leave(number)

    async def _answer(self) -> Any:
        return await (super()._answer() if self._joined is None else self._inbox.get())

    async def _listen(self) -> None:
        """The call beside the token stream: its end, and its answers if the instance did not find the stream."""
        try:
            while (response := await super()._answer()) is not None:
                self.receive(response)
            await self._last_words.until_silent(_LAST_TOKENS_S)
            self._inbox.close(self._broken("ended without a finish"))
        except LegFailed as failure:
            self._inbox.close(failure)

    def _say(self, message: decode_pb2.DecodeRequest | None) -> None:
        self._to_say.put_nowait(message)

    async def _said(self) -> AsyncIterator[decode_pb2.DecodeRequest]:
        """What is said, and then the half-close."""
        while (message := await self._to_say.get()) is not None:
            yield message
