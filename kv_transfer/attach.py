"""The reader's front: follows one transfer at the instance that holds it, for one request of this core.

    open ─▶ attached ─▶ ready … ─▶ complete ─▶ (the core has loaded) ─▶ release
      └─ refused, broken, silent for a lease, failed ─▶ KVProgress(failed) ─▶ release

Every word becomes a KVProgress for the core, which starts to read; the core's LoadedEvent comes back as `loaded`.
Whatever ends this, the holder is told so once: on the stream while it lives, else by a call of its own that takes a
second at the most. If the holder hears neither, its lease runs out. One event loop; free of torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from engine.identity import ModelIdentity
from engine.messages import KVProgress
from kv_transfer.wire import MAX_PROTOCOL_VERSION, MIN_PROTOCOL_VERSION, identity_to_proto
from protos.tandem.v1 import kv_transfer_pb2 as pb
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub

_CONNECT_S = 0.7
"""How long a holder that cannot be reached is tried again: it may have restarted a moment ago. Seconds."""
_CONNECT_AGAIN_S = 0.1
_RELEASE_S = 1.0
"""How long a release may take before its lease is left to run out."""

_Call = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]
_Reading = asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class TransferReader:
    """One transfer and the request here that reads it."""

    request_id: str
    transfer_id: str
    instance_epoch: str
    num_local_blocks: int
    lease_s: float = 30.0
    """Lease to ask for in renewals; the holder's silence for so long is its death. Seconds."""
    attach_timeout_s: float = 30.0
    """How long the holder may take until it offers the transfer, seconds."""


async def follow_transfer(
    stub: KvTransferServiceStub,
    reader: TransferReader,
    *,
    identity: ModelIdentity,
    on_progress: Callable[[KVProgress], None],
    loaded: asyncio.Future[bool],
) -> None:
    """Follow until `loaded` is set (with whether everything wanted has come), then release. Never raises but for
    cancellation.

    After a failure `on_progress` has been told so and nothing more will come. Cancelling gives the transfer up.
    """
    follower = _Follower(stub, reader, on_progress, loaded)
    try:
        failure = await follower.run(identity)
        if failure is not None:
            on_progress(KVProgress(reader.request_id, follower.num_ready_blocks, failed=failure))
    finally:
        if not follower.released:
            await _shielded(_release(stub, reader.transfer_id))


class _Follower:
    """The stream, as long as it lives."""

    def __init__(
        self,
        stub: KvTransferServiceStub,
        reader: TransferReader,
        on_progress: Callable[[KVProgress], None],
        loaded: asyncio.Future[bool],
    ) -> None:
        self._stub = stub
        self._reader = reader
        self._on_progress = on_progress
        self._loaded = loaded
        self._lease_s = reader.lease_s
        self._attached = False
        self.num_ready_blocks = 0
        self.released = False

    async def run(self, identity: ModelIdentity) -> str | None:
        """None: the core has loaded. Otherwise why it will not."""
        until = time.monotonic() + _CONNECT_S
        while not self._loaded.done():
            failure, is_unreachable = await self._attempt(identity)
            if not is_unreachable or self._attached or time.monotonic() >= until:
                return failure
            await asyncio.wait([self._loaded], timeout=_CONNECT_AGAIN_S)
        return None

    async def _attempt(self, identity: ModelIdentity) -> tuple[str | None, bool]:
        """Why the core will not load, if so, and whether that is because nobody answers."""
        call: _Call = self._stub.Attach()
        try:
            await call.write(self._open(identity))
            return await self._follow(call), False
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}", error.code() is grpc.StatusCode.UNAVAILABLE
        except asyncio.InvalidStateError:  # written to a stream that has ended; its status says why
            code = await call.code()
            return f"{code.name}: {await call.details()}", code is grpc.StatusCode.UNAVAILABLE
        finally:
            call.cancel()

    async def _follow(self, call: _Call) -> str | None:
        """Read, renew and watch until one of the ends."""
        reader = self._reader
        silent_at = time.monotonic() + reader.attach_timeout_s
        renew_at = silent_at
        reading: _Reading = asyncio.ensure_future(call.read())
        try:
            while True:
                next_s = max(0.0, min(silent_at, renew_at) - time.monotonic())
                ends: list[asyncio.Future[Any]] = [reading, self._loaded]
                await asyncio.wait(ends, timeout=next_s, return_when=asyncio.FIRST_COMPLETED)
                now = time.monotonic()
                if self._loaded.done():
                    if self._attached:  # before that, the holder does not listen yet
                        await self._release_on(call, reading)
                    return None
                if reading.done():
                    response = reading.result()
                    if not isinstance(response, pb.AttachResponse):
                        return f"{(await call.code()).name}: the holder has ended the stream"
                    if (failure := self._told(response)) is not None:
                        return failure
                    if not self._attached:  # attaching has just set the lease: no hurry to renew it
                        self._attached, renew_at = True, now + self._lease_s / 3
                    silent_at = now + self._lease_s
                    reading = asyncio.ensure_future(call.read())
                if now >= silent_at:
                    patience_s = self._lease_s if self._attached else reader.attach_timeout_s
                    return f"no word from the holder for {patience_s:g} s"
                if now >= renew_at:
                    await call.write(pb.AttachRequest(renew=pb.AttachRenew(lease_s=reader.lease_s)))
                    renew_at = now + self._lease_s / 3
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await reading

    def _told(self, response: pb.AttachResponse) -> str | None:
        """Pass the holder's word on to the core; returns why, if it is that nothing more will come."""
        request_id = self._reader.request_id
        match response.WhichOneof("event"):
            case "attached":
                self._lease_s = min(self._reader.lease_s, response.attached.lease_s or self._reader.lease_s)
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
                return f"the holder failed: {response.failed.reason}"
            case _:
                return "the holder sent a message this side does not know"
        return None

    async def _release_on(self, call: _Call, reading: _Reading) -> None:
        """Say good-bye on the stream and see it end, so that the word has arrived."""
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(_RELEASE_S):
                await call.write(pb.AttachRequest(release=pb.AttachRelease(loaded=self._loaded_whole)))
                await call.done_writing()
                while await reading is not grpc.aio.EOF:  # the status comes after what was still under way
                    reading = asyncio.ensure_future(call.read())
                self.released = await call.code() is grpc.StatusCode.OK

    @property
    def _loaded_whole(self) -> bool:
        return not self._loaded.cancelled() and self._loaded.exception() is None and self._loaded.result()

    def _open(self, identity: ModelIdentity) -> pb.AttachRequest:
        reader = self._reader
        return pb.AttachRequest(
            open=pb.AttachOpen(
                transfer_id=reader.transfer_id,
                instance_epoch=reader.instance_epoch,
                identity=identity_to_proto(identity),
                min_protocol_version=MIN_PROTOCOL_VERSION,
                max_protocol_version=MAX_PROTOCOL_VERSION,
                num_local_blocks=reader.num_local_blocks,
            )
        )


async def _release(stub: KvTransferServiceStub, transfer_id: str) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await stub.Release(pb.ReleaseRequest(transfer_id=transfer_id), timeout=_RELEASE_S)


async def _shielded(releasing: Coroutine[None, None, None]) -> None:
    """See a release through, even when cancelled meanwhile; it is bounded by itself."""
    task = asyncio.ensure_future(releasing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
