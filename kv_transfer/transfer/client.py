"""The transfer client: attaches to one transfer at the instance that produces it, for one request of this core.

    open ─▶ attached ─▶ ready … ─▶ complete ─▶ (the core has loaded) ─▶ release
      └─ rejected, broken, silent for a lease, failed ─▶ KVProgress(failed) ─▶ release

Every message becomes a KVProgress for the core, which starts to read; the core's LoadedEvent sets `loaded`. However
this ends, the producer is sent one release: on the stream while it is open, else by a call of its own that takes a
second at most. If it receives neither, its lease expires. One event loop; free of torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from engine.core.messages import KVProgress
from engine.identity import ModelIdentity
from protos.tandem.v1 import common_pb2
from protos.tandem.v1 import kv_transfer_pb2 as pb
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from serving.errors import without_request_id

MIN_PROTOCOL_VERSION = 1
MAX_PROTOCOL_VERSION = 1


def identity_to_proto(identity: ModelIdentity) -> common_pb2.Identity:
    return common_pb2.Identity(**{name: getattr(identity, name) for name in identity.__struct_fields__})


def identity_from_proto(identity: common_pb2.Identity) -> ModelIdentity:
    """As the peer sent it, its fingerprint included."""
    return ModelIdentity(**{name: getattr(identity, name) for name in ModelIdentity.__struct_fields__})


CONNECT_S = 0.7
"""How long to retry an unreachable producer: it may have just restarted. Seconds."""
_SETTLE_S = 1.0
"""How long reads in flight may take after a failure, before the release ends them. Seconds."""
_RECONNECT_PAUSE_S = 0.1
_RELEASE_S = 1.0
"""Deadline of a release; without one the lease expires. Seconds."""

_Call = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]
_Reading = asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """One transfer and the request here that loads it."""

    request_id: str
    transfer_id: str
    instance_epoch: str
    num_local_blocks: int
    lease_s: float = 30.0
    """Lease requested in renewals, seconds."""
    attach_timeout_s: float = 30.0
    """How long the producer may take until it offers the transfer, seconds."""


async def attach_to_transfer(
    stub: KvTransferServiceStub,
    request: TransferRequest,
    *,
    identity: ModelIdentity,
    on_progress: Callable[[KVProgress], None],
    loaded: asyncio.Future[bool],
) -> None:
    """Report progress until `loaded` is set (to whether all pages were loaded), then release. Raises nothing but
    CancelledError; cancelling gives the transfer up. A failure is the last progress reported.
    """
    client = _TransferClient(stub, request, on_progress, loaded, request.lease_s)
    try:
        failure = await client.wait_until_loaded(identity)
        if failure is not None:
            on_progress(KVProgress(request.request_id, client.num_ready_blocks, failed=failure))
            await asyncio.wait([loaded], timeout=_SETTLE_S)  # reads in flight are of use while the lease lives
    finally:
        if not client.released:
            releasing = asyncio.ensure_future(_release(stub, request.transfer_id))
            try:
                await asyncio.shield(releasing)
            except asyncio.CancelledError:
                await asyncio.wait([releasing])  # it has a deadline of its own
                raise


@dataclass(slots=True)
class _TransferClient:
    """One transfer's attach stream."""

    _stub: KvTransferServiceStub
    _request: TransferRequest
    _on_progress: Callable[[KVProgress], None]
    _loaded: asyncio.Future[bool]
    _producer_lease_s: float
    """The producer reports in every third of it, so that a whole one without a message means that it is dead."""
    _attached: bool = False
    num_ready_blocks: int = 0
    released: bool = False

    async def wait_until_loaded(self, identity: ModelIdentity) -> str | None:
        """None: the core has loaded. Otherwise why it cannot."""
        until = time.monotonic() + CONNECT_S
        while not self._loaded.done():
            failure, is_unreachable = await self._try_attach(identity)
            if not is_unreachable or self._attached or time.monotonic() >= until:
                return failure
            await asyncio.wait([self._loaded], timeout=_RECONNECT_PAUSE_S)
        return None

    async def _try_attach(self, identity: ModelIdentity) -> tuple[str | None, bool]:
        """Why the core cannot load, if so, and whether that is because the producer is unreachable."""
        call: _Call = self._stub.Attach()
        try:
            await call.write(self._open(identity))
            return await self._read_stream(call), False
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details()
        except asyncio.InvalidStateError:  # written to a stream that has ended; its status has the reason
            code, details = await call.code(), await call.details()
        finally:
            call.cancel()
        # The request's id is the producer's own for this call, another one each time.
        return f"{code.name}: {without_request_id(details or '')}", code is grpc.StatusCode.UNAVAILABLE

    async def _read_stream(self, call: _Call) -> str | None:
        """Read and renew until the core has loaded, the stream ends, or the producer is silent for too long."""
        request = self._request
        silent_at = time.monotonic() + request.attach_timeout_s
        renew_at = silent_at
        reading: _Reading = asyncio.ensure_future(call.read())
        try:
            while True:
                next_s = max(0.0, min(silent_at, renew_at) - time.monotonic())
                ends: list[asyncio.Future[Any]] = [reading, self._loaded]
                await asyncio.wait(ends, timeout=next_s, return_when=asyncio.FIRST_COMPLETED)
                now = time.monotonic()
                if self._loaded.done():
                    if self._attached:  # before that, the producer does not read the stream
                        await self._release_on(call, reading)
                    return None
                if reading.done():
                    response = reading.result()
                    if not isinstance(response, pb.AttachResponse):
                        return f"{(await call.code()).name}: the producer ended the stream"
                    if (failure := self._handle(response)) is not None:
                        return failure
                    if not self._attached:  # attaching has just set the lease
                        self._attached, renew_at = True, now + self._renew_interval_s
                    silent_at = now + self._producer_lease_s
                    reading = asyncio.ensure_future(call.read())
                if now >= silent_at:
                    timeout_s = self._producer_lease_s if self._attached else request.attach_timeout_s
                    return f"no message from the producer for {timeout_s:g} s"
                if now >= renew_at:
                    await call.write(pb.AttachRequest(renew=pb.AttachRenew(lease_s=request.lease_s)))
                    renew_at = now + self._renew_interval_s
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await reading

    @property
    def _renew_interval_s(self) -> float:
        return min(self._request.lease_s, self._producer_lease_s) / 3

    def _handle(self, response: pb.AttachResponse) -> str | None:
        """Report the message as progress; returns the reason if the transfer has failed."""
        request_id = self._request.request_id
        match response.WhichOneof("event"):
            case "attached":
                if (lease_s := response.attached.lease_s) > 0:
                    self._producer_lease_s = lease_s
                metadata = response.attached.connector_metadata
                self._on_progress(KVProgress(request_id, 0, connector_metadata=metadata))
            case "ready":
                ready = response.ready
                if ready.num_ready_blocks > self.num_ready_blocks:
                    self.num_ready_blocks = ready.num_ready_blocks
                    self._on_progress(KVProgress(request_id, self.num_ready_blocks, digests=list(ready.digests)))
            case "complete":
                complete = response.complete
                digests = [complete.tail_digest] if complete.tail_digest else []
                self._on_progress(
                    KVProgress(request_id, self.num_ready_blocks, digests=digests, num_tokens=complete.num_tokens)
                )
            case "failed":
                return f"the producer failed: {response.failed.reason}"
            case _:
                return "the producer sent an unknown message"
        return None

    async def _release_on(self, call: _Call, reading: _Reading) -> None:
        """Release on the stream, and wait for its end, which confirms it."""
        is_loaded = not self._loaded.cancelled() and self._loaded.exception() is None and self._loaded.result()
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(_RELEASE_S):
                await call.write(pb.AttachRequest(release=pb.AttachRelease(loaded=is_loaded)))
                await call.done_writing()
                while await reading is not grpc.aio.EOF:  # the status comes after the messages in flight
                    reading = asyncio.ensure_future(call.read())
                self.released = await call.code() is grpc.StatusCode.OK

    def _open(self, identity: ModelIdentity) -> pb.AttachRequest:
        request = self._request
        return pb.AttachRequest(
            open=pb.AttachOpen(
                transfer_id=request.transfer_id,
                instance_epoch=request.instance_epoch,
                identity=identity_to_proto(identity),
                min_protocol_version=MIN_PROTOCOL_VERSION,
                max_protocol_version=MAX_PROTOCOL_VERSION,
                num_local_blocks=request.num_local_blocks,
            )
        )


async def _release(stub: KvTransferServiceStub, transfer_id: str) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await stub.Release(pb.ReleaseRequest(transfer_id=transfer_id), timeout=_RELEASE_S)
