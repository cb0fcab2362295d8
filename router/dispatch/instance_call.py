"""The calls of an attempt: one to a prefill instance, one to a decode instance, and how they fail.

opened ──first message──▶ acknowledged ──▶ ended | failed | lost (its instance is gone) | cancelled
                                └─ draining: its instance has ended, received messages are read ──▶ ended | lost

A call is an async context manager; leaving it cancels a call that has not ended, which frees everything at the
instance. Token chunks stay protobuf on their way through, since the router forwards what it has checked; no other wire
type leaves this module. A decode call's messages come in the stream that its instance shares between its calls, if that
is open:

     the instance ──token stream──▶ receive ────┐
          └────────its own call──▶ _read_call ──┴▶ ReceiveBuffer ──▶ reserved, next_tokens
                                      └── the call's end, once everything that came before is read

Without such a stream all messages come through `_read_call`. A prefill call has no buffer: it is read directly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import grpc.aio

from protos.tandem.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from router.admission.slots import Slot
from router.dispatch.trace import AttemptTrace
from router.pools.instance import UpstreamInstance
from router.pools.instance_info import InstanceKey, Role
from router.pools.token_stream import ReceiveBuffer, TokenStream
from router.request.choice_state import Choice, StreamViolation
from router.resilience.retry import CallFailed, Death, FailureKind
from serving import tracing
from serving.errors import Crashed, DeadlineExceeded, InternalError, Overloaded, Unavailable, from_rpc_error
from serving.interceptor import REQUEST_ID_KEY
from serving.logging import Repeats, RequestEvent, without_values
from serving.waits import is_cancelling

_log = logging.getLogger(__name__)
_repeats = Repeats()

_CHECK_INTERVAL_S = 0.05
_NUM_SILENT_CHECKS = 2
"""Two: after a moment in which this process did not run, the first check may come before what has arrived meanwhile."""
_LOOK_AGAIN_S = 0.25
"""After a first look at which a reservation was late: a halt of this process looks the same."""
_REJECTIONS = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Of the router by one instance: its credentials, an address that it names, an id that it has used there before, an
adapter that the process before had at this address, a method that an instance of another version does not have."""
_KINDS: dict[grpc.StatusCode, FailureKind] = {
    **dict.fromkeys(_REJECTIONS, "broken"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: "refused",
    grpc.StatusCode.UNAVAILABLE: "broken",
    grpc.StatusCode.CANCELLED: "broken",
    grpc.StatusCode.ABORTED: "late",
    grpc.StatusCode.FAILED_PRECONDITION: "broken",
    **dict.fromkeys((grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS), "internal"),
}
_GRPCIO_INTERNAL = "Internal error from Core"
"""grpcio's text when one of our writes races with the end of the call, whatever that end was."""
_LAST_TOKENS_S = 1.0
"""A call's good end was sent after its last message, which came in another stream and may be read a little later. When
nothing has come for so long, nothing will."""
_RELEASE_TIMEOUT_S = 5.0


class ReceiveDrain:
    """Ends a call whose instance has ended, but not before every received message is read.

        ended ─▶ draining: messages are read, however late ──no message in two checks of a waiting reader──▶ silent

    A router that is behind still has the end of a stream in its own buffers when the instance's process is gone. A
    connection that breaks ends its calls by itself; only a call that nothing has ended is ended here. The reader counts
    `num_reads` up as it begins to wait, and sets `is_reading` meanwhile.
    """

    def __init__(self, on_silence: Callable[[str], None]) -> None:
        self.num_reads = 0
        self.is_reading = False
        self._on_silence = on_silence
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, reason: str) -> None:
        """The instance has ended; when nothing more comes, `on_silence` is called with the `reason`. Idempotent."""
        if self._timer is None:
            self._check_later(reason, 0)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def until_silent(self, length_s: float) -> None:
        """Returns once the reader has begun no new read for `length_s`."""
        num_reads = -1
        while num_reads != self.num_reads:
            num_reads = self.num_reads
            await asyncio.sleep(length_s)

    def _check_later(self, reason: str, num_silent: int) -> None:
        num_reads = self.num_reads

        def check() -> None:
            is_silent = self.is_reading and self.num_reads == num_reads
            if is_silent and num_silent + 1 == _NUM_SILENT_CHECKS:
                self._on_silence(reason)
            else:
                self._check_later(reason, num_silent + 1 if is_silent else 0)

        self._timer = asyncio.get_running_loop().call_later(_CHECK_INTERVAL_S, check)


