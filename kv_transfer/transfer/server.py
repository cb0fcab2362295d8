"""The transfer server of an instance: reports the progress of its transfers to readers, and their leases to the core.

    TransferEvent ─▶ on_event ─▶ _Transfer ─▶ Attach: attached, ready …, complete | failed
    Attach: open, renew …, release; Release ─▶ LeaseCommand ─▶ the core, which owns the lease and its deadline

A reader may attach before the transfer is offered (its request still waits for its first step): the stream then waits
for `attach_wait_s`. Without progress, the last `ready` is repeated every third of the lease, so that a reader can
distinguish a slow producer from a frozen one. A stream that breaks without a release leaves the lease to expire.
Transfers that have ended are forgotten after `forget_s`.

One event loop; free of torch. Errors are `serving.errors.ServiceError`s, which the server's interceptor turns into
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

from engine.core.messages import LeaseCommand, TransferEvent
from engine.identity import ModelIdentity
from kv_transfer.transfer.client import MAX_PROTOCOL_VERSION, MIN_PROTOCOL_VERSION, identity_from_proto
from protos.tandem.v1 import kv_transfer_pb2 as pb
from serving import tracing
from serving.errors import FailedPrecondition, NotFound, Overloaded, invalid_argument
from serving.limits import CONTROL, CallPolicy

SERVICE = pb.DESCRIPTOR.services_by_name["KvTransferService"]
POLICIES = {
    # A draining instance still serves its transfers, and its drain waits for their readers.
    "Attach": CallPolicy(admit_while_draining=True, counted=False, cap_deadline=False),
    "Release": CONTROL,
}
"""Of the two rpcs."""
_MAX_ID_BYTES = 256


@dataclass(frozen=True, slots=True)
class TransferServerSettings:
    lease_s: float = 30.0
    """Lease that a reader gets when it attaches, and the longest that a renewal can ask for, seconds."""
    attach_wait_s: float = 30.0
    """How long a reader can wait for a transfer that is not offered yet, seconds."""
    forget_s: float = 60.0
    """How long an ended transfer is remembered, seconds."""
    max_ended: int = 10_000
    """Maximum number of ended transfers remembered."""
    max_attached: int = 1024
    """Maximum number of concurrent attach streams."""


@dataclass(slots=True, eq=False)
class _Transfer:
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
        """Wake every reader. A reader takes the event before it reads the state, and so misses nothing."""
        self.changed.set()
        self.changed = asyncio.Event()


class TransferServer:
    """The KvTransferService of one instance. `send_command` passes a command to the engine core and does not block."""

    def __init__(
        self,
        *,
        identity: ModelIdentity,
        instance_epoch: str,
        send_command: Callable[[LeaseCommand], None],
        settings: TransferServerSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._instance_epoch = instance_epoch
        self._send_command = send_command
        self._settings = settings or TransferServerSettings()
        self._clock = clock
        self._transfers: dict[str, _Transfer] = {}
        self._forget_at: OrderedDict[str, float] = OrderedDict()
        self.num_attached = 0
        """Attach streams."""

    @property
    def num_transfers(self) -> int:
        """Transfers that are offered and have not ended."""
        return sum(transfer.offered and transfer.ended is None for transfer in self._transfers.values())

    def on_event(self, event: TransferEvent) -> None:
        """A transfer of the core has changed."""
        self._forget()
        transfer = self._transfers.setdefault(event.transfer_id, _Transfer())
        if transfer.ended is not None:
            return
        if not transfer.offered and event.ended is None:
            transfer.span = tracing.start_span("kv.hold", tracing.recall_context(event.transfer_id))
        transfer.offered = True
        transfer.num_ready_blocks = max(transfer.num_ready_blocks, event.num_ready_blocks)
        transfer.digests += event.digests
        transfer.connector_metadata = transfer.connector_metadata or event.connector_metadata
        if event.num_tokens is not None:
            transfer.num_tokens, transfer.tail_digest = event.num_tokens, event.tail_digest
        if event.ended is not None:
            transfer.ended, transfer.reason = event.ended, event.reason
            transfer.digests.clear()
            failure = None if transfer.ended == "released" else transfer.reason or transfer.ended
            tracing.end_span(
                transfer.span, {"tandem.num_blocks": transfer.num_ready_blocks, "tandem.lease": transfer.ended}, failure
            )
            self._forget_at[event.transfer_id] = self._clock() + self._settings.forget_s
            self._forget()
        transfer.notify()

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:  # noqa: N802
        """End a transfer; see the proto."""
        del context
        transfer_id = _checked_id(request.transfer_id)
        transfer = self._transfers.get(transfer_id)
        was_held = transfer is not None and transfer.offered and transfer.ended is None
        self._send_command(LeaseCommand(transfer_id, "release"))
        if transfer is None or not transfer.offered:
            # The core remembers it too. Here it ends the wait of a reader that attaches later.
            self.on_event(TransferEvent(transfer_id, 0, ended="released"))
        return pb.ReleaseResponse(was_held=was_held)

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: object
    ) -> AsyncIterator[pb.AttachResponse]:
        """Report the progress of one transfer; see the proto."""
        del context
        if self.num_attached >= self._settings.max_attached:
            raise Overloaded(f"{self.num_attached} readers are attached, the maximum", 1.0)
        self.num_attached += 1
        listener: asyncio.Task[None] | None = None
        try:
            opened = await self._read_open(request_iterator)
            transfer = await self._wait_for_offer(opened.transfer_id)
            self._send_command(LeaseCommand(opened.transfer_id, "attach", self._settings.lease_s))
            yield pb.AttachResponse(
                attached=pb.Attached(
                    protocol_version=min(MAX_PROTOCOL_VERSION, opened.max_protocol_version),
                    lease_s=self._settings.lease_s,
                    connector_metadata=transfer.connector_metadata,
                )
            )
            listener = asyncio.create_task(self._read_messages(opened.transfer_id, request_iterator))
            async for response in self._progress(transfer, listener):
                yield response
            if listener.done():
                await listener  # raises the error of a reader that broke the protocol
        finally:
            self.num_attached -= 1
            if listener is not None:
                listener.cancel()
                listener.add_done_callback(_forget_error)

    # Inside

    async def _read_open(self, requests: AsyncIterator[pb.AttachRequest]) -> pb.AttachOpen:
        try:
            async with asyncio.timeout(self._settings.attach_wait_s):
                first = await anext(requests)
        except (StopAsyncIteration, TimeoutError):
            raise invalid_argument("open", "the stream began without this message") from None
        if first.WhichOneof("message") != "open":
            raise invalid_argument("open", "it must be the first message")
        opened = first.open
        transfer_id = _checked_id(opened.transfer_id)
        if opened.instance_epoch != self._instance_epoch:
            raise NotFound(f"transfer {transfer_id!r} belongs to another process: this instance has restarted")
        theirs = (opened.min_protocol_version, opened.max_protocol_version)
        if not max(theirs[0], MIN_PROTOCOL_VERSION) <= min(theirs[1], MAX_PROTOCOL_VERSION):
            raise FailedPrecondition(
                f"protocol_version: {MIN_PROTOCOL_VERSION}..{MAX_PROTOCOL_VERSION} is supported here,"
                f" {theirs[0]}..{theirs[1]} by the reader"
            )
        differences = self._identity.mismatches(identity_from_proto(opened.identity))
        if differences:
            # The fingerprint differs whenever another field does; alone, the reader computes it differently.
            named = [item for item in differences if item[0] != "fingerprint"] or differences
            described = "; ".join(f"{name}: {mine!r} here, {theirs!r} at the reader" for name, mine, theirs in named)
            raise FailedPrecondition(f"KV cannot be exchanged: {described}")
        return opened

    async def _wait_for_offer(self, transfer_id: str) -> _Transfer:
        self._forget()
        transfer = self._transfers.setdefault(transfer_id, _Transfer())
        transfer.num_waiting += 1
        try:
            async with asyncio.timeout(self._settings.attach_wait_s):
                while not transfer.offered:
                    await transfer.changed.wait()
        except TimeoutError:
            raise NotFound(f"no transfer {transfer_id!r} within {self._settings.attach_wait_s:g} s") from None
        finally:
            transfer.num_waiting -= 1
            if not transfer.offered and not transfer.num_waiting:
                self._transfers.pop(transfer_id, None)
        if transfer.ended in ("released", "expired"):
            raise NotFound(f"transfer {transfer_id!r} was {transfer.ended}")
        return transfer

    async def _read_messages(self, transfer_id: str, requests: AsyncIterator[pb.AttachRequest]) -> None:
        """Pass renewals and the release to the core; ends with the release or with the stream."""
        async for request in requests:
            match request.WhichOneof("message"):
                case "renew":
                    lease_s = request.renew.lease_s
                    if not (math.isfinite(lease_s) and lease_s > 0):
                        raise invalid_argument("renew.lease_s", f"{lease_s} is not a duration", "seconds above 0")
                    self._send_command(LeaseCommand(transfer_id, "renew", min(lease_s, self._settings.lease_s)))
                case "release":
                    self._send_command(LeaseCommand(transfer_id, "release"))
                    return
                case _:
                    raise invalid_argument("message", "only renew and release may follow open")

    async def _progress(self, transfer: _Transfer, listener: asyncio.Task[None]) -> AsyncIterator[pb.AttachResponse]:
        """Messages for the reader, until the transfer ends or the reader detaches."""
        num_ready_sent, num_digests_sent, is_complete_sent = 0, 0, False
        while not listener.done():
            changed = transfer.changed
            if transfer.ended is not None:
                if transfer.ended != "released":
                    yield pb.AttachResponse(failed=pb.TransferFailed(reason=transfer.reason or transfer.ended))
                return
            if transfer.num_ready_blocks > num_ready_sent:
                num_ready_sent = transfer.num_ready_blocks
                digests = transfer.digests[num_digests_sent:]
                num_digests_sent += len(digests)
                yield pb.AttachResponse(ready=pb.BlocksReady(num_ready_blocks=num_ready_sent, digests=digests))
                continue
            if transfer.num_tokens is not None and not is_complete_sent:
                is_complete_sent = True
                complete = pb.TransferComplete(num_tokens=transfer.num_tokens, tail_digest=transfer.tail_digest)
                yield pb.AttachResponse(complete=complete)
                continue
            if not await _first_of(changed, listener, self._settings.lease_s / 3):
                yield pb.AttachResponse(ready=pb.BlocksReady(num_ready_blocks=num_ready_sent))

    def _forget(self) -> None:
        """Transfers that ended first, while there are too many or their time is over."""
        now = self._clock()
        while len(self._forget_at) > self._settings.max_ended or next(iter(self._forget_at.values()), math.inf) <= now:
            self._transfers.pop(self._forget_at.popitem(last=False)[0], None)


async def _first_of(changed: asyncio.Event, listener: asyncio.Task[None], timeout_s: float) -> bool:
    """Wait for a change or the reader's end; False: neither came in time."""
    waiting = asyncio.ensure_future(changed.wait())
    try:
        done, _ = await asyncio.wait([waiting, listener], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        waiting.cancel()


def _forget_error(listener: asyncio.Task[None]) -> None:
    """The stream is closed, so the error cannot be sent."""
    if not listener.cancelled():
        listener.exception()


def _checked_id(transfer_id: str) -> str:
    if not 0 < len(transfer_id.encode()) <= _MAX_ID_BYTES:
        raise invalid_argument("transfer_id", f"{len(transfer_id)} characters", f"1..{_MAX_ID_BYTES} bytes")
    return transfer_id
