"""The transfers that this instance reads: one task each, from the Decode call until the holder has been told to let go.

    begin ─▶ connecting ──reserved──▶ following ──loaded──▶ releasing ─▶ gone
                 └────────────────────────┴───let_go────────▲

A call never waits for its holder: `let_go` returns at once, so that a cancelled request's blocks are free here however
slow or dead the holder is. The task that is left behind ends within two seconds, and the front's stop waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc.aio

from engine.identity import ModelIdentity
from engine.messages import KVProgress, LoadedEvent
from instance.convert import TransferSource
from instance.peers import Peers
from kv_transfer.attach import TransferReader, follow_transfer
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from serving import tracing
from serving.errors import ServiceError

_log = logging.getLogger(__name__)
_FAREWELL_S = 1.0
"""For the good word on the stream; then the call that says it instead has as long."""


class Follower:
    """One transfer that a request here reads. Made by `Followers`; its methods do not block."""

    def __init__(self, spans: tracing.StageSpans, block_size: int) -> None:
        loop = asyncio.get_running_loop()
        self._spans = spans
        self._block_size = block_size
        self._gone = False
        self.reserved: asyncio.Future[int] = loop.create_future()
        self.loaded: asyncio.Future[bool] = loop.create_future()

    def follow(self, num_local_blocks: int) -> None:
        """The request has its blocks, of which the first `num_local_blocks` are filled: begin."""
        if not self.reserved.done():
            self.reserved.set_result(num_local_blocks)
            self._spans.next("kv.load")

    def arrived(self, event: LoadedEvent) -> None:
        """The core has what it will get: let go."""
        self._spans.note(
            {
                "tandem.num_blocks": -(-event.num_external_tokens // self._block_size),
                "tandem.num_external_tokens": event.num_external_tokens,
                "tandem.num_recomputed_blocks": event.num_recomputed_blocks,
                "tandem.reason": event.reason or "",
            }
        )
        self._end(whole=event.num_recomputed_blocks == 0)

    def release(self, *, whole: bool) -> None:
        """The request needs the KV no longer; `whole`: because everything wanted has come. The first word counts."""
        self._end(whole=whole, failure=None if whole else "the request needs it no longer")

    def _end(self, *, whole: bool, failure: str | None = None) -> None:
        if self.loaded.done():
            return
        if not self.reserved.done():
            self.reserved.set_result(0)
        self.loaded.set_result(whole)
        self._spans.next("kv.release", failure)
        if self._gone:
            self._spans.end()

    def gone(self, task: asyncio.Task[None]) -> None:
        """The task has ended, maybe long before the request lets go: the holder has been told, or could not be."""
        self._gone = True
        if self.loaded.done():
            self._spans.end("the holder was not told in time" if task.cancelled() else None)


class Followers:
    """Owns the tasks. Belongs to the front's event loop."""

    def __init__(
        self,
        peers: Peers,
        identity: ModelIdentity,
        on_progress: Callable[[KVProgress], None],
        *,
        lease_s: float,
        attach_timeout_s: float,
        connector: str = "",
    ) -> None:
        self._peers = peers
        self._connector = connector
        self._identity = identity
        self._on_progress = on_progress
        self._lease_s = lease_s
        self._attach_timeout_s = attach_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def following(self, source: TransferSource, request_id: str) -> Iterator[Follower]:
        """A follower for the time of a call; whatever ends the block, the transfer is released. Raises PermissionDenied
        for a source that is not dialled."""
        self._peers.check(source.address)
        attributes = {
            "gen_ai.request.id": request_id,
            "tandem.transfer_id": source.transfer_id,
            "tandem.connector": self._connector,
        }
        spans = tracing.StageSpans("kv.transfer", "kv.reserve", attributes)
        follower = Follower(spans, self._identity.block_size)
        task = asyncio.create_task(self._run(follower, source, request_id), name=f"follow {source.transfer_id}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(follower.gone)
        try:
            yield follower
        finally:
            follower.release(whole=False)
            asyncio.get_running_loop().call_later(_FAREWELL_S, task.cancel)

    async def close(self) -> None:
        """Waits until every holder has been told, or could not be."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * _FAREWELL_S)
        for task in self._tasks:
            task.cancel()

    @property
    def num_following(self) -> int:
        """Transfers that have not been released yet."""
        return len(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The request is not lost: without a word from its holder the core's own deadline ends the wait.
            _log.error("%s failed", task.get_name(), exc_info=error)

    async def _run(self, follower: Follower, source: TransferSource, request_id: str) -> None:
        try:
            async with self._peers.channel(source.address) as channel:
                await self._follow(channel, follower, source, request_id)
        except ServiceError as error:
            self._on_progress(KVProgress(request_id, 0, failed=error.message))

    async def _follow(
        self, channel: grpc.aio.Channel, follower: Follower, source: TransferSource, request_id: str
    ) -> None:
        reader = TransferReader(
            request_id=request_id,
            transfer_id=source.transfer_id,
            instance_epoch=source.instance_epoch,
            num_local_blocks=await follower.reserved,
            lease_s=self._lease_s,
            attach_timeout_s=self._attach_timeout_s,
        )
        await follow_transfer(
            KvTransferServiceStub(channel),
            reader,
            identity=self._identity,
            on_progress=self._on_progress,
            loaded=follower.loaded,
        )