@dataclass(eq=False)
class InstanceCall:
    """What both calls share: reading, the loss of the instance, and the end."""

    instance: UpstreamInstance
    key: InstanceKey  # the process that was picked
    choice: Choice
    trace: AttemptTrace
    move_target: Callable[[], UpstreamInstance | None] = lambda: None  # an instance that could take the request over
    slot: Slot = field(default_factory=Slot)  # the request's
    num_to_prefill: int = 0  # tokens that the instance has to compute before it can go on

    def __post_init__(self) -> None:
        self.partner: InstanceCall | None = None  # of a split request: moves when this one does
        self._has_moved = False
        self._target: UpstreamInstance | None = None  # where it counts while its request moves
        self._lost: str | None = None
        self._drain = ReceiveDrain(self.instance_lost)
        self._reached = False
        self._acknowledged = False
        self._call: Any = None  # the two kinds of call share no typed base with read()

    async def __aenter__(self) -> Self:
        self.instance.calls.add(self, self.choice.num_tokens, self.num_to_prefill)
        self.slot.add(self)
        self._check_process()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.instance.calls.remove(self)
        if self._target is not None:
            self._target.calls.remove(self)
        self.slot.remove(self)
        self._drain.stop()
        if self._call is not None:
            self._call.cancel()  # without effect on a call that has ended

    @property
    def role(self) -> Role:
        """The pool that the instance belongs to."""
        return self.instance.expected.role

    def instance_lost(self, reason: str) -> None:
        """The instance is gone: fails the call now."""
        self._lost = reason
        if self._call is not None:
            self._call.cancel()

    def instance_ended(self, reason: str) -> None:
        """The instance has ended: received messages are read, then the instance counts as lost."""
        if self._call is None:
            self.instance_lost(reason)
        elif self._lost is None:
            self._drain.begin(reason)

    def instance_draining(self) -> None:
        """The instance is about to end: leaves it if another one can take over, else stays until the end."""
        if self._lost is None and (target := self.move_target()) is not None:
            self._target = target
            target.calls.expect(self, self.choice.num_tokens)
            self._move("it is about to end")
            if self.partner is not None and self.partner._lost is None:
                # Its first token would pin the request to the weights that this call leaves.
                self.partner._move("the other instance is about to end")

    def slot_taken(self) -> None:
        """Another tenant's request gets the slot, and its place at the instance counts as free from now on."""
        if self._lost is None:
            self.instance.calls.remove(self)
            self._move("its slot goes to another tenant")

    def _move(self, reason: str) -> None:
        self._has_moved = True
        self.instance_lost(reason)

    def _check_process(self) -> None:
        if self.instance.key != self.key:
            self._lost = self._lost or "another process has taken its place"

    def _check_not_lost(self) -> None:
        if self._lost is not None:
            raise self._broken(self._lost)

    def _begin(self) -> None:
        self._check_process()  # again: a suspect may have waited since the call was entered
        self._check_not_lost()
        self._reached = self.instance.channel.get_state() is grpc.ChannelConnectivity.READY
        self.instance.calls.sent(self)

    def _options(self) -> dict[str, Any]:
        remaining_s = self.choice.request.remaining_s
        return {
            "timeout": None if remaining_s is None else max(remaining_s, 0.001),
            "metadata": ((REQUEST_ID_KEY, self.choice.request.label), *tracing.outgoing_metadata()),
        }

    async def _read(self) -> Any:
        """The next message, None at a good end. Raises CallFailed."""
        self._drain.num_reads += 1
        self._drain.is_reading = True
        try:
            message = await self._next_message()
        finally:
            self._drain.is_reading = False
        if self._has_moved and self._lost is not None:
            # Where it goes was decided by what had been read: a first token now would pin it to these weights.
            raise self._broken(self._lost)
        if message is not None and not self._acknowledged:
            self._reached = self._acknowledged = True
            self.instance.calls.acknowledge(self)
        return message

    async def _next_message(self) -> Any:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        except asyncio.CancelledError:
            if self._lost is None or is_cancelling():
                raise
            raise self._broken(self._lost) from None
        return None if message is grpc.aio.EOF else message

    def _check_epoch(self, epoch: str) -> None:
        if epoch not in ("", self.key.epoch):
            raise self._broken(f"another process answers: epoch {epoch}")

    def _accepted(self, chunk: common_pb2.TokenChunk) -> bool:
        try:
            accepted = self.choice.accept(chunk)
        except StreamViolation as violation:
            raise self._broken(f"violates the stream: {violation}") from violation
        if not accepted:
            _log.warning("dropped a stale chunk of %s", self.key.address)
        return accepted

    @property
    def _vanished(self) -> Death | None:
        return "vanished" if self._reached else None

    def _broken(self, detail: str) -> CallFailed:
        kind: FailureKind = "moved" if self._has_moved else "broken"
        death = self._vanished if self._lost is not None else None
        return CallFailed(self.key, self.role, kind, Unavailable("the instance is unavailable"), detail, death=death)

    def _failed(self, error: grpc.aio.AioRpcError) -> CallFailed:
        code = error.code()
        if code is grpc.StatusCode.INTERNAL and error.details() == _GRPCIO_INTERNAL:
            remaining_s = self.choice.request.remaining_s
            late = remaining_s is not None and remaining_s <= 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.UNAVAILABLE
        answer = from_rpc_error(error)
        death: Death | None = None
        if isinstance(answer, Crashed):
            death = "crashed"
        elif not error.trailing_metadata() and code not in _REJECTIONS:  # not a status of the instance's own
            death = self._vanished
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            answer = DeadlineExceeded("the request's deadline has passed")
        elif _KINDS.get(code) in ("broken", "late"):
            answer = Unavailable("the instance is unavailable")
        elif code not in _KINDS and isinstance(answer, InternalError):
            answer = InternalError(f"unexpected answer {code.name}")
        kind, detail = _KINDS.get(code, "final"), f"{code.name}: {error.details()}"
        return CallFailed(self.key, self.role, kind, answer, detail, death=death)


