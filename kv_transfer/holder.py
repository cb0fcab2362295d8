"""The front of an instance that holds KV for others: tells readers how far it is, and the core that they live.

    TransferEvent ─▶ on_event ─▶ _Held ─▶ Attach: attached, ready …, complete | failed
    Attach: open, renew …, release; Release ─▶ LeaseCommand ─▶ the core, which owns the lease and its deadline

A reader may attach before the transfer is offered (its request still waits for its first step): the stream then
waits, but not for ever. While there is nothing to tell, the last word is repeated every third of the lease, so that a
reader can tell a slow holder from a frozen one. A stream that breaks without a release leaves the lease to run out.
What has ended is forgotten after a while.

One event loop; free of torch. Errors are `serving.errors.ServiceError`s, which the server's call guard turns into
statuses.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.identity import ModelIdentity
from engine.messages import LeaseCommand, TransferEvent
from kv_transfer.wire import MAX_PROTOCOL_VERSION, MIN_PROTOCOL_VERSION, identity_from_proto
from protos.tandem.v1 import kv_transfer_pb2 as pb
from serving import tracing
from serving.errors import FailedPrecondition, NotFound, Overloaded, invalid_argument
from serving.open_calls import CONTROL, CallPolicy

SERVICE = pb.DESCRIPTOR.services_by_name["KvTransferService"]
POLICIES = {
    # Readers of a draining instance still fetch what it holds, and its drain waits for them.
    "Attach": CallPolicy(admit_while_draining=True, counted=False, cap_deadline=False),
    "Release": CONTROL,
}
"""How the server is to treat the two rpcs."""
_MAX_ID_BYTES = 256


@dataclass(frozen=True, slots=True)
class HolderSettings:
    """Bounds of one holder."""

    lease_s: float = 30.0
    """Lease that a reader gets when it attaches, seconds."""
    max_lease_s: float = 300.0
    """Longest lease that a renewal can ask for, seconds."""
    attach_wait_s: float = 30.0
    """How long a reader waits for a transfer that is not offered yet, seconds."""
    forget_s: float = 60.0
    """How long an ended transfer is remembered, seconds."""
    max_ended: int = 10_000
    """Ended transfers remembered at the most."""
    max_attached: int = 1024
    """Attach streams at the same time at the most."""


@dataclass(slots=True, eq=False)
class _Held:
    """One transfer as its readers see it."""

    offered: bool = False
    num_ready_blocks: int = 0
    digests: list[bytes] = field(default_factory=list)
    connector_metadata: bytes = b""
    num_tokens: int | None = None
    tail_digest: bytes = b""
    ended: Literal["released", "expired", "failed"] | None = None
    reason: str | None = None
    num_waiting: int = 0
    span: tracing.Span = tracing.INVALID_SPAN
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        """Wake every reader. Each takes the event that is there before it looks, and so misses nothing."""
        self.changed.set()
        self.changed = asyncio.Event()


class TransferHolder:
    """The KvTransferService of one instance. `send` passes a command to the engine core and does not block."""

    def __init__(
        self,
        *,
        identity: ModelIdentity,
        instance_epoch: str,
        send: Callable[[LeaseCommand], None],
        settings: HolderSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._instance_epoch = instance_epoch
        self._send = send
        self._settings = settings or HolderSettings()
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._forget_at: OrderedDict[str, float] = OrderedDict()
        self._num_attached = 0

    @property
    def num_held(self) -> int:
        """Transfers that are offered and have not ended."""
        return sum(held.offered and held.ended is None for held in self._held.values())

    @property
    def num_attached(self) -> int:
        """Readers."""
        return self._num_attached

    def on_event(self, event: TransferEvent) -> None:
        """The core's word."""
        self._forget()
        held = self._held.setdefault(event.transfer_id, _Held())
        if held.ended is not None:
            return
        if not held.offered and event.ended is None:
            held.span = tracing.begin("kv.hold", tracing.kept(event.transfer_id))
        held.offered = True
        held.num_ready_blocks = max(held.num_ready_blocks, event.num_ready_blocks)
        held.digests += event.digests
        held.connector_metadata = held.connector_metadata or event.connector_metadata
        if event.num_tokens is not None:
            held.num_tokens, held.tail_digest = event.num_tokens, event.tail_digest
        if event.ended is not None:
            held.ended, held.reason = event.ended, event.reason
            held.digests.clear()
            failure = None if held.ended == "released" else held.reason or held.ended
            tracing.end(held.span, {"tandem.num_blocks": held.num_ready_blocks, "tandem.lease": held.ended}, failure)
            self._remember_end(event.transfer_id)
        held.notify()

    def fail_all(self, reason: str) -> None:
        """The core is dead: tell every reader, those who wait for an offer too."""
        for transfer_id in list(self._held):
            self.on_event(TransferEvent(transfer_id, 0, ended="failed", reason=reason))

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:  # noqa: N802
        """Give KV up; see the proto."""
        del context
        transfer_id = _checked_id(request.transfer_id)
        held = self._held.get(transfer_id)
        was_held = held is not None and held.offered and held.ended is None
        self._send(LeaseCommand(transfer_id, "release"))
        if held is None or not held.offered:
            # The core remembers it too. Here it spares a reader that comes later the wait.
            self.on_event(TransferEvent(transfer_id, 0, ended="released"))
        return pb.ReleaseResponse(was_held=was_held)

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: object
    ) -> AsyncIterator[pb.AttachResponse]:
        """Follow one transfer; see the proto."""
        del context
        if self._num_attached >= self._settings.max_attached:
            raise Overloaded(f"{self._num_attached} readers are attached, the most allowed", 1.0)
        self._num_attached += 1
        listener: asyncio.Task[None] | None = None
        try:
            opened = await self._opened(request_iterator)
            held = await self._offered(opened.transfer_id)
            self._send(LeaseCommand(opened.transfer_id, "attach", self._settings.lease_s))
            yield pb.AttachResponse(
                attached=pb.Attached(
                    protocol_version=min(MAX_PROTOCOL_VERSION, opened.max_protocol_version),
                    lease_s=self._settings.lease_s,
                    connector_metadata=held.connector_metadata,
                )
            )
            listener = asyncio.create_task(self._listen(opened.transfer_id, request_iterator))
            async for response in self._tell(held, listener):
                yield response
            if listener.done():
                await listener  # a reader that broke the protocol hears of it
        finally:
            self._num_attached -= 1
            if listener is not None:
                listener.cancel()
                listener.add_done_callback(_forget_error)

    # Inside

    async def _opened(self, requests: AsyncIterator[pb.AttachRequest]) -> pb.AttachOpen:
        """The first message, checked."""
        try:
            async with asyncio.timeout(self._settings.attach_wait_s):
                first = await anext(requests)
        except (StopAsyncIteration, TimeoutError):
            raise invalid_argument("open", "the stream began without it") from None
        if first.WhichOneof("message") != "open":
            raise invalid_argument("open", "it must be the first message")
        opened = first.open
        transfer_id = _checked_id(opened.transfer_id)
        if opened.instance_epoch != self._instance_epoch:
            raise NotFound(f"transfer {transfer_id!r} belongs to another process: this instance has restarted")
        theirs = (opened.min_protocol_version, opened.max_protocol_version)
        if not max(theirs[0], MIN_PROTOCOL_VERSION) <= min(theirs[1], MAX_PROTOCOL_VERSION):
            raise FailedPrecondition(
                f"protocol_version: this side speaks {MIN_PROTOCOL_VERSION}..{MAX_PROTOCOL_VERSION},"
                f" the reader {theirs[0]}..{theirs[1]}"
            )
        differences = self._identity.mismatches(identity_from_proto(opened.identity))
        if differences:
            # The fingerprint differs whenever another field does; alone it says that the reader computes it otherwise.
            named = [item for item in differences if item[0] != "fingerprint"] or differences
            described = "; ".join(f"{name}: {mine!r} here, {theirs!r} at the reader" for name, mine, theirs in named)
            raise FailedPrecondition(f"KV cannot be exchanged: {described}")
        return opened

    async def _offered(self, transfer_id: str) -> _Held:
        """The transfer, once there is one."""
        self._forget()
        held = self._held.setdefault(transfer_id, _Held())
        held.num_waiting += 1
        try:
            async with asyncio.timeout(self._settings.attach_wait_s):
                while not held.offered:
                    await held.changed.wait()
        except TimeoutError:
            raise NotFound(f"no transfer {transfer_id!r} within {self._settings.attach_wait_s:g} s") from None
        finally:
            held.num_waiting -= 1
            if not held.offered and not held.num_waiting:
                self._held.pop(transfer_id, None)
        if held.ended in ("released", "expired"):
            raise NotFound(f"transfer {transfer_id!r} was {held.ended}")
        return held

    async def _listen(self, transfer_id: str, requests: AsyncIterator[pb.AttachRequest]) -> None:
        """Pass the reader's signs of life on; ends with its release or with the stream."""
        async for request in requests:
            match request.WhichOneof("message"):
                case "renew":
                    lease_s = request.renew.lease_s
                    if not (math.isfinite(lease_s) and lease_s > 0):
                        raise invalid_argument("renew.lease_s", f"{lease_s} is not a duration", "seconds above 0")
                    self._send(LeaseCommand(transfer_id, "renew", min(lease_s, self._settings.max_lease_s)))
                case "release":
                    self._send(LeaseCommand(transfer_id, "release"))
                    return
                case _:
                    raise invalid_argument("message", "only renew and release may follow open")

    async def _tell(self, held: _Held, listener: asyncio.Task[None]) -> AsyncIterator[pb.AttachResponse]:
        """What is new, until there is nothing more to come or the reader has gone."""
        num_ready_told, num_digests_told, complete_told = 0, 0, False
        while not listener.done():
            changed = held.changed
            if held.ended is not None:
                if held.ended != "released":
                    yield pb.AttachResponse(failed=pb.TransferFailed(reason=held.reason or held.ended))
                return
            if held.num_ready_blocks > num_ready_told:
                num_ready_told = held.num_ready_blocks
                digests = held.digests[num_digests_told:]
                num_digests_told += len(digests)
                yield pb.AttachResponse(ready=pb.BlocksReady(num_ready_blocks=num_ready_told, digests=digests))
                continue
            if held.num_tokens is not None and not complete_told:
                complete_told = True
                complete = pb.TransferComplete(num_tokens=held.num_tokens, tail_digest=held.tail_digest)
                yield pb.AttachResponse(complete=complete)
                continue
            if not await _first_of(changed, listener, self._settings.lease_s / 3):
                yield pb.AttachResponse(ready=pb.BlocksReady(num_ready_blocks=num_ready_told))

    def _remember_end(self, transfer_id: str) -> None:
        self._forget_at[transfer_id] = self._clock() + self._settings.forget_s
        while len(self._forget_at) > self._settings.max_ended:
            self._held.pop(self._forget_at.popitem(last=False)[0], None)

    def _forget(self) -> None:
        now = self._clock()
        while self._forget_at and next(iter(self._forget_at.values())) <= now:
            self._held.pop(self._forget_at.popitem(last=False)[0], None)


async def _first_of(changed: asyncio.Event, listener: asyncio.Task[None], timeout_s: float) -> bool:
    """Wait for news or the reader's end; False: neither came in time."""
    waiting = asyncio.ensure_future(changed.wait())
    try:
        done, _ = await asyncio.wait([waiting, listener], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        waiting.cancel()


def _forget_error(listener: asyncio.Task[None]) -> None:
    """Whatever it was, there is nobody left to tell."""
    if not listener.cancelled():
        listener.exception()


def _checked_id(transfer_id: str) -> str:
    if not 0 < len(transfer_id.encode()) <= _MAX_ID_BYTES:
        raise invalid_argument("transfer_id", f"{len(transfer_id)} characters", f"1..{_MAX_ID_BYTES} bytes")
    return transfer_id