class PrefillCall(InstanceCall):
    """Computes the prompt and the first token; the instance holds the KV under the transfer's id."""

    def start(self, request: common_pb2.InstanceRequest, hand_over: prefill_pb2.HandOver) -> None:
        self._begin()
        stub = prefill_pb2_grpc.PrefillServiceStub(self.instance.channel)
        self._call = stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_over=hand_over), **self._options())

    async def next_tokens(self) -> common_pb2.TokenChunk:
        """The next chunk, checked and counted as emitted."""
        while (message := await self._read()) is not None:
            if message.WhichOneof("event") == "accepted":
                self._check_epoch(message.accepted.instance_epoch)
                self.trace.event(RequestEvent.PREFILL_STARTED)
            elif self._accepted(message.tokens):
                chunk: common_pb2.TokenChunk = message.tokens
                return chunk
        raise self._broken("ended without a finish")

    def complete(self) -> None:
        """The instance has done its part: the call no longer counts as load, and its end has no effect."""
        self.instance.calls.complete(self)


class DecodeCall(InstanceCall):
    """Generates; with a transfer it first reserves blocks, then loads KV, then goes on from the seed.

    A prefill instance takes such calls, too, without a transfer: requests that it serves alone.

    Requests go through an iterator: grpcio's own `write` never returns on a call that failed before its metadata was
    sent. However the call ends, reading raises it. When a client reads too slowly, its request fails with everything in
    its buffer: neither the stream nor the other calls wait for it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._to_send: asyncio.Queue[decode_pb2.DecodeRequest | None] = asyncio.Queue()
        self._sender: asyncio.Task[None] | None = None  # grpcio's, which consumes `_requests`
        self._buffer = ReceiveBuffer()
        self._joined: tuple[TokenStream, decode_pb2.TokenStream] | None = None
        self._call_reader: asyncio.Task[None] | None = None

    async def __aexit__(self, *error: object) -> None:
        self._leave_token_stream()
        if self._call_reader is not None:
            self._call_reader.cancel()
        await super().__aexit__(*error)
        if self._sender is not None:
            self._sender.cancel()  # grpcio leaves it waiting when the call ends by itself

    def start(self, request: common_pb2.InstanceRequest, transfer: decode_pb2.TransferSource | None = None) -> None:
        self._begin()
        start = decode_pb2.DecodeStart(request=request, transfer=transfer)
        if not request.sampling.HasField("prompt_logprobs"):  # those fill a message of their own
            self._join_token_stream(start)
        self._to_send.put_nowait(decode_pb2.DecodeRequest(start=start))
        if transfer is None:
            self._to_send.put_nowait(None)
        stub = decode_pb2_grpc.DecodeServiceStub(self.instance.channel)
        self._call = stub.Decode(self._requests(), **self._options())
        self._call_reader = asyncio.create_task(self._read_call())

    async def reserved(self, timeout_s: float, max_wait_s: float) -> None:
        """Waits for the reservation, at most `max_wait_s`. Raises CallFailed when it is refused or does not come.

        A full instance lets requests wait for room, and reports them: the wait is no failure of the instance. One that
        has reported none for `timeout_s` and has not answered has failed.
        """
        started_s, was_late = time.monotonic(), False
        reading = asyncio.create_task(self._read())  # one for all waits: grpcio ends a call whose read is cancelled
        try:
            while not reading.done():
                silent_s = max(started_s, self.instance.last_full_s) + timeout_s
                remaining_s = min(silent_s, started_s + max_wait_s) - time.monotonic()
                is_late = remaining_s <= 0
                if is_late and was_late:
                    raise self._not_reserved(timeout_s, max_wait_s)
                was_late = is_late
                await asyncio.wait({reading}, timeout=_LOOK_AGAIN_S if is_late else remaining_s)
        finally:
            reading.cancel()
        message = reading.result()
        if message is None or message.WhichOneof("event") != "reserved":
            raise self._broken("did not answer start with a reservation")
        self._check_epoch(message.reserved.instance_epoch)
        self.trace.event(RequestEvent.KV_RESERVED)

    def _not_reserved(self, timeout_s: float, max_wait_s: float) -> CallFailed:
        if time.monotonic() - self.instance.last_full_s >= timeout_s:
            return self._broken(f"no reservation within {timeout_s:g} s")
        error = Overloaded("the instance is full", None)
        return CallFailed(self.key, self.role, "refused", error, f"no room within {max_wait_s:g} s")

    def seed(self, token_ids: list[int]) -> None:
        """Sends the ids that prefill emitted, as the last request. Raises CallFailed when the instance is lost."""
        self._check_not_lost()
        self._to_send.put_nowait(decode_pb2.DecodeRequest(seed=decode_pb2.DecodeSeed(token_ids=token_ids)))
        self._to_send.put_nowait(None)

    async def next_tokens(self) -> common_pb2.TokenChunk:
        while (message := await self._read()) is not None:
            event = message.WhichOneof("event")
            if event == "tokens":
                chunk: common_pb2.TokenChunk = message.tokens
                if self._accepted(chunk):
                    return chunk
            elif event == "loaded":
                self.trace.event(RequestEvent.KV_LOADED)
                loaded = message.loaded
                if loaded.num_recomputed_blocks and not _repeats.is_repeat((self.key, without_values(loaded.reason))):
                    _log.warning("%d blocks recomputed: %s", loaded.num_recomputed_blocks, loaded.reason)
        raise self._broken("ended without a finish")

    def receive(self, response: decode_pb2.DecodeResponse, *, hold: bool = False) -> bool:
        """A message has come in the token stream. If the buffer is full, the call fails: the client is too slow."""
        is_awaited = self._buffer.is_awaited
        if not self._buffer.append(response, hold=hold):
            error = Overloaded("client too slow: too many tokens wait for it", None)
            self._buffer.clear()
            self._buffer.close(CallFailed(self.key, self.role, "final", error, error.message))
            self._leave_token_stream()
            self._call.cancel()
        return is_awaited

    def wake(self) -> bool:
        return self._buffer.wake()

    def cut_off(self, error: grpc.aio.AioRpcError) -> None:
        """The token stream has ended: received messages are read, then the call has failed."""
        self._buffer.close(self._failed(error))

    def _join_token_stream(self, start: decode_pb2.DecodeStart) -> None:
        streams = self.instance.token_streams
        stream = streams.current if streams is not None else None
        if stream is not None:
            number = stream.join(self)
            start.token_stream.CopyFrom(number)
            self._joined = stream, number

    def _leave_token_stream(self) -> None:
        if self._joined is not None:
            stream, number = self._joined
            stream.leave(number)

    async def _next_message(self) -> Any:
        return await self._buffer.read()

    async def _read_call(self) -> None:
        """The call beside the token stream: its end, and its messages if it has not joined the stream, or the instance
        did not find that. However slow the client is, they are read, or the instance would give the call up."""
        try:
            while (response := await super()._next_message()) is not None:
                self.receive(response)
            await self._drain.until_silent(_LAST_TOKENS_S)
            self._buffer.close(self._broken("ended without a finish"))
        except CallFailed as failure:
            self._buffer.close(failure)

    async def _requests(self) -> AsyncIterator[decode_pb2.DecodeRequest]:
        self._sender = asyncio.current_task()
        while (message := await self._to_send.get()) is not None:
            yield message


class TransferReleases:
    """Releases transfers that no decode instance may know of: their KV would be held until the lease runs out.

    Releases outlive their requests; each is bounded in time. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, channel: grpc.aio.Channel, transfer_id: str) -> None:
        """Releases `transfer_id` at the instance behind `channel`. Returns at once; release is idempotent."""
        task = asyncio.create_task(self._release(channel, transfer_id), name=f"release {transfer_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self, timeout_s: float) -> None:
        """Returns when all releases have been answered or have timed out, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            _log.warning("%d releases were not answered", len(self._tasks))

    async def _release(self, channel: grpc.aio.Channel, transfer_id: str) -> None:
        request = kv_transfer_pb2.ReleaseRequest(transfer_id=transfer_id)
        try:
            await kv_transfer_pb2_grpc.KvTransferServiceStub(channel).Release(request, timeout=_RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _log.info("release of %s not answered (%s): its lease will run out", transfer_id, error.code().name)
        except asyncio.CancelledError:
            if is_cancelling():
                raise  # else the channel was closed under the call
